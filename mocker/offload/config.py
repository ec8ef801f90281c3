"""Every dial of KV beyond the GPU, named as vLLM names it where vLLM has it, and what follows from them."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from foundation.settings import Count, NotNegative, Positive, Whole, check

Policy = Literal["lru", "arc"]
TierName = Literal["disk", "store"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["when_scheduled", "wait_complete", "timeout", "best_effort"]
GIB = 1 << 30
Size = Annotated[float, Meta(ge=0, le=1_000_000_000)]
"""Of a tier (GiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Settings of one engine's host memory, and of the disk behind it."""

    kv_offloading_size: Size = 0.0
    """Host memory that keeps KV which the GPU evicts, of each data-parallel rank, for all its GPUs together (GiB; 0: none)."""

    num_host_blocks: Whole = 0
    """Host memory of each data-parallel rank in KV blocks, as Dynamo's mocker counts it, in place of kv_offloading_size (0: as that
    says)."""

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

    kv_disk_size: Size = 0.0
    """Local disk that keeps KV behind host memory, of each data-parallel rank (GiB; 0: none)."""

    kv_disk_bandwidth_gb_s: Positive = 7.0
    """What a rank reads from its disk, and writes to it, at the same time (GB/s each way)."""

    kv_disk_latency_ms: NotNegative = 0.1
    """What each read from disk, and each write, takes before its first byte (ms)."""

    kv_disk_lookup_ms: NotNegative = 0.1
    """How long it takes to learn which chunks of a prompt are on disk (ms)."""

    kv_disk_write_policy: WritePolicy = "write_through"
    """When a chunk is written to disk: as soon as host memory has it, once it was loaded from there again, or when it leaves
    host memory."""

    kv_disk_eviction_policy: Policy = "lru"
    """Which chunks leave the disk first."""

    kv_prefetch_policy: PrefetchPolicy = "when_scheduled"
    """When chunks of a prompt are fetched from disk or store, and how long the prompt waits: from its first turn on, until all
    have come (vLLM); or from when it comes, until all have come, for a time, or not at all beyond its turn (SGLang)."""

    kv_prefetch_timeout_s: NotNegative = 1.0
    """With timeout: how long a fetch may last ..."""

    kv_prefetch_timeout_s_per_1k_tokens: NotNegative = 0.25
    """... and how much longer for each 1,024 tokens it brings."""

    @property
    def has_host_memory(self) -> bool:
        """Whether KV is kept in host memory at all."""
        return self.kv_offloading_size > 0 or self.num_host_blocks > 0

    def __post_init__(self) -> None:
        """Refuse values that nothing can run with."""
        check(self)
        if self.num_host_blocks and self.kv_offloading_size:
            raise ValueError(
                f"num_host_blocks is {self.num_host_blocks}, and kv_offloading_size is {self.kv_offloading_size:g}; expected one of "
                "them: both say how much host memory there is"
            )
        if 0 < self.num_host_blocks < self.blocks_per_chunk:
            raise ValueError(
                f"num_host_blocks is {self.num_host_blocks}; expected at least blocks_per_chunk, {self.blocks_per_chunk}, or 0 for none"
            )
        if self.kv_disk_size and not self.has_host_memory:
            raise ValueError(
                f"kv_disk_size is {self.kv_disk_size:g}, and kv_offloading_size is 0; expected host memory, too: what is on disk "
                "passes through it"
            )
        if self.kv_disk_size and self.store_threshold > 1:
            raise ValueError(
                f"store_threshold is {self.store_threshold}; expected 0 with a disk behind host memory, as vLLM has it"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place for KV beyond host memory, as one engine uses it."""

    name: TierName
    num_chunks: int
    """That it holds, of all engines together if they share it."""
    bandwidth: float
    """Bytes/s each way."""
    latency_s: float = 0.0
    lookup_s: float = 0.0
    write_policy: WritePolicy = "write_through"
    eviction_policy: Policy = "lru"


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
    tiers: tuple[Tier, ...] = ()
    """What is behind it, nearest first."""
    prefetch_policy: PrefetchPolicy = "when_scheduled"
    timeout_s: float = math.inf
    """How long a fetch may last ..."""
    timeout_s_per_chunk: float = 0.0
    """... and how much longer for each chunk it brings."""

    def __post_init__(self) -> None:
        """Refuse values that nothing can run with."""
        check(self)
