"""The engines that run models, by name; each is loaded only when asked for."""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

from serving.worker.config import ModelRunConfig, WorkerConfig, flags_to_arguments
from serving.worker.engine import Engine, EngineError


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
    hands_over: bool = False
    """Whether one of its workers can read the KV that another computed."""


ENGINES = {
    "mistralrs": EngineEntry(
        "mistralrs.MistralRs", "mistralrs", "mistralrs", "mistral.rs: Hugging Face folders and GGUF, CPU or GPU"
    ),
    "llamacpp": EngineEntry("llamacpp.LlamaCpp", "llama_cpp", "llama_cpp", "llama.cpp: GGUF, CPU or GPU"),
    "vllm": EngineEntry("vllm.Vllm", "vllm", "vllm", "vLLM", "gpu_memory_utilization", hands_over=True),
    "sglang": EngineEntry("sglang.SgLang", "sglang", "sglang", "SGLang", "mem_fraction_static", hands_over=True),
    "trtllm": EngineEntry(
        "trtllm.TrtLlm",
        "trtllm",
        "tensorrt_llm",
        "TensorRT-LLM",
        "kv_cache_config.free_gpu_memory_fraction",
        hands_over=True,
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
    entry = ENGINES[name]
    if not entry.hands_over:
        refuse_role(worker, name)
    module, _, adapter = entry.adapter.partition(".")
    made = getattr(importlib.import_module(f"serving.engines.{module}"), adapter)
    engine: Engine = made(worker, run, flags_to_arguments(arguments))
    return engine


def refuse_role(worker: WorkerConfig, engine: str) -> None:
    """Refuse to be a worker that does one part of each request, for engines that cannot hand KV over.

    Raises:
        ValueError: it is to be one.
    """
    if worker.role != "aggregated":
        able = ", ".join(("mocker", *(name for name, entry in ENGINES.items() if entry.hands_over)))
        raise ValueError(f"role is {worker.role!r}; expected 'aggregated' with {engine}: only {able} hand KV over")


def check_installed(name: str) -> None:
    """Make sure that an engine's package is there, before anything is downloaded for it.

    Raises:
        EngineError: it is not.
    """
    if importlib.util.find_spec(ENGINES[name].package) is None:
        raise not_installed(name)


def not_installed(name: str) -> EngineError:
    """Return what to raise where the package of one of `ENGINES` is not there."""
    package = ENGINES[name].package
    return EngineError(
        f"{name} needs the Python package {package}, which is not installed: pip install 'dynabench[{name}]'"
    )
