"""The engines that run models, by name; settings and help name them, and load none."""

from collections.abc import Sequence
from typing import NamedTuple

from serving.worker.config import ModelRunConfig


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
