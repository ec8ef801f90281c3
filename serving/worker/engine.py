"""What an engine is to the rest of us: one protocol, and the registry of those there are, loaded only when asked for."""

import asyncio
import contextlib
import importlib
import importlib.util
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from serving.model.card import ModelType
from serving.model.files import ModelFiles
from serving.runtime.server import Stream
from serving.worker.config import ModelRunConfig, WorkerConfig, flags_to_arguments
from serving.worker.kv_events import KvEventPublisher

Result = TypeVar("Result")


class EngineError(Exception):
    """An engine that cannot be had or started; the message says why and what would help."""


@dataclass(frozen=True)
class EngineCall:
    """An exact call that makes an engine, as `--dry-run` shows it."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = "".join(f"    {name}={value!r},\n" for name, value in self.arguments.items())
        return f"{self.function}(\n{lines})" if lines else f"{self.function}()"


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What an engine tells of itself once it runs."""

    model_type: ModelType = ModelType.Backend
    block_size: int = 16
    """Tokens in a KV block."""
    context_length: int | None = None
    num_ranks: int = 1
    """Data-parallel ranks, each of which is routed to by itself."""
    has_kv_events: bool = False


class EngineLoad(NamedTuple):
    """What a rank of an engine is doing now."""

    num_running: int = 0
    num_waiting: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    max_num_seqs: int = 0


class Engine(Protocol):
    """An engine in this process (its own processes may be others)."""

    @property
    def calls(self) -> tuple[EngineCall, ...]:
        """How it is made; known before anything is loaded."""
        ...

    @property
    def traits(self) -> EngineTraits:
        """Known once started."""
        ...

    async def start(self, files: ModelFiles) -> None:
        """Load the model.

        Raises:
            EngineError: it cannot be had, or does not start.
        """
        ...

    def publish_to(self, publishers: Sequence[KvEventPublisher]) -> None:
        """Report KV events from now on, each rank's to its publisher; called once, if it has any."""
        ...

    def service(self, request: msgspec.Raw, stream: Stream) -> None:
        """Take up a request."""
        ...

    def load(self, rank: int) -> EngineLoad:
        """Tell what a rank is doing."""
        ...

    async def failed(self) -> None:
        """Wait until the engine has failed for good, and raise why."""
        ...

    async def close(self) -> None:
        """Stop everything and give everything back, also after a start that failed."""
        ...


class EngineEntry(NamedTuple):
    """An engine that can be asked for."""

    adapter: str
    """The class in `serving.engines`, made of (worker, run, arguments)."""
    command: str
    """What `python -m serving.COMMAND` runs it."""
    package: str
    """The Python package it needs, and the extra of ours that installs it."""
    description: str
    memory_argument: str = ""
    """Its argument for the share of a device's memory that it takes (none: it takes what the model and context need)."""


ENGINES = {
    "mistralrs": EngineEntry(
        "mistralrs.MistralRs", "mistralrs", "mistralrs", "mistral.rs: Hugging Face folders and GGUF, CPU or GPU"
    ),
    "llamacpp": EngineEntry("llamacpp.LlamaCpp", "llama_cpp", "llama_cpp", "llama.cpp: GGUF, CPU or GPU"),
    "vllm": EngineEntry("vllm.Vllm", "vllm", "vllm", "vLLM", "gpu_memory_utilization"),
    "sglang": EngineEntry("sglang.SgLang", "sglang", "sglang", "SGLang", "mem_fraction_static"),
    "trtllm": EngineEntry(
        "trtllm.TrtLlm", "trtllm", "tensorrt_llm", "TensorRT-LLM", "kv_cache_config.free_gpu_memory_fraction"
    ),
}
"""Engines that run models, each behind a package of its own."""


class EngineChoice(NamedTuple):
    """One of `ENGINES` with its settings, for processes that are to be started."""

    name: str
    run: ModelRunConfig
    arguments: Sequence[str] = ()

    @property
    def module(self) -> str:
        """What `python -m` runs it."""
        return f"serving.{ENGINES[self.name].command}"


def make_engine(name: str, worker: WorkerConfig, run: ModelRunConfig, arguments: Sequence[str] = ()) -> Engine:
    """Make one of `ENGINES`; nothing is loaded yet.

    Raises:
        ValueError: the settings do not fit the engine.
    """
    module, _, adapter = ENGINES[name].adapter.partition(".")
    made = getattr(importlib.import_module(f"serving.engines.{module}"), adapter)
    engine: Engine = made(worker, run, flags_to_arguments(arguments))
    return engine


def check_installed(name: str) -> None:
    """Make sure that an engine's package is there, before anything is downloaded for it.

    Raises:
        EngineError: it is not.
    """
    if importlib.util.find_spec(ENGINES[name].package) is None:
        raise _missing(name)


def _missing(name: str) -> EngineError:
    package = ENGINES[name].package
    return EngineError(
        f"{name} needs the Python package {package}, which is not installed: pip install 'dynabench[{name}]'"
    )


def require(name: str) -> Any:
    """Import the package of one of `ENGINES`.

    Raises:
        EngineError: it is not installed.
    """
    package = ENGINES[name].package
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != package:
            raise EngineError(f"the Python package {package} does not load here: {error}") from error
        raise _missing(name) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(f"the Python package {package} does not load here: {error}") from error


def call_with(function: Any, arguments: dict[str, Any]) -> Any:
    """Call an engine's constructor, and name what it does not take.

    Raises:
        EngineError: it does not take these arguments.
    """
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise EngineError(f"{getattr(function, '__name__', function)} refuses its arguments: {message}") from error


async def in_thread(work: Callable[[], Result], *, until: threading.Event | None = None) -> Result:
    """Run something in a thread of its own, which does not keep the process from ending when nobody waits any more.

    Processes that it starts do not see Ctrl-C: they are ours to end, once requests in progress are done.

    Args:
        work: what to run.
        until: keeps the thread alive after the work; on Linux a process may have asked to die with the thread that
            started it, as SGLang's do.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by child processes
        try:
            outcome: tuple[Result | None, BaseException | None] = (work(), None)
        except BaseException as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is gone: the process ends
            loop.call_soon_threadsafe(settle, *outcome)
        if until is not None:
            until.wait()

    threading.Thread(target=run, daemon=True).start()
    return await future
