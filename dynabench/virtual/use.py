"""Utilisation of a cluster's ranks, their links and their KV tiers, until its last answer ended.

The clock may continue after that, because leases end later, but nothing is computed or sent then.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from dynabench.deployment.engines import SimulatedPool
from dynabench.deployment.prefill import prefill_s
from dynabench.draft_gains import gains_of
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.planner import SimulatedPlanner
from dynabench.virtual.rank import Rank
from mocker.network import links
from mocker.tiers.host_link import Direction
from mocker.tiers.storage import Storage
from reports.figures.adapters import adapters_asked
from reports.record.fleet import FleetUse, PoolFleet
from reports.record.pools import (
    AdapterUse,
    DraftUse,
    EncoderUse,
    KvOverTime,
    LinkUse,
    PoolUse,
    TierTraffic,
    TierUse,
    Use,
)
from reports.record.records import Requests


class Crew(NamedTuple):
    """The ranks that a pool had."""

    pool: SimulatedPool
    ranks: list[Rank]
    there_s: list[float]
    """How long each of them accepted requests (s)."""
    size: int
    """The maximum number at one time."""


def pool_use(cluster: Cluster) -> tuple[PoolUse, ...]:
    """Return how busy the ranks of each pool were."""
    found = []
    for pool, ranks, there_s, size in _crews(cluster):
        busy_s, gpus = [rank.busy_s for rank in ranks], pool.gpus_per_rank
        shares = [min(busy / there, 1.0) if there else 0.0 for busy, there in zip(busy_s, there_s, strict=True)]
        found.append(PoolUse(pool.name, pool.role, size, size * gpus, Use.of(shares), sum(busy_s) * gpus))
    return tuple(found)


def fleet_use(cluster: Cluster, planner: SimulatedPlanner | None) -> FleetUse:
    """Return how the workers changed until the last answer ended."""
    fleet, length_s = cluster.fleet, _length_s(cluster)
    died_s = {name: tuple(time for time in times if time <= length_s) for name, times in fleet.died_s.items()}
    pools = tuple(
        PoolFleet(
            name,
            pool.role,
            pool.gpus_per_worker,
            tuple(row for row in fleet.history[name] if row.time_s <= length_s),
            gpu_s=fleet.gpu_s(name, length_s),
            failed_starts=fleet.num_failed_starts[name],
            died=len(died_s[name]),
            died_s=died_s[name],
        )
        for name, pool in fleet.pools.items()
    )
    if planner is None:
        return FleetUse(pools, length_s, lost=cluster.flights.num_lost)
    return FleetUse(
        pools,
        length_s,
        planner=planner.planner.name,
        changes=tuple(planner.changes),
        decisions=planner.num_decisions,
        notes=planner.notes,
        lost=cluster.flights.num_lost,
    )


def draft_use(cluster: Cluster) -> tuple[DraftUse, ...]:
    """Return what each pool that speculates has drafted."""
    found = []
    for pool, ranks, _, _ in _crews(cluster):
        counts = [rank.engine.draft_counts for rank in ranks if rank.engine.draft_counts is not None]
        if counts and pool.role != "prefill":
            accepted = tuple(map(sum, zip(*[each.accepted for each in counts], strict=True)))
            steps, batches = sum([each.steps for each in counts]), sum([each.batches for each in counts])
            use = DraftUse(pool.name, steps, sum([each.drafts for each in counts]), accepted, steps / max(batches, 1))
            found.append(structs.replace(use, gains=gains_of(pool.engine, use.length, cluster.workload)))
    return tuple(found)


def encoder_use(cluster: Cluster, requests: Requests) -> tuple[EncoderUse, ...]:
    """Return what the encoders of each pool did, if requests had images or other media."""
    if not cluster.workload.columns.has_media:
        return ()
    num_items = np.array([len(media) for media in cluster.workload.columns.values("media")])
    found = []
    for pool, ranks, _, _ in _crews(cluster):
        counts = [rank.engine.encoder_counts for rank in ranks if rank.engine.encoder_counts is not None]
        encoded = sum([each.computed_tokens for each in counts])
        is_here = np.isin(requests.prompt_worker.filled(-1), [rank.number for rank in ranks])
        items = num_items[requests.request[is_here]]
        use = EncoderUse(
            pool.name,
            int((items > 0).sum()),
            int(items.sum()),
            encoded,
            sum([each.found_tokens for each in counts]),
            encoded * pool.engine.encoding_s,
        )
        found.append(use)
    return tuple(found)


def tier_use(cluster: Cluster, requests: Requests) -> tuple[TierUse, ...]:
    """Return what each pool's KV tiers contained, moved and supplied."""
    length_s, found = _length_s(cluster), []
    for pool, ranks, _, _ in _crews(cluster):
        memory = pool.engine.host
        if memory is None:
            continue
        uses = [use for rank in ranks if (use := rank.engine.host_use()) is not None]
        num_chunks = memory.num_chunks * len(ranks)
        found.append(
            TierUse(
                pool.name,
                "host",
                len(ranks),
                capacity_bytes=num_chunks * memory.chunk_bytes,
                capacity_tokens=num_chunks * memory.blocks_per_chunk * cluster.block_size,
                full=sum(use.chunks.num_used for use in uses) / num_chunks,
                read=_traffic([use.loads for use in uses], length_s),
                written=_traffic([use.stores for use in uses], length_s),
                evicted_chunks=sum(use.chunks.num_evicted for use in uses),
                refused=sum(use.chunks.num_refused for use in uses),
                flushes=sum(use.num_flushes for use in uses),
                stall_s=sum(use.stall_s for use in uses),
                stalled=_shares([use.stall_s for use in uses], length_s),
            )
        )
        tiers = [cluster.tiering.of[rank.number] for rank in ranks if rank.number in cluster.tiering.of]
        disks = [each.storages.get("disk") for each in tiers]
        if known := [disk for disk in disks if disk is not None]:
            found.append(_storage(cluster, pool.name, known))
    shared = (tiers.storages["store"] for tiers in cluster.tiering.of.values() if "store" in tiers.storages)
    if (store := next(shared, None)) is not None:
        found.append(_storage(cluster, "all", [store]))
    return tuple(_with_hits(found, cluster, requests)) if found else ()


def adapter_use(cluster: Cluster, requests: Requests) -> tuple[AdapterUse, ...]:
    """Return the adapters that requests asked for, and how often the engines loaded each."""
    slots = [rank.engine.adapters for rank in cluster.ranks if rank.engine.adapters is not None]
    found = []
    for use in adapters_asked(requests):
        counts = [each.counts[use.adapter] for each in slots if use.adapter in each.counts]
        loads, reads = sum(count.loads for count in counts), sum(count.reads for count in counts)
        found.append(structs.replace(use, loads=loads, reads=reads, stall_s=sum(count.stall_s for count in counts)))
    return tuple(found)


def _with_hits(uses: Sequence[TierUse], cluster: Cluster, requests: Requests) -> Iterator[TierUse]:
    """Add to each tier how many prompt tokens came from it, and how much prefill that avoided."""
    by_tier = {tier: getattr(requests, f"{tier}_tokens") for tier in {use.tier for use in uses}}
    known = {tier: tokens.filled(0) for tier, tokens in by_tier.items() if not tokens.mask.all()}
    beyond = np.sum(list(known.values()), axis=0) if known else np.zeros(len(requests))
    pools = {rank.number: crew.pool for crew in _crews(cluster) for rank in crew.ranks}
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    gpu_s: dict[tuple[str, str], float] = defaultdict(float)
    beyond = np.where(
        np.ma.getmaskarray(requests.prompt_worker), 0, beyond
    )  # where a worker was lost, nobody knows whose
    numbers, lengths, cached = requests.prompt_worker.data, requests.isl, requests.cached_tokens.filled(0)
    for row in np.flatnonzero(beyond).tolist():
        pool, length, num_beyond = pools[int(numbers[row])], int(lengths[row]), int(beyond[row])
        found = min(int(cached[row]), length - 1)  # the last token is always computed
        saved_s = prefill_s(pool.engine, length, max(found - num_beyond, 0)) - prefill_s(pool.engine, length, found)
        for tier, its in known.items():
            owner = "all" if tier == "store" else pool.name
            tokens[owner, tier] += int(its[row])
            gpu_s[owner, tier] += max(saved_s, 0.0) * pool.gpus_per_rank * int(its[row]) / num_beyond
    for use in uses:
        key = use.pool, use.tier
        yield structs.replace(use, tokens=tokens[key], avoided_gpu_s=gpu_s[key]) if use.tier in known else use


def _storage(cluster: Cluster, pool: str, storages: Sequence[Storage]) -> TierUse:
    """Return what disks, or a store that ranks share, contained and moved."""
    now, length_s = cluster.clock.now, _length_s(cluster)
    uses = cluster.traffic.links.utilisation(now).storages
    busy, bytes_per_chunk = [uses[-1 - storage.place] for storage in storages], storages[0].bytes_per_chunk
    num_chunks = sum(storage.tier.num_chunks for storage in storages)
    return TierUse(
        pool,
        storages[0].tier.name,
        len(storages),
        capacity_bytes=num_chunks * bytes_per_chunk,
        capacity_tokens=num_chunks * storages[0].blocks_per_chunk * cluster.block_size,
        full=sum(storage.cache.num_used for storage in storages) / num_chunks,
        read=TierTraffic(
            sum(storage.num_chunks_read for storage in storages) * bytes_per_chunk,
            sum(storage.num_reads for storage in storages),
            _shares([use.egress * now for use in busy], length_s),
        ),
        written=TierTraffic(
            sum(storage.num_chunks_written for storage in storages) * bytes_per_chunk,
            sum(storage.num_writes for storage in storages),
            _shares([use.ingress * now for use in busy], length_s),
        ),
        evicted_chunks=sum(storage.cache.num_evicted for storage in storages),
        refused=sum(storage.num_refused for storage in storages),
    )


def _traffic(ways: Sequence[Direction], length_s: float) -> TierTraffic:
    num_bytes = sum(way.num_bytes for way in ways)
    return TierTraffic(num_bytes, sum(way.num_copies for way in ways), _shares([way.busy_s for way in ways], length_s))


def _shares(seconds: Sequence[float], length_s: float) -> Use:
    """Return the seconds of each rank as shares of the run, at most 1."""
    return Use.of([min(each / length_s, 1.0) if length_s else 0.0 for each in seconds])


def kv_use(cluster: Cluster) -> tuple[KvOverTime, ...]:
    """Return the share of its KV blocks that each pool used over time, until its last answer ended."""
    length_s, found = _length_s(cluster), []
    for name, use in cluster.kv_uses.items():
        workers = [each for each in cluster.fleet.workers if each.pool.name == name and each.ranks]
        there = [(each.ready_s, min(each.until_s, length_s)) for each in workers]
        num_engines = cluster.fleet.pools[name].engine.num_engines
        found.append(KvOverTime(name, *use.shares(length_s, there * num_engines)))
    return tuple(found)


def link_use(cluster: Cluster) -> tuple[LinkUse, ...]:
    """Return the used share of the capacity of links; links without a limit are left out."""
    if cluster.prefills is None:
        return ()
    now, length_s = cluster.clock.now, _length_s(cluster)
    found, stretch = cluster.traffic.links.utilisation(now), now / length_s if length_s else 1.0
    sides = [("nodes", found.nodes), ("racks", found.racks)]
    if cluster.traffic.links.is_limited:
        ranks = found.ranks
        sides = [(crew.pool.name, [ranks[rank.number] for rank in crew.ranks]) for crew in _crews(cluster)] + sides
    return tuple(_side(name, uses, stretch) for name, uses in sides if uses)


def _side(name: str, uses: list[links.Use], stretch: float) -> LinkUse:
    egress = Use.of([use.egress * stretch for use in uses])
    return LinkUse(name, len(uses), egress, Use.of([use.ingress * stretch for use in uses]))


def _length_s(cluster: Cluster) -> float:
    """Return the duration of the run: until its last answer ended, or it was interrupted."""
    ends, now = np.asarray(cluster.log.last_token_s), cluster.clock.now
    if cluster.num_ended < len(ends) or np.isnan(ends).all():
        return now
    last_s = float(np.nanmax(ends)) - cluster.overhead.answer_s
    return last_s if last_s > 0 else now


def _crews(cluster: Cluster) -> Iterator[Crew]:
    """Yield the ranks of each pool that had any."""
    length_s = _length_s(cluster)
    for pool in cluster.fleet.pools.values():
        workers = [worker for worker in cluster.fleet.workers if worker.pool is pool and worker.ranks]
        there_s = [max(min(worker.until_s, length_s) - worker.ready_s, 0.0) for worker in workers for _ in worker.ranks]
        if workers:
            size = cluster.fleet.most(pool.name) * pool.engine.num_engines
            yield Crew(pool, [rank for worker in workers for rank in worker.ranks], there_s, size)
