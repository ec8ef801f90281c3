"""Host memory for KV, and tiers behind it, in the chunks that an engine divides them into."""

import math

from mocker.sglang.config import SglangConfig
from mocker.tiers.config import HostMemory, Tier, whole_chunks
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size_of
from mocker.vllm.config import EngineConfig


def host_memory(engine: EngineConfig, timing: TimingConfig) -> HostMemory | None:
    """Return the host memory of a rank, in whole chunks as vLLM divides it.

    Raises:
        ValueError: it has no room for a chunk, or the size of the model's KV is unknown.
    """
    if not engine.has_host_memory:
        return None
    size = kv_size_of(timing, block_size=engine.block_size)
    num_bytes = engine.blocks_per_chunk * (size.block + size.window_block)
    num_chunks = engine.num_host_blocks // engine.blocks_per_chunk
    return HostMemory(
        num_chunks=num_chunks or _whole_chunks(engine, "kv_offloading_size", num_bytes),
        blocks_per_chunk=engine.blocks_per_chunk,
        eviction_policy=engine.eviction_policy,
        store_threshold=engine.store_threshold,
        offload_prompt_only=engine.offload_prompt_only,
        load_tokens_within_step=_tokens_within(engine.sync_load_budget_bytes, num_bytes, engine),
        chunk_bytes=num_bytes,
        bandwidth=engine.host_bandwidth_gb_s * 1e9 * size.num_parts,
        latency_s=engine.host_latency_us / 1e6,
        tiers=_tiers(engine, num_bytes),
        prefetch_policy=engine.kv_prefetch_policy,
        timeout_s=engine.kv_prefetch_timeout_s if engine.kv_prefetch_policy == "timeout" else math.inf,
        timeout_s_per_chunk=engine.kv_prefetch_timeout_s_per_1k_tokens
        * engine.blocks_per_chunk
        * engine.block_size
        / 1024,
    )


def hicache_memory(engine: SglangConfig, timing: TimingConfig, num_pages: int) -> HostMemory | None:
    """Return the host memory of an engine with so many pages on its GPUs, in pages as SGLang divides it (`HostKVCache`).

    Raises:
        ValueError: the size of the model's KV is unknown.
    """
    if not engine.enable_hierarchical_cache:
        return None
    page_size = engine.page_size
    size = kv_size_of(timing, block_size=page_size)
    num_tokens = int(num_pages * page_size * engine.host_ratio)
    if engine.hicache_size:
        num_tokens = int(engine.hicache_size * 1e9 // (size.block / page_size / size.num_parts))
    return HostMemory(
        num_chunks=num_tokens // page_size + 1,
        eviction_policy="lru",  # of no use: the radix tree evicts by radix_eviction_policy
        offload_prompt_only=False,
        chunk_bytes=size.block,
        bandwidth=engine.hicache_bandwidth_gb_s * 1e9 * size.num_parts,
        latency_s=engine.hicache_latency_us / 1e6,
        num_layers=size.num_layers,
    )


def _tiers(engine: EngineConfig, chunk_bytes: float) -> tuple[Tier, ...]:
    """Return a rank's tiers behind its host memory.

    Raises:
        ValueError: one has no room for a chunk.
    """
    if not engine.kv_disk_size:
        return ()
    disk = Tier(
        name="disk",
        num_chunks=_whole_chunks(engine, "kv_disk_size", chunk_bytes),
        bandwidth=engine.kv_disk_bandwidth_gb_s * 1e9,
        latency_s=engine.kv_disk_latency_ms / 1e3,
        lookup_s=engine.kv_disk_lookup_ms / 1e3,
        write_policy=engine.kv_disk_write_policy,
        eviction_policy=engine.kv_disk_eviction_policy,
    )
    return (disk,)


def _tokens_within(budget: int, chunk_bytes: float, engine: EngineConfig) -> int:
    """Return how many tokens' KV so many bytes are."""
    return int(budget * engine.blocks_per_chunk * engine.block_size // chunk_bytes)


def _whole_chunks(engine: EngineConfig, setting: str, chunk_bytes: float) -> int:
    return whole_chunks(
        setting, getattr(engine, setting), chunk_bytes=chunk_bytes, blocks_per_chunk=engine.blocks_per_chunk
    )
