"""Every dial of one simulated engine, named as vLLM names it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine."""

    block_size: int = 64
    """Tokens in a KV block."""

    num_gpu_blocks: int = 16384
    """KV blocks of one engine, counted as vLLM counts them: one is the null block and never used."""

    max_num_seqs: int = 256
    """Sequences that may run at once."""

    max_num_active_seqs: int | None = None
    """A lower limit on running sequences, where vLLM has one."""

    max_num_batched_tokens: int = 8192
    """Tokens one step may compute: the budget that prefill chunks and decodes share."""

    max_model_len: int | None = None
    """Prompt and output tokens a sequence may reach (none: no limit)."""

    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prefixes."""

    enable_chunked_prefill: bool = True
    """Let a prompt be computed over several steps."""

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission and, reversed, of preemption."""

    watermark: float = 0.0
    """Share of the blocks kept free when a sequence is admitted while others run."""

    scheduler_reserve_full_isl: bool = True
    """Admit a sequence only if the blocks of its whole prompt are free."""

    long_prefill_token_threshold: int = 0
    """Longest prefill chunk while other requests are present (0: no limit)."""

    long_prefill_token_threshold_adaptive: bool = False
    """Raise that threshold to an equal share of the budget when few requests are present."""

    speedup_ratio: float = 1.0
    """Divide every step's duration by this."""

    decode_speedup_ratio: float = 1.0
    """Divide the decode part of a step's duration by this, too."""

    dp_size: int = 1
    """Data-parallel ranks of a worker; each has its own scheduler and cache and is routed to by itself."""

    timing: Literal["polynomial", "constant"] = "polynomial"
    """Step-time model."""

    constant_prefill_ms: float = 20.0
    """Duration of the prefill part of a step, for the constant step-time model (ms)."""

    constant_decode_ms: float = 10.0
    """Duration of the decode part of a step, for the constant step-time model (ms)."""

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        for name, least in (
            ("block_size", 1),
            ("num_gpu_blocks", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("dp_size", 1),
            ("long_prefill_token_threshold", 0),
            ("constant_prefill_ms", 0),
            ("constant_decode_ms", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, not {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is a share of the blocks, from 0 to below 1, not {self.watermark}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs one token of the budget"
            )
        if self.timing == "constant" and self.constant_prefill_ms + self.constant_decode_ms == 0:
            raise ValueError("constant_prefill_ms and constant_decode_ms cannot both be 0")

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_gpu_blocks - 1

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens the KV cache holds, null block included, as Dynamo's polynomial counts them."""
        return self.num_gpu_blocks * self.block_size
