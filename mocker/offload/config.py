"""Every dial of KV beyond the GPU, named as vLLM names it where vLLM has it, and what follows from them."""

import math
from dataclasses import dataclass
from typing import Literal

from foundation.settings import Count, NotNegative, Positive, Whole, check

Policy = Literal["lru", "arc"]
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Settings of one engine's host memory."""

    kv_offloading_size: NotNegative = 0.0
    """Host memory that keeps KV which the GPU evicts, of each data-parallel rank, for all its GPUs together (GiB; 0: none)."""

    blocks_per_chunk: Count = 1
    """KV blocks in a chunk of host memory; a chunk is stored, loaded and evicted as a whole."""

    eviction_policy: Policy = "lru"
    """Which chunks leave host memory first: the least recently used, or as ARC decides."""

    store_threshold: Whole = 0
    """How often a chunk must be offered to host memory until it is stored (below 2: it is stored at once)."""

    offload_prompt_only: bool = True
    """Keep the KV of prompts in host memory, not of answers."""

    host_bandwidth_gb_s: Positive = 32.0
    """What each GPU copies to host memory, and from it, at the same time (GB/s each way)."""

    host_latency_us: NotNegative = 20.0
    """What each copy between a GPU and host memory takes beyond its bytes (us)."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can run with."""
        check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """One engine's host memory, and the way to it."""

    num_chunks: Count
    blocks_per_chunk: Count = 1
    eviction_policy: Policy = "lru"
    store_threshold: Whole = 0
    offload_prompt_only: bool = True
    chunk_bytes: float = 0.0
    bandwidth: float = math.inf
    """Bytes/s each way."""
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that nothing can run with."""
        check(self)
