"""Every setting of KV beyond the GPU, named as in vLLM where vLLM has it, and the values derived from them."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from foundation.settings import Count, NotNegative, Positive, Unit, Whole, changed, check_settings, short_value

Policy = Literal["lru", "arc"]
TierName = Literal["disk", "store"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["when_scheduled", "wait_complete", "timeout", "best_effort"]
GIB = 1 << 30
PAGE_BYTES = 4096
"""vLLM rounds chunks up to a multiple of this."""
MAX_GIB = 1_000_000_000
WorkerSize = Annotated[float, Meta(ge=0, le=MAX_GIB), Unit("GiB for each data-parallel rank")]
"""Size of a tier that each worker, or each of its data-parallel ranks, has to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Settings of one engine's host memory and of the disk behind it."""

    kv_offloading_size: WorkerSize = 0.0
    """Host memory for KV, per data-parallel rank, shared by all its GPUs (GiB; 0: none)."""

    num_host_blocks: Whole = 0
    """Host memory per data-parallel rank in KV blocks, as in Dynamo's mocker (0: kv_offloading_size applies; set only one of them)."""

    blocks_per_chunk: Count = 1
    """KV blocks in a chunk; host memory, disk and store keep, move and evict whole chunks."""

    eviction_policy: Policy = "lru"
    """How host memory chooses the chunks to evict: the least recently used, or by ARC (adaptive replacement)."""

    store_threshold: Whole = 0
    """How many times a chunk must be offered before host memory stores it (0 or 1: once)."""

    offload_prompt_only: bool = True
    """Keep only the KV of prompts in host memory, not the KV of answers."""

    sync_load_budget_bytes: Whole = 0
    """Most bytes that a step loads from host memory before it computes; a request whose KV fits in that starts at once, and
    others wait for theirs while steps go on (0: all wait)."""

    host_bandwidth_gb_s: Positive = 32.0
    """Bandwidth between each GPU and host memory, in each direction (GB/s)."""

    host_latency_us: NotNegative = 20.0
    """Fixed time of each copy between a GPU and host memory, in addition to the time for its bytes (us)."""

    kv_disk_size: WorkerSize = 0.0
    """Local disk for KV behind host memory, per data-parallel rank (GiB; 0: none)."""

    kv_disk_bandwidth_gb_s: Positive = 7.0
    """Bandwidth of a rank's disk, for reads and for writes (GB/s each)."""

    kv_disk_latency_ms: NotNegative = 0.1
    """Time before the first byte of each read from disk and each write to it (ms)."""

    kv_disk_lookup_ms: NotNegative = 0.1
    """Time to look up which chunks of a prompt are on disk (ms)."""

    kv_disk_write_policy: WritePolicy = "write_through"
    """When a chunk is written to disk: when host memory stores it (write_through), after it is loaded from host memory
    (write_through_selective), or when host memory evicts it (write_back)."""

    kv_disk_eviction_policy: Policy = "lru"
    """How the disk chooses the chunks to evict."""

    kv_prefetch_policy: PrefetchPolicy = "when_scheduled"
    """When a prompt's chunks are fetched from disk or store. when_scheduled (vLLM): at its first turn, and it waits for
    all of them. The others, as in SGLang, start when the prompt arrives: wait_complete waits for all of them, timeout for a
    limited time, best_effort only until its turn."""

    kv_prefetch_timeout_s: NotNegative = 1.0
    """With kv_prefetch_policy timeout: how long a fetch may take (s); kv_prefetch_timeout_s_per_1k_tokens adds to
    it."""

    kv_prefetch_timeout_s_per_1k_tokens: NotNegative = 0.25
    """Time added to kv_prefetch_timeout_s for each 1,024 tokens of the fetch (s)."""

    @property
    def has_host_memory(self) -> bool:
        """Whether KV is kept in host memory at all."""
        return self.kv_offloading_size > 0 or self.num_host_blocks > 0

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        check_settings(self)
        if self.num_host_blocks and self.kv_offloading_size:
            raise ValueError(
                f"num_host_blocks is {self.num_host_blocks}, and kv_offloading_size is {self.kv_offloading_size:g}; expected only "
                "one of them: both set the size of host memory"
            )
        if 0 < self.num_host_blocks < self.blocks_per_chunk:
            raise ValueError(
                f"num_host_blocks is {self.num_host_blocks}; expected at least blocks_per_chunk, {self.blocks_per_chunk}, or 0 for none"
            )
        if self.kv_disk_size and not self.has_host_memory:
            raise ValueError(
                f"kv_disk_size is {self.kv_disk_size:g}, and kv_offloading_size is 0; expected host memory, too: KV on disk "
                "passes through it"
            )
        if self.kv_disk_size and self.store_threshold > 1:
            raise ValueError(
                f"store_threshold is {self.store_threshold}; expected 0 with a disk behind host memory, as in vLLM"
            )


OF_HOST_MEMORY = (
    "blocks_per_chunk",
    "eviction_policy",
    "store_threshold",
    "offload_prompt_only",
    "sync_load_budget_bytes",
    "host_bandwidth_gb_s",
    "host_latency_us",
)
OF_DISK = (
    "kv_disk_bandwidth_gb_s",
    "kv_disk_latency_ms",
    "kv_disk_lookup_ms",
    "kv_disk_write_policy",
    "kv_disk_eviction_policy",
)
OF_FETCHES = ("kv_prefetch_policy", "kv_prefetch_timeout_s", "kv_prefetch_timeout_s_per_1k_tokens")
OF_TIMEOUTS = OF_FETCHES[1:]


def refuse_idle_tiers(engines: Collection[OffloadConfig], *, has_store: bool) -> None:
    """Refuse a setting of a tier that no engine of an experiment has (sizes may vary from engine to engine).

    Raises:
        ValueError: one is not at its default.
    """
    if not any(engine.has_host_memory for engine in engines):
        refuse_idle(engines, OF_HOST_MEMORY, "there is no host memory for KV; expected kv_offloading_size with it")
    has_disk = any(engine.kv_disk_size for engine in engines)
    if not has_disk:
        refuse_idle(engines, OF_DISK, "there is no disk for KV; expected kv_disk_size with it")
    if not (has_disk or has_store):
        refuse_idle(engines, OF_FETCHES, "there is no tier behind host memory; expected a disk or a store with it")
    if not any(engine.kv_prefetch_policy == "timeout" for engine in engines):
        refuse_idle(engines, OF_TIMEOUTS, "kv_prefetch_policy is not timeout; expected timeout with it")


def refuse_idle(settings: Iterable[Any], names: Collection[str], why: str) -> None:
    """Refuse the named settings unless they have their defaults, because they have no effect.

    Raises:
        ValueError: one is not.
    """
    for each in settings:
        for name, value in changed(each).items():
            if name in names:
                raise ValueError(f"{name} is {short_value(value)}, but {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place for KV beyond host memory, as one engine uses it."""

    name: TierName
    num_chunks: int
    """How many it holds, for all engines together if they share it."""
    bandwidth: float
    """Bytes/s each way."""
    latency_s: float = 0.0
    lookup_s: float = 0.0
    write_policy: WritePolicy = "write_through"
    eviction_policy: Policy = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """One engine's host memory and the link to it."""

    num_chunks: Count
    blocks_per_chunk: Count = 1
    eviction_policy: Policy = "lru"
    store_threshold: Whole = 0
    offload_prompt_only: bool = True
    load_tokens_within_step: Whole = 0
    """Most tokens that a step loads before it computes."""
    chunk_bytes: float = 0.0
    bandwidth: float = math.inf
    """Bytes/s each way."""
    latency_s: float = 0.0
    num_layers: Whole = 0
    """A step waits for its loads layer by layer, and has so many layers (0: its loads do not hold it back)."""
    tiers: tuple[Tier, ...] = ()
    """The tiers behind it, nearest first."""
    prefetch_policy: PrefetchPolicy = "when_scheduled"
    timeout_s: float = math.inf
    """How long a fetch may last ..."""
    timeout_s_per_chunk: float = 0.0
    """... and how much longer for each chunk it brings."""

    def __post_init__(self) -> None:
        """Refuse values that no engine can run with."""
        check_settings(self)


def whole_pages(chunk_bytes: float) -> float:
    """Return how many bytes a chunk occupies in a tier."""
    return -(-chunk_bytes // PAGE_BYTES) * PAGE_BYTES


def whole_chunks(setting: str, size: float, *, chunk_bytes: float, blocks_per_chunk: int) -> int:
    """Return how many chunks, rounded up to whole pages, fit in a tier of a size (GiB) taken from a setting.

    Raises:
        ValueError: it has no room for one.
    """
    padded = whole_pages(chunk_bytes)
    num_chunks = int(size * GIB // padded)
    if not num_chunks:
        raise ValueError(
            f"{setting} is {size:g} GiB; expected at least {padded / GIB:.4g}, one chunk (blocks_per_chunk is {blocks_per_chunk}), "
            "or 0 for none"
        )
    return num_chunks
