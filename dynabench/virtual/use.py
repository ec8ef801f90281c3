"""How busy the workers of a cluster were, the links between them and their KV tiers, until its last answer ended.

The clock may run on after that: leases end later. Nothing is computed or sent then.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import structs

from dynabench.deployment.description import Deployment, Pool
from dynabench.kv_use import KvUse
from dynabench.virtual import links
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.tiers import Storage
from mocker.offload.host_link import Direction
from mocker.timing.choose import SimulatedEngine
from mocker.timing.prefill import prefill_s
from reports.pools import KvOverTime, LinkUse, PoolUse, TierUse, Traffic, Use
from reports.records import Requests


def pool_use(deployment: Deployment, cluster: Cluster) -> tuple[PoolUse, ...]:
    """Return how busy the workers of each pool were."""
    length_s, found = _length_s(cluster), []
    for pool, places in _places(deployment):
        busy_s = [cluster.workers[place].busy_s for place in places]
        gpu_s = sum(busy_s) * pool.num_gpus / len(places)
        found.append(PoolUse(pool.name, pool.role, len(places), pool.num_gpus, _shares(busy_s, length_s), gpu_s))
    return tuple(found)


def tier_use(
    deployment: Deployment, cluster: Cluster, engines: Sequence[SimulatedEngine], requests: Requests
) -> tuple[TierUse, ...]:
    """Return what the KV tiers of each pool held, moved and gave.

    Args:
        deployment: what was deployed.
        cluster: its workers, after the run.
        engines: those of the workers, as of `engines_of`.
        requests: what became of the requests.
    """
    length_s, found = _length_s(cluster), []
    ranks = [engine for engine in engines for _ in range(engine.config.dp_size)]
    for pool, places in _places(deployment):
        memory = ranks[places[0]].host
        if memory is None:
            continue
        cores = [cluster.workers[place].engine for place in places]
        links = [core.host_link for core in cores if core.host_link is not None]
        offloads = [core.scheduler.offload for core in cores if core.scheduler.offload is not None]
        num_chunks = memory.num_chunks * len(places)
        found.append(
            TierUse(
                pool.name,
                "host",
                len(places),
                capacity_bytes=num_chunks * memory.chunk_bytes,
                capacity_tokens=num_chunks * memory.blocks_per_chunk * pool.mocker.block_size,
                full=sum(offload.host.num_used for offload in offloads) / num_chunks,
                read=_traffic([link.loads for link in links], length_s),
                written=_traffic([link.stores for link in links], length_s),
                evicted_chunks=sum(offload.host.num_evicted for offload in offloads),
                refused=sum(offload.num_refused for offload in offloads),
                flushes=sum(link.num_flushes for link in links),
                stall_s=sum(link.stall_s for link in links),
                stalled=_shares([link.stall_s for link in links], length_s),
            )
        )
        disks = [cluster.tiers[place].storages.get("disk") for place in places if place in cluster.tiers]
        if known := [disk for disk in disks if disk is not None]:
            found.append(_storage(cluster, pool.name, known))
    shared = (tiers.storages["store"] for tiers in cluster.tiers.values() if "store" in tiers.storages)
    if (store := next(shared, None)) is not None:
        found.append(_storage(cluster, "all", [store]))
    return tuple(_with_hits(found, deployment, ranks, requests)) if found else ()


def _with_hits(
    uses: Sequence[TierUse], deployment: Deployment, ranks: Sequence[SimulatedEngine], requests: Requests
) -> Iterator[TierUse]:
    """Say of tiers how many prompt tokens came from them, and how much prefill that avoided."""
    by_tier = {tier: getattr(requests, f"{tier}_tokens") for tier in {use.tier for use in uses}}
    known = {tier: tokens.filled(0) for tier, tokens in by_tier.items() if not tokens.mask.all()}
    beyond = np.sum(list(known.values()), axis=0) if known else np.zeros(len(requests))
    pools = {
        place: (pool.name, pool.num_gpus / len(places)) for pool, places in _places(deployment) for place in places
    }
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    gpu_s: dict[tuple[str, str], float] = defaultdict(float)
    workers, lengths, cached = requests.prompt_worker.data, requests.isl, requests.cached_tokens.filled(0)
    for row in np.flatnonzero(beyond).tolist():
        place, length, num_beyond = int(workers[row]), int(lengths[row]), int(beyond[row])
        name, num_gpus = pools[place]
        found = min(int(cached[row]), length - 1)  # the last token is always computed
        saved_s = prefill_s(ranks[place], length, max(found - num_beyond, 0)) - prefill_s(ranks[place], length, found)
        for tier, its in known.items():
            owner = "all" if tier == "store" else name
            tokens[owner, tier] += int(its[row])
            gpu_s[owner, tier] += max(saved_s, 0.0) * num_gpus * int(its[row]) / num_beyond
    for use in uses:
        key = use.pool, use.tier
        yield structs.replace(use, tokens=tokens[key], avoided_gpu_s=gpu_s[key]) if use.tier in known else use


def _storage(cluster: Cluster, pool: str, storages: Sequence[Storage]) -> TierUse:
    """Return what disks, or a store that workers share, held and moved."""
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
        read=Traffic(
            sum(storage.num_chunks_read for storage in storages) * bytes_per_chunk,
            sum(storage.num_reads for storage in storages),
            _shares([use.egress * now for use in busy], length_s),
        ),
        written=Traffic(
            sum(storage.num_chunks_written for storage in storages) * bytes_per_chunk,
            sum(storage.num_writes for storage in storages),
            _shares([use.ingress * now for use in busy], length_s),
        ),
        evicted_chunks=sum(storage.cache.num_evicted for storage in storages),
        refused=sum(storage.num_refused for storage in storages),
    )


def _traffic(ways: Sequence[Direction], length_s: float) -> Traffic:
    num_bytes = sum(way.num_bytes for way in ways)
    return Traffic(num_bytes, sum(way.num_copies for way in ways), _shares([way.busy_s for way in ways], length_s))


def _shares(seconds: Sequence[float], length_s: float) -> Use:
    """Return which shares of the run so many seconds of each worker are; what lasts longer than the run is cut off."""
    return Use.of([min(each / length_s, 1.0) if length_s else 0.0 for each in seconds])


def watch_kv(deployment: Deployment, cluster: Cluster) -> dict[str, KvUse]:
    """Let the workers of each pool note their KV in use, from now on; return where, by the pool's name."""
    uses = {}
    for pool, places in _places(deployment):
        uses[pool.name] = KvUse(len(places))
        for place in places:
            cluster.workers[place].kv_use = uses[pool.name]
    return uses


def kv_use(uses: dict[str, KvUse], cluster: Cluster) -> tuple[KvOverTime, ...]:
    """Return the share of its KV blocks that each pool had in use over time, until its last answer ended."""
    length_s = _length_s(cluster)
    return tuple(KvOverTime(name, *use.shares(length_s)) for name, use in uses.items())


def link_use(deployment: Deployment, cluster: Cluster) -> tuple[LinkUse, ...]:
    """Return how much of what links could have carried they did; those that carry any amount are left out."""
    if cluster.handover is None:
        return ()
    now, length_s = cluster.clock.now, _length_s(cluster)
    found, stretch = cluster.traffic.links.utilisation(now), now / length_s if length_s else 1.0
    sides = [("nodes", found.nodes), ("racks", found.racks)]
    if deployment.transfer.gpu_bandwidth < math.inf:
        workers = found.workers
        sides = [(pool.name, [workers[place] for place in places]) for pool, places in _places(deployment)] + sides
    return tuple(_side(name, uses, stretch) for name, uses in sides if uses)


def _side(name: str, uses: list[links.Use], stretch: float) -> LinkUse:
    egress = Use.of([use.egress * stretch for use in uses])
    return LinkUse(name, len(uses), egress, Use.of([use.ingress * stretch for use in uses]))


def _length_s(cluster: Cluster) -> float:
    """Return how long the run took: until its last answer ended, or it was interrupted."""
    ends, now = np.asarray(cluster.log.last_token_s), cluster.clock.now
    if cluster.num_finished < len(ends) or not len(ends):
        return now
    last_s = float(ends.max()) - cluster.overhead.answer_s
    return last_s if last_s > 0 else now


def _places(deployment: Deployment) -> Iterator[tuple[Pool, range]]:
    """Yield each pool that has workers, and the numbers of these."""
    first = 0
    for pool in deployment.pools:
        count = pool.replicas * pool.mocker.dp_size
        if count:
            yield pool, range(first, first + count)
        first += count
