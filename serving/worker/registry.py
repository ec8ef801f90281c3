"""The engines that run models, by name; each is loaded only when used."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from foundation.extras import install
from serving.worker.config import ModelRunConfig, WorkerConfig, flags_to_arguments
from serving.worker.engine import Engine, EngineError


class EngineEntry(NamedTuple):
    """An engine that runs models."""

    adapter: str
    """The class in `serving.engines`, called with (worker, run, arguments)."""
    command: str
    """`python -m serving.COMMAND` runs it."""
    package: str
    """The Python package that it needs."""
    description: str
    memory_argument: str = ""
    """Its argument for the share of a device's memory (empty: it takes what the model and context need)."""
    hands_over: bool = False
    """Whether one of its workers can read the KV that another computed."""


ENGINES = {
    "mistralrs": EngineEntry(
        "mistralrs.MistralRs", "mistralrs", "mistralrs", "mistral.rs: Hugging Face folders and GGUF, CPU or GPU"
    ),
    "llamacpp": EngineEntry("llamacpp.engine.LlamaCpp", "llama_cpp", "llama_cpp", "llama.cpp: GGUF, CPU or GPU"),
    "vllm": EngineEntry("vllm.engine.Vllm", "vllm", "vllm", "vLLM", "gpu_memory_utilization", hands_over=True),
    "sglang": EngineEntry("sglang.engine.SgLang", "sglang", "sglang", "SGLang", "mem_fraction_static", hands_over=True),
    "trtllm": EngineEntry(
        "trtllm.engine.TrtLlm",
        "trtllm",
        "tensorrt_llm",
        "TensorRT-LLM",
        "kv_cache_config.free_gpu_memory_fraction",
        hands_over=True,
    ),
}
"""Engines that run models; each needs its own package."""


class EngineChoice(NamedTuple):
    """One of `ENGINES` with its settings, for processes to be started."""

    name: str
    run: ModelRunConfig
    arguments: Sequence[str] = ()

    @property
    def module(self) -> str:
        """The module to run with `python -m`."""
        return f"serving.{ENGINES[self.name].command}"


def make_engine(name: str, worker: WorkerConfig, run: ModelRunConfig, arguments: Sequence[str] = ()) -> Engine:
    """Make one of `ENGINES`; nothing is loaded yet.

    Raises:
        ValueError: the settings do not fit the engine.
    """
    entry = ENGINES[name]
    if not entry.hands_over:
        refuse_role(worker, name)
    module, _, adapter = entry.adapter.rpartition(".")
    made = getattr(importlib.import_module(f"serving.engines.{module}"), adapter)
    engine: Engine = made(worker, run, flags_to_arguments(arguments))
    return engine


def refuse_role(worker: WorkerConfig, engine: str) -> None:
    """Reject a role of prefill or decode for engines that cannot hand KV over."""
    if worker.role != "aggregated":
        able = ", ".join(("mocker", *(name for name, entry in ENGINES.items() if entry.hands_over)))
        raise ValueError(f"role is {worker.role!r}; expected 'aggregated' with {engine}: only {able} hand KV over")


def check_installed(name: str) -> None:
    """Check that an engine's package is installed, before anything is downloaded for it.

    Raises:
        EngineError: it is not installed.
    """
    if importlib.util.find_spec(ENGINES[name].package) is None:
        raise not_installed(name)


def not_installed(name: str) -> EngineError:
    """Return the error for an engine of `ENGINES` whose package is not installed."""
    package = ENGINES[name].package
    return EngineError(f"{name} needs the Python package {package}, which is not installed: {install(name)}")
