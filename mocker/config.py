"""Whose scheduler a simulated engine has, and the settings of each family."""

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Literal

from foundation.settings import changed
from mocker.contract import EngineSettings, KvRole
from mocker.sglang import config as sglang
from mocker.sglang.config import OF_DECODE, OF_HICACHE, SglangConfig
from mocker.tiers.config import refuse_idle
from mocker.timing.config import TimingConfig
from mocker.trtllm import config as trtllm
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import OF_ENCODER as OF_ENCODER
from mocker.vllm.config import OF_LORA as OF_LORA
from mocker.vllm.config import OF_SPECULATION as OF_SPECULATION
from mocker.vllm.config import EngineConfig
from mocker.vllm.versions import NEWEST as NEWEST
from mocker.vllm.versions import EngineVersion as EngineVersion
from mocker.vllm.versions import version_of as version_of

EngineType = Literal["vllm", "sglang", "trtllm"]
"""Engines whose schedulers can be simulated."""

SCHEDULERS: dict[EngineType, str] = {
    "vllm": "vLLM's",
    "sglang": "SGLang 0.5.23's",
    "trtllm": "TensorRT-LLM's (its Python scheduler of 2026)",
}
"""What each schedules as, for reports; vLLM's has a version beside."""

OWN_NAMES: dict[EngineType, dict[str, str]] = {
    "sglang": {
        "num_gpu_blocks": "max_total_tokens",
        "block_size": "page_size",
        "max_num_seqs": "max_running_requests",
        "max_num_batched_tokens": "chunked_prefill_size",
        "max_model_len": "context_length",
        "gpu_memory_utilization": "mem_fraction_static",
        "enable_prefix_caching": "disable_radix_cache",
        "async_scheduling": "disable_overlap_schedule",
        "scheduling_policy": "enable_priority_scheduling",
    },
    "trtllm": {
        "num_gpu_blocks": "kv_cache_max_tokens",
        "block_size": "tokens_per_block",
        "max_num_seqs": "max_batch_size",
        "max_num_batched_tokens": "max_num_tokens",
        "max_model_len": "max_seq_len",
        "gpu_memory_utilization": "kv_cache_free_gpu_memory_fraction",
        "enable_prefix_caching": "enable_block_reuse",
        "enable_chunked_prefill": "enable_chunked_context",
        "async_scheduling": "disable_overlap_scheduler",
    },
}
"""What settings of vLLM, or those in their place, are called elsewhere, for messages."""

VLLM_ALONE = ("gpu_memory_utilization", "max_cudagraph_capture_size")
"""Settings of `TimingConfig` that only vLLM has by these names."""

UNCACHED: dict[EngineType, dict[str, bool]] = {
    "vllm": {"enable_prefix_caching": False},
    "sglang": {"enable_hierarchical_cache": False, "disable_radix_cache": True},  # in this order
    "trtllm": {"enable_block_reuse": False},
}
"""What turns prefix caching off."""

MODES = {role: mode for mode, role in sglang.ROLES.items()}
"""What SGLang calls the parts in disaggregation."""
SERVER_ROLES = {role: name for name, role in trtllm.ROLES.items()}
"""What TensorRT-LLM calls them."""

FamilyConfig = EngineConfig | SglangConfig | TrtllmConfig
"""The settings of one engine, of whichever family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTypeConfig:
    """Whose scheduler simulated engines have."""

    engine_type: EngineType = "vllm"
    """Whose scheduler simulated engines have. Each has settings of its own, by its own names."""


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """Everything about one simulated engine."""

    type: EngineTypeConfig = EngineTypeConfig()
    vllm: EngineConfig = EngineConfig()  # noqa: RUF009
    sglang: SglangConfig = SglangConfig()  # noqa: RUF009
    trtllm: TrtllmConfig = TrtllmConfig()  # noqa: RUF009
    timing: TimingConfig = TimingConfig()  # noqa: RUF009

    @property
    def configs(self) -> dict[EngineType, FamilyConfig]:
        """The settings by family."""
        return {"vllm": self.vllm, "sglang": self.sglang, "trtllm": self.trtllm}

    @property
    def config(self) -> FamilyConfig:
        """The settings of the family that it belongs to."""
        return self.configs[self.type.engine_type]

    @property
    def idle(self) -> dict[str, str]:
        """The settings that are given and belong to another family, and why they are ignored."""
        given = [name for config in (*self.configs.values(), self.timing) for name in changed(config)]
        return {name: reason for name in given if (reason := self.why_idle(name))}

    def why_idle(self, name: str) -> str | None:
        """Return why a setting has no effect, if it belongs to another family; else None."""
        own = self.type.engine_type
        if name in _names(self.config):
            return None
        owners = [kind for kind, config in self.configs.items() if name in _names(config)]
        if own != "vllm" and name in VLLM_ALONE:
            owners = ["vllm"]
        if not owners:
            return None
        names = OWN_NAMES.get(own, {})
        instead = f"; use {names[name]}" if name in names else ""
        return f"it is a setting of engine_type {owners[0]}, and engine_type is {own}{instead}"

    def why_unused(self, name: str) -> str | None:
        """Return why a setting has no effect: it belongs to another family, or to what is turned off; else None."""
        if name in OF_HICACHE and not self.sglang.enable_hierarchical_cache:
            return "enable_hierarchical_cache is false"
        if name in OF_SPECULATION and not self.vllm.num_speculative_tokens:
            return "num_speculative_tokens is 0"
        if name in OF_LORA and not self.vllm.enable_lora:
            return "enable_lora is false"
        if name in OF_ENCODER and not self.vllm.has_encoder:
            return "max_tokens_per_mm_item is none"
        return self.why_idle(name)

    def refuse_idle(self) -> None:
        """Refuse a setting of another family, which would be ignored.

        Raises:
            ValueError: one is given; the message begins with its name.
        """
        for name, reason in self.idle.items():
            raise ValueError(f"{name} has no effect: {reason}")


def _names(config: FamilyConfig) -> list[str]:
    return [field.name for field in fields(config)]


def refuse_idle_speculation(engines: Collection[EngineConfig]) -> None:
    """Refuse a setting of speculative decoding if no engine of an experiment has any.

    Raises:
        ValueError: one is not at its default.
    """
    if not any(engine.num_speculative_tokens for engine in engines):
        refuse_idle(engines, OF_SPECULATION, "num_speculative_tokens is 0; expected the number of drafts with it")


def refuse_idle_encoder(engines: Collection[EngineConfig]) -> None:
    """Refuse a setting of encoders if no engine of an experiment has one.

    Raises:
        ValueError: one is not at its default.
    """
    if not any(engine.has_encoder for engine in engines):
        refuse_idle(engines, OF_ENCODER, "there is no encoder; expected max_tokens_per_mm_item with it")


def refuse_idle_lora(engines: Collection[EngineConfig]) -> None:
    """Refuse a setting of LoRA adapters if no engine of an experiment has any.

    Raises:
        ValueError: one is not at its default.
    """
    if not any(engine.enable_lora for engine in engines):
        refuse_idle(engines, OF_LORA, "there are no adapters; expected enable_lora with it")


def refuse_idle_hicache(engines: Collection[SglangConfig]) -> None:
    """Refuse a setting of HiCache that no engine of an experiment has.

    Raises:
        ValueError: one is not at its default.
    """
    if not any(engine.enable_hierarchical_cache for engine in engines):
        refuse_idle(engines, OF_HICACHE, "there is no host memory for KV; expected enable_hierarchical_cache with it")


def refuse_idle_decoding(engines: Collection[SglangConfig]) -> None:
    """Refuse a setting of SGLang's decode workers, where there are none.

    Raises:
        ValueError: one is not at its default.
    """
    refuse_idle(engines, OF_DECODE, "no worker only decodes; expected decode workers with it")


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


def own_name(config: EngineSettings, name: str) -> str:
    """Return what the engine calls a setting of vLLM."""
    kind = type_of(config)
    return name if kind == "vllm" else OWN_NAMES[kind][name]


def flag_of(config: EngineSettings, name: str) -> str:
    """Return the flag of a setting of vLLM as the engine calls it."""
    return f"--{own_name(config, name).replace('_', '-')}"


def with_block_size(config: FamilyConfig, size: int) -> FamilyConfig:
    """Return the settings with so many tokens in a block, whatever the engine calls it."""
    match config:
        case EngineConfig():
            return replace(config, block_size=size)
        case SglangConfig():
            return replace(config, page_size=size)
        case TrtllmConfig():
            return replace(config, tokens_per_block=size)


def in_role(config: FamilyConfig, role: KvRole | None) -> FamilyConfig:
    """Return the settings of an engine with this part in disaggregation, whatever the engine calls it.

    Raises:
        ValueError: the engine has no such part.
    """
    match config:
        case EngineConfig():
            return replace(config, kv_role=role)
        case SglangConfig():
            if role == "kv_both":
                raise ValueError("an engine of SGLang computes prompts for others or answers them; expected not both")
            return replace(config, disaggregation_mode="null" if role is None else MODES[role])
        case TrtllmConfig():
            if role == "kv_both":
                raise ValueError(
                    "a server of TensorRT-LLM computes prompts for others or answers them; expected not both"
                )
            return replace(config, server_role=None if role is None else SERVER_ROLES[role])


def timed_as(kind: EngineType, timing: TimingConfig) -> TimingConfig:
    """Return step times with the host times of the engine's own family; vLLM's scheduler may have another engine's.

    Raises:
        ValueError: they are those of another engine.
    """
    if kind == "vllm":
        return replace(timing, timed_as=None) if timing.timed_as == "vllm" else timing
    if timing.timed_as not in (None, kind):
        raise ValueError(f"timed_as is {timing.timed_as!r}; expected {kind!r}, as engine_type, or none")
    return timing if timing.timed_as == kind else replace(timing, timed_as=kind)
