"""Every dial of one simulated engine, named as vLLM names it."""

import functools
import math
from dataclasses import dataclass
from typing import Literal

DEFAULT_NUM_BLOCKS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine."""

    block_size: int = 64
    """Tokens in a KV block."""

    num_gpu_blocks: int | None = None
    """KV blocks of one engine, counted as vLLM counts them, one being the null block that is never used (default: as many
    as --model leaves room for on --gpu, else 16384)."""

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
    """Divide every step's duration by this (0: by infinity, so that steps take no time)."""

    decode_speedup_ratio: float = 1.0
    """Divide the decode part of a step's duration by this, too (0: by infinity)."""

    dp_size: int = 1
    """Data-parallel ranks of a worker; each has its own scheduler and cache and is routed to by itself."""

    timing: Literal["polynomial", "constant", "roofline", "calibrated", "table"] | None = None
    """Step-time model (default: roofline if --gpu is given, what --timing-file holds if that is, else polynomial)."""

    timing_file: str | None = None
    """Step times measured on a real engine: what `dynabench calibrate` wrote, or a table (.npz, .csv, .parquet)."""

    model: str | None = None
    """The model: its Hugging Face id, or a folder or file with a config.json. With --gpu its step times are predicted;
    in live runs it is also the name under which it is served (default there: mock)."""

    gpu: str | None = None
    """GPU the model runs on, such as h100 or rtx-pro-6000 (`dynabench hardware` lists them)."""

    tensor_parallel_size: int = 1
    """GPUs that share each layer of the model."""

    enable_expert_parallel: bool = False
    """Give each GPU whole experts of a mixture, rather than a slice of every expert."""

    quantization: Literal["bfloat16", "fp8", "fp4", "int4"] | None = None
    """Type of the weights (default: the model's)."""

    kv_cache_dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    """Type of the KV cache."""

    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV cache."""

    link_gbps: float | None = None
    """Bandwidth of all-reduces between the engine's GPUs (GB/s of NCCL's bus bandwidth), where it is not that of the bundled GPU."""

    timed_as: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Engine whose host times the roofline adds."""

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
            ("tensor_parallel_size", 1),
            ("long_prefill_token_threshold", 0),
            ("constant_prefill_ms", 0),
            ("constant_decode_ms", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.link_gbps is not None and not self.link_gbps > 0:
            raise ValueError(f"link_gbps must be greater than 0, not {self.link_gbps}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is a share of the blocks, from 0 to below 1, not {self.watermark}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence needs one token of the budget"
            )
        if self.timing == "constant" and self.constant_prefill_ms + self.constant_decode_ms == 0:
            raise ValueError("constant_prefill_ms and constant_decode_ms cannot both be 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization is a share, above 0 and up to 1, not {self.gpu_memory_utilization}"
            )
        if self.gpu is not None and self.model is None:
            raise ValueError(f"gpu {self.gpu} needs a model: a Hugging Face id, or a folder or file with a config.json")
        if self.timing == "roofline" and self.gpu is None:
            raise ValueError("timing roofline needs a gpu and a model")
        if self.timing in ("calibrated", "table") and self.timing_file is None:
            raise ValueError(f"timing {self.timing} needs a timing_file")
        if self.timing_file is not None and self.timing not in (None, "calibrated", "table"):
            raise ValueError(f"timing_file and timing {self.timing} exclude each other")

    @property
    def timing_name(self) -> str:
        """The step-time model: as given, or what the other settings imply."""
        if self.timing is not None:
            return self.timing
        if self.timing_file is not None:
            return "calibrated" if self.timing_file.endswith(".json") else "table"
        return "polynomial" if self.gpu is None else "roofline"

    @property
    def speedup(self) -> float:
        """What every step's duration is divided by."""
        return self.speedup_ratio or math.inf

    @property
    def decode_speedup(self) -> float:
        """What the duration of steps that decode is divided by."""
        return self.speedup * (self.decode_speedup_ratio or math.inf)

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks of one engine, null block included.

        Raises:
            ValueError: they follow from a GPU and a model that are not known, or that do not fit.
        """
        if self.num_gpu_blocks is not None:
            return self.num_gpu_blocks
        return _blocks_that_fit(self)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can hold tokens: all but the null block."""
        return self.num_kv_blocks - 1

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens the KV cache holds, null block included, as Dynamo's polynomial counts them."""
        return self.num_kv_blocks * self.block_size

    @property
    def expert_parallel_size(self) -> int:
        """GPUs over which whole experts are spread."""
        return self.tensor_parallel_size * self.dp_size if self.enable_expert_parallel else 1


@functools.lru_cache(maxsize=256)
def _blocks_that_fit(config: EngineConfig) -> int:
    from mocker.timing import files as timing_files
    from mocker.timing.gpu import find_gpu
    from mocker.timing.memory import num_kv_blocks
    from mocker.timing.model_shape import find_model

    if config.timing_file is not None:
        return timing_files.num_blocks(config.timing_file) or DEFAULT_NUM_BLOCKS
    if config.gpu is None or config.model is None:
        return DEFAULT_NUM_BLOCKS
    return num_kv_blocks(
        find_model(config.model),
        find_gpu(config.gpu),
        block_size=config.block_size,
        utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=config.max_num_batched_tokens,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel_size=config.expert_parallel_size,
        weights=config.quantization or "",
        kv_dtype=config.kv_cache_dtype,
    )
