"""How an engine computes images, where its model decides that."""

from dataclasses import replace

from mocker.timing.config import TimingConfig
from mocker.vllm.config import EngineConfig


def needs_whole_items(engine: EngineConfig, timing: TimingConfig) -> bool:
    """Return whether vLLM computes the tokens of an item in one step whatever is set (`platforms/cuda.py`, 0.32 and 0.33)."""
    if engine.max_tokens_per_mm_item is None or timing.model is None:
        return False
    try:
        return timing.shape.sees_whole_items
    except ValueError:
        if timing.timing_name == "roofline":
            raise
        return False  # measured or generic times only name a model


def with_whole_items(engine: EngineConfig, timing: TimingConfig) -> EngineConfig:
    """Return the settings as vLLM has them once it knows the model.

    Raises:
        ValueError: an item would then never be computed.
    """
    if engine.disable_chunked_mm_input or not needs_whole_items(engine, timing):
        return engine
    try:
        return replace(engine, disable_chunked_mm_input=True)
    except ValueError as error:
        raise ValueError(f"{error}; vLLM sets disable_chunked_mm_input for {timing.model}") from error
