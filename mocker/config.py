"""Whose scheduler a simulated engine has, and the settings of each family."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from foundation.settings import changed
from mocker.contract import EngineSettings
from mocker.sglang.config import SglangConfig
from mocker.timing.config import TimingConfig
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import EngineConfig

EngineType = Literal["vllm", "sglang", "trtllm"]
"""Engines whose schedulers can be simulated."""

SCHEDULERS: dict[EngineType, str] = {
    "vllm": "vLLM 0.32's",
    "sglang": "SGLang 0.5.23's",
    "trtllm": "TensorRT-LLM's (its Python scheduler of 2026)",
}
"""What each schedules as, for reports."""

OWN_NAMES: dict[EngineType, dict[str, str]] = {
    "vllm": {},
    "sglang": {"num_gpu_blocks": "max_total_tokens"},
    "trtllm": {
        "num_gpu_blocks": "kv_cache_max_tokens",
        "max_num_batched_tokens": "max_num_tokens",
        "enable_chunked_prefill": "enable_chunked_context",
    },
}
"""What settings of vLLM are called elsewhere, for messages."""

UNCACHED: dict[EngineType, dict[str, bool]] = {
    "vllm": {"enable_prefix_caching": False},
    "sglang": {"disable_radix_cache": True},
    "trtllm": {"enable_block_reuse": False},
}
"""What turns prefix caching off."""

FamilyConfig = EngineConfig | SglangConfig | TrtllmConfig
"""The settings of one engine, of whichever family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTypeConfig:
    """Whose scheduler simulated engines have."""

    engine_type: EngineType = "vllm"
    """Whose scheduler simulated engines have. Each has settings of its own, by its own names."""


def config_of(kind: EngineType, vllm: EngineConfig, sglang: SglangConfig, trtllm: TrtllmConfig) -> FamilyConfig:
    """Return the settings of one family.

    Raises:
        ValueError: a setting of another family is given, which would be ignored.
    """
    configs: dict[EngineType, FamilyConfig] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}
    for name, other in idle_settings(kind, configs).items():
        flag = name.replace("_", "-")
        raise ValueError(f"--{flag} is a setting of --engine-type {other}; --engine-type is {kind}")
    return configs[kind]


def idle_settings(kind: EngineType, configs: Mapping[EngineType, FamilyConfig]) -> dict[str, EngineType]:
    """Return the settings that are given and belong to another family, with that family."""
    return {name: other for other, config in configs.items() if other != kind for name in changed(config)}


def type_of(config: EngineSettings) -> EngineType:
    """Return whose settings these are."""
    match config:
        case EngineConfig():
            return "vllm"
        case SglangConfig():
            return "sglang"
        case TrtllmConfig():
            return "trtllm"
        case _:
            raise TypeError(f"{type(config).__name__} is the settings of no engine that is simulated")


def flag_of(config: EngineSettings, name: str) -> str:
    """Return the flag of a setting of vLLM as the engine calls it."""
    own = OWN_NAMES[type_of(config)].get(name, name)
    return f"--{own.replace('_', '-')}"


def with_block_size(config: FamilyConfig, size: int) -> FamilyConfig:
    """Return the settings with so many tokens in a block, whatever the engine calls it."""
    match config:
        case EngineConfig():
            return replace(config, block_size=size)
        case SglangConfig():
            return replace(config, page_size=size)
        case TrtllmConfig():
            return replace(config, tokens_per_block=size)


def timed_as(kind: EngineType, timing: TimingConfig) -> TimingConfig:
    """Return step times with the host times of a family, if they are not set.

    Raises:
        ValueError: they are those of a third engine.
    """
    if kind in ("vllm", timing.timed_as):
        return timing
    if timing.timed_as != "vllm":
        raise ValueError(f"timed_as is {timing.timed_as!r}; expected {kind!r}, as engine_type")
    return replace(timing, timed_as=kind)
