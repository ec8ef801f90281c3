"""What an engine is to the rest of us: one protocol, and the registry of those there are, loaded only when asked for."""

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import yaml

from serving.kv_events import KvEventPublisher
from serving.model_card import ModelFiles, ModelType
from serving.runtime.address import EndpointAddress
from serving.runtime.server import Stream

Result = TypeVar("Result")


class EngineError(Exception):
    """An engine that cannot be had or started; the message says why and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker."""

    endpoint: str = "dyn://dynamo.backend.generate"
    """Where it serves: dyn://namespace.component.endpoint; missing parts get defaults."""

    model_path: str = ""
    """Folder, Hugging Face id or GGUF file of the model (mocker: only its tokenizer; none: tokens are bytes of UTF-8)."""

    model_name: str = ""
    """Name that clients ask for (default: the folder's, file's or repository's)."""

    model_config: str = ""
    """Folder or Hugging Face id with the tokenizer and config.json, where a GGUF file lacks them."""

    context_length: int | None = None
    """Tokens a sequence may reach (default: the model's)."""

    migration_limit: int = 0
    """How often a request may go on at another worker when its own is lost (0 to 1023)."""

    kv_events: bool = True
    """Report KV events, if the engine can; otherwise routers predict what the worker holds."""

    drain_s: float = 30.0
    """How long requests in progress may take to finish once the process was asked to end (s)."""

    def __post_init__(self) -> None:
        """Refuse values without a meaning."""
        if not 0 <= self.migration_limit <= 1023:
            raise ValueError(f"migration_limit must be from 0 to 1023, not {self.migration_limit}")
        if self.context_length is not None and self.context_length < 1:
            raise ValueError(f"context_length must be at least 1, not {self.context_length}")

    @property
    def address(self) -> EndpointAddress:
        """Where it serves."""
        return EndpointAddress.parse(self.endpoint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunConfig:
    """How an engine runs a model."""

    kv_cache_block_size: int | None = None
    """Tokens in a KV block (default: the engine's own)."""

    tensor_parallel_size: int = 1
    """GPUs that one instance is spread over, on all its hosts together."""

    base_gpu_id: int = 0
    """The first GPU to use (sglang; for others set CUDA_VISIBLE_DEVICES)."""

    num_nodes: int = 1
    """Hosts that one instance is spread over."""

    node_rank: int = 0
    """Which of them this is; 0 leads."""

    leader_addr: str = ""
    """host:port at which the leader can be reached by the others."""

    extra_engine_args: Path | None = None
    """JSON or YAML file with any other arguments of the engine; they win over ours."""

    def __post_init__(self) -> None:
        """Refuse values that do not fit together."""
        if not 1 <= self.tensor_parallel_size <= 255:
            raise ValueError(f"--tensor-parallel-size must be from 1 to 255, not {self.tensor_parallel_size}")
        if self.num_nodes < 1:
            raise ValueError(f"--num-nodes must be at least 1, not {self.num_nodes}")
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(
                f"--node-rank must be from 0 to {self.num_nodes - 1} with --num-nodes {self.num_nodes}, not {self.node_rank}"
            )
        if self.num_nodes > 1 and not self.leader_addr:
            raise ValueError(f"--num-nodes {self.num_nodes} needs --leader-addr HOST:PORT, the same on every node")
        if self.leader_addr and not self.leader_addr.rpartition(":")[2].isdigit():
            raise ValueError(f"--leader-addr {self.leader_addr}: host:port was expected")
        if self.base_gpu_id < 0:
            raise ValueError(f"--base-gpu-id must be at least 0, not {self.base_gpu_id}")
        if self.kv_cache_block_size is not None and self.kv_cache_block_size < 1:
            raise ValueError(f"--kv-cache-block-size must be at least 1, not {self.kv_cache_block_size}")

    @property
    def leader(self) -> tuple[str, int]:
        """The leader's host and port."""
        host, _, port = self.leader_addr.rpartition(":")
        return host, int(port)

    def extra(self) -> dict[str, Any]:
        """Read `extra_engine_args`.

        Raises:
            ValueError: the file cannot be read, or holds something else than an object.
        """
        return {} if self.extra_engine_args is None else read_arguments(self.extra_engine_args)


def read_arguments(path: Path) -> dict[str, Any]:
    """Read engine arguments from a JSON or YAML file.

    Raises:
        ValueError: it cannot be read, or holds something else than an object.
    """
    is_yaml = path.suffix in (".yaml", ".yml")
    try:
        text = path.read_text()
        values = yaml.safe_load(text) if is_yaml else json.loads(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(
            f"--extra-engine-args {path}: {error}; a {'YAML' if is_yaml else 'JSON'} file was expected"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"--extra-engine-args {path}: {'a YAML mapping' if is_yaml else 'a JSON object'} was expected")
    return values


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


ENGINES = {
    "mistralrs": EngineEntry(
        "mistralrs.MistralRs", "mistralrs", "mistralrs", "mistral.rs: Hugging Face folders and GGUF, CPU or GPU"
    ),
    "llamacpp": EngineEntry("llamacpp.LlamaCpp", "llama_cpp", "llama_cpp", "llama.cpp: GGUF, CPU or GPU"),
    "vllm": EngineEntry("vllm.Vllm", "vllm", "vllm", "vLLM"),
    "sglang": EngineEntry("sglang.SgLang", "sglang", "sglang", "SGLang"),
    "trtllm": EngineEntry("trtllm.TrtLlm", "trtllm", "tensorrt_llm", "TensorRT-LLM"),
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


def flags_to_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """Turn the flags after `--` into arguments of the engine: `--max-num-seqs 8 --enforce-eager` into max_num_seqs=8, enforce_eager=True.

    Raises:
        ValueError: something else is among them.
    """
    arguments: dict[str, Any] = {}
    waiting: str | None = None
    for word in flags:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            arguments[name] = yaml.safe_load(value) if equals else True
            waiting = None if equals else name
        elif waiting is None:
            raise ValueError(f"{word!r} after --: engine arguments as --name value were expected")
        else:
            arguments[waiting] = yaml.safe_load(word)
            waiting = None
    return arguments


def call_with(function: Any, arguments: dict[str, Any]) -> Any:
    """Call an engine's constructor, and name what it does not take.

    Raises:
        EngineError: it does not take these arguments.
    """
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(f"{getattr(function, '__name__', function)} refuses its arguments: {first}") from error


def refuse_gpu_choice(engine: str, run: ModelRunConfig) -> None:
    """Refuse --base-gpu-id for engines that choose GPUs by the environment.

    Raises:
        ValueError: it is given.
    """
    if run.base_gpu_id:
        raise ValueError(f"out={engine} has no --base-gpu-id: set CUDA_VISIBLE_DEVICES to the GPUs it may use")


def refuse_nodes(engine: str, run: ModelRunConfig, hint: str) -> None:
    """Refuse --num-nodes and --tensor-parallel-size for engines that find their GPUs themselves.

    Raises:
        ValueError: one is given.
    """
    default = ModelRunConfig()
    for name in ("tensor_parallel_size", "num_nodes", "base_gpu_id", "leader_addr"):
        if getattr(run, name) != getattr(default, name):
            raise ValueError(f"out={engine} has no use for --{name.replace('_', '-')}: {hint}")


def replace_model(worker: WorkerConfig, model: str | None) -> WorkerConfig:
    """Return the settings with a model named by position."""
    return worker if model is None else dataclasses.replace(worker, model_path=model)


def required_model(worker: WorkerConfig, engine: str) -> str:
    """Return the model's path.

    Raises:
        ValueError: there is none.
    """
    if not worker.model_path:
        raise ValueError(f"out={engine} needs a model: a folder, a GGUF file or a Hugging Face id")
    return worker.model_path


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
