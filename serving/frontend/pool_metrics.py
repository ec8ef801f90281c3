"""What workers report and routers book, as metrics under Dynamo's names."""

from collections.abc import Collection, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.frontend.metrics import COMPONENT, PREFIX, WORKER
from serving.frontend.models import ModelPool, Models

REPORTED = {
    "kv_active_blocks": ("KV blocks in use", "kv_active_blocks"),
    "kv_total_blocks": ("KV blocks in total", "kv_total_blocks"),
    "requests_running": ("Requests in the batch", "num_running"),
    "requests_waiting": ("Requests waiting for a place in the batch", "num_waiting"),
}
"""What each worker reports."""

TRANSFERRED = {
    "kv_prompts_held": ("Prompts whose KV is being kept for other workers", "num_held"),
    "kv_prompts_waiting": ("Prompts waiting for memory for their KV or for their other worker", "num_waiting"),
    "kv_prompts_loading": ("Prompts whose KV is being read now", "num_loading"),
}
"""What each worker that shares requests with others reports."""

TRANSFERS = {
    "kv_prompts_expired": ("Prompts whose KV was dropped because nobody read it in time", "num_expired"),
    "kv_transfer_failures": ("Transfers of KV that failed", "num_failed"),
}
"""The same, for counts that only grow."""

KEPT = {
    "kv_offload_tiering_used_bytes": ("Bytes of KV kept in the tier", "used_bytes"),
    "kv_offload_tiering_capacity_bytes": ("Bytes of KV that the tier can keep", "capacity_bytes"),
}
"""What each tier of a worker's KV beyond the GPU reports; under vLLM's names if it has them."""

MOVED = {
    "kv_offload_tiering_read_bytes": ("Bytes read from the tier", "read_bytes"),
    "kv_offload_tiering_read_time": ("Seconds that reads took", "read_s"),
    "kv_offload_tiering_reads": ("Reads", "num_reads"),
    "kv_offload_tiering_write_bytes": ("Bytes written to the tier", "write_bytes"),
    "kv_offload_tiering_write_time": ("Seconds that writes took", "write_s"),
    "kv_offload_tiering_writes": ("Writes", "num_writes"),
    "kv_offload_tiering_chunk_queries": (
        "Chunks looked up in the tier (not counted for host memory)",
        "num_asked",
    ),
    "kv_offload_tiering_chunk_hits": ("Chunks that were found in the tier", "num_hits"),
    "kv_offload_tiering_chunk_evictions": ("Chunks evicted to make room for others", "num_evicted"),
    "kv_offload_tiering_faults": (
        "Wrong chunks, and reads, writes and look-ups that failed or took too long",
        "num_faults",
    ),
    "kv_offload_allocation_failure": ("Chunks (host memory: requests) for which there was no room", "num_refused"),
    "kv_offload_flushes": ("Copies between GPU and host memory that a step had to wait for", "num_flushes"),
    "kv_offload_stall_time": ("Seconds that steps waited for such copies", "stall_s"),
}
"""The same, for counts that only grow."""

DRAFTED = {
    "spec_decode_num_drafts": ("How often drafts of a request were verified", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted", "num_draft_tokens"),
    "spec_decode_num_batches": ("Steps of the engine that verified drafts", "num_batches"),
}
"""What each worker that speculates reports, under vLLM's names if it has them; besides these, what was accepted."""
ACCEPTED = "spec_decode_num_accepted_tokens"

BOOKED = {
    "worker_active_decode_blocks": (
        "KV blocks of the requests in flight there, as the router counts them",
        "decode_blocks",
    ),
    "worker_active_prefill_tokens": ("Prompt tokens sent there and not computed yet", "prefill_tokens"),
    "worker_requests": ("Requests in flight there", "num_requests"),
}
"""What the router has booked on each worker."""


def pool_gauges(models: Models) -> list[Metric]:
    """Return what the workers of each pool last reported, and what the router knows about them, as metrics.

    `worker_type` is their role; NVIDIA Dynamo calls aggregated workers decode workers.
    """
    workers = GaugeMetricFamily(f"{PREFIX}workers", "Workers that can be routed to", labels=["model", "worker_type"])
    for labels, count in models.num_workers().items():
        workers.add_metric(labels, count)
    pools = models.pools()
    return [*_reported(pools), *_booked(pools), workers]


def _reported(pools: Collection[ModelPool]) -> Iterator[Metric]:
    for name, (text, attribute) in REPORTED.items():
        gauge = GaugeMetricFamily(COMPONENT + name, text, labels=["model", "instance", "rank", "worker_type"])
        for pool in pools:
            for rank, report in sorted(pool.loads().items()):
                labels = [pool.card.name, f"{rank.instance_id:x}", str(rank.dp_rank), pool.card.role]
                gauge.add_metric(labels, getattr(report, attribute))
        yield gauge
    sharing = [pool for pool in pools if pool.card.role != "aggregated"]
    families: dict[type[GaugeMetricFamily | CounterMetricFamily], dict[str, tuple[str, str]]]
    families = {GaugeMetricFamily: TRANSFERRED, CounterMetricFamily: TRANSFERS}
    for family, names in families.items():
        for name, (text, attribute) in names.items():
            metric = family(COMPONENT + name, text, labels=["model", "instance", "worker_type"])
            for pool in sharing:
                for rank, report in sorted(pool.loads().items()):
                    if not rank.dp_rank:  # rank 0 reports for all ranks
                        labels = [pool.card.name, f"{rank.instance_id:x}", pool.card.role]
                        metric.add_metric(labels, getattr(report.kv_transfers, attribute))
            yield metric
    for family, names in {GaugeMetricFamily: KEPT, CounterMetricFamily: MOVED}.items():
        for name, (text, attribute) in names.items():
            metric = family(COMPONENT + name, text, labels=["model", "instance", "rank", "worker_type", "tier"])
            for pool in pools:
                for rank, report in sorted(pool.loads().items()):
                    labels = [pool.card.name, f"{rank.instance_id:x}", str(rank.dp_rank), pool.card.role]
                    for tier in report.kv_tiers:
                        metric.add_metric([*labels, tier.name], getattr(tier, attribute))
            yield metric
    yield from _drafted(pools)


def _drafted(pools: Collection[ModelPool]) -> Iterator[Metric]:
    """Yield what came of drafts."""
    names = ["model", "instance", "rank", "worker_type"]
    found = [
        ([pool.card.name, f"{rank.instance_id:x}", str(rank.dp_rank), pool.card.role], report.drafts)
        for pool in pools
        for rank, report in sorted(pool.loads().items())
        if report.drafts is not None
    ]
    for name, (text, attribute) in DRAFTED.items():
        metric = CounterMetricFamily(COMPONENT + name, text, labels=names)
        for labels, drafts in found:
            metric.add_metric(labels, getattr(drafts, attribute))
        yield metric
    metric = CounterMetricFamily(COMPONENT + ACCEPTED, "Drafted tokens that were accepted", labels=names)
    for labels, drafts in found:
        metric.add_metric(labels, sum(drafts.num_accepted))
    yield metric
    name = f"{COMPONENT}{ACCEPTED}_per_pos"
    metric = CounterMetricFamily(name, "Drafts that were accepted, by position", labels=[*names, "position"])
    for labels, drafts in found:
        for place, count in enumerate(drafts.num_accepted):
            metric.add_metric([*labels, str(place)], count)
    yield metric


def _booked(pools: Collection[ModelPool]) -> Iterator[Metric]:
    for name, (text, attribute) in BOOKED.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model", *WORKER])
        for pool in pools:
            for rank, books in pool.books():
                labels = [pool.card.name, f"{rank.instance_id:x}", str(rank.dp_rank), pool.card.role]
                gauge.add_metric(labels, getattr(books, attribute))
        yield gauge
