"""What is read off a rank when somebody asks for its metrics: its queues, its blocks, and what its scheduler counts."""

from serving.engines.mock.rank import MockEngine
from serving.stand_in.vllm.metrics.exposition import Values
from serving.worker.engine import EngineLoad, KvTier

STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
"""Of waiting requests whose KV is loaded."""


def state_of(rank: MockEngine, *, has_connector: bool) -> Values:
    """Return the gauges of a rank, and the counters that it keeps itself."""
    queues = rank.queues()
    fetching = (queues.num_kv_wanted, queues.num_kv_loading, queues.num_kv_loaded)
    return {
        "vllm:num_requests_running": {(): queues.num_running},
        "vllm:num_requests_waiting": {(): queues.num_waiting},
        "vllm:num_requests_waiting_by_reason": {
            ("capacity",): queues.num_waiting - queues.num_deferred,
            ("deferred",): queues.num_deferred,
        },
        "vllm:num_requests_kv_fetch_by_stage": {(stage,): count for stage, count in zip(STAGES, fetching, strict=True)},
        "vllm:kv_cache_usage_perc": {(): queues.kv_usage},
        **_cached(rank, has_connector=has_connector),
        **_drafted(rank),
    }


def _drafted(rank: MockEngine) -> Values:
    counts = rank.draft_counts
    if counts is None:
        return {}
    return {
        "vllm:spec_decode_num_drafts": {(): counts.steps},
        "vllm:spec_decode_num_draft_tokens": {(): counts.drafts},
        "vllm:spec_decode_num_accepted_tokens": {(): sum(counts.accepted)},
        "vllm:spec_decode_num_accepted_tokens_per_pos": {
            (str(place),): count for place, count in enumerate(counts.accepted)
        },
    }


def _cached(rank: MockEngine, *, has_connector: bool) -> Values:
    found, is_cached = rank.prefix_cache_stats, rank.config.enable_prefix_caching
    values: dict[str, dict[tuple[str, ...], float]] = {
        "vllm:prefix_cache_queries": {(): found.num_tokens if is_cached else 0},
        "vllm:prefix_cache_hits": {(): found.num_hits},
        "vllm:prompt_tokens_cached_by_source": {
            ("device",): found.num_hits,
            ("host",): found.num_host,
            ("disk",): found.num_disk,
            ("p2p",): found.num_elsewhere,
        },
    }
    if has_connector:
        values["vllm:external_prefix_cache_queries"] = {(): found.num_tokens - found.num_hits + found.num_unasked}
        values["vllm:external_prefix_cache_hits"] = {(): found.num_external}
    return values


def sleep_state(level: int | None) -> dict[tuple[str, ...], float]:
    """Return the gauge of an engine that sleeps at a level, or is awake (None). At level 0 it is only paused."""
    state = "awake" if level is None else {1: "weights_offloaded", 2: "discard_all"}.get(level)
    return {} if state is None else {(state,): 1}


def transfers_of(load: EngineLoad) -> Values:
    """Return what was counted of KV transfers."""
    return {
        "vllm:nixl_num_failed_transfers": {(): load.kv_transfers.num_failed},
        "vllm:nixl_num_kv_expired_reqs": {(): load.kv_transfers.num_expired},
    }


def copies_of(host: KvTier) -> Values:
    """Return what was counted of the copies between the GPU and host memory, once there were some."""
    loads = {"bytes": host.read_bytes, "time": host.read_s}
    stores = {"bytes": host.write_bytes, "time": host.write_s}
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for what in ("bytes", "time"):
        values[f"vllm:kv_offload_total_{what}"] = {("CPU_to_GPU",): loads[what], ("GPU_to_CPU",): stores[what]}
        if host.num_reads:
            values[f"vllm:kv_offload_load_{what}"] = {(): loads[what]}
        if host.num_writes:
            values[f"vllm:kv_offload_store_{what}"] = {(): stores[what]}
    if host.num_refused:
        values["vllm:kv_offload_allocation_failure"] = {(): host.num_refused}
    return values
