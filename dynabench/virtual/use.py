"""How busy the workers of a cluster were, and the links between them, until its last answer ended.

The clock may run on after that: leases end later. Nothing is computed or sent then.
"""

import math
from collections.abc import Iterator

import numpy as np

from dynabench.deployment.description import Deployment, Pool
from dynabench.kv_use import KvUse
from dynabench.virtual import links
from dynabench.virtual.cluster import Cluster
from reports.pools import KvOverTime, LinkUse, PoolUse, Use


def pool_use(deployment: Deployment, cluster: Cluster) -> tuple[PoolUse, ...]:
    """Return how busy the workers of each pool were."""
    stretch = _stretch(cluster)
    shares = [min(worker.busy_share() * stretch, 1.0) for worker in cluster.workers]
    return tuple(
        PoolUse(pool.name, pool.role, len(places), pool.num_gpus, Use.of([shares[place] for place in places]))
        for pool, places in _places(deployment)
    )


def watch_kv(deployment: Deployment, cluster: Cluster) -> dict[str, KvUse]:
    """Let the workers of each pool note their KV in use, from now on; return where, by the pool's name."""
    uses = {}
    for pool, places in _places(deployment):
        uses[pool.name] = KvUse(len(places))
        for place in places:
            cluster.workers[place].kv_use = uses[pool.name]
    return uses


def kv_use(uses: dict[str, KvUse], cluster: Cluster) -> tuple[KvOverTime, ...]:
    """Return the share of its KV blocks that each pool had in use over time."""
    return tuple(KvOverTime(name, *use.shares(cluster.clock.now)) for name, use in uses.items())


def link_use(deployment: Deployment, cluster: Cluster) -> tuple[LinkUse, ...]:
    """Return how much of what links could have carried they did; those that carry any amount are left out."""
    if cluster.handover is None:
        return ()
    found, stretch = cluster.traffic.links.utilisation(cluster.clock.now), _stretch(cluster)
    sides = [("nodes", found.nodes), ("racks", found.racks)]
    if deployment.transfer.gpu_bandwidth < math.inf:
        workers = found.workers
        sides = [(pool.name, [workers[place] for place in places]) for pool, places in _places(deployment)] + sides
    return tuple(_side(name, uses, stretch) for name, uses in sides if uses)


def _side(name: str, uses: list[links.Use], stretch: float) -> LinkUse:
    egress = Use.of([use.egress * stretch for use in uses])
    return LinkUse(name, len(uses), egress, Use.of([use.ingress * stretch for use in uses]))


def _stretch(cluster: Cluster) -> float:
    """Return by what shares of the time on the clock must be multiplied to be shares of the run."""
    ends, now = np.asarray(cluster.log.last_token_s), cluster.clock.now
    if cluster.num_finished < len(ends) or not len(ends):  # interrupted
        return 1.0
    last_s = float(ends.max()) - cluster.overhead.answer_s
    return now / last_s if last_s > 0 else 1.0


def _places(deployment: Deployment) -> Iterator[tuple[Pool, range]]:
    """Yield each pool that has workers, and the numbers of these."""
    first = 0
    for pool in deployment.pools:
        count = pool.replicas * pool.mocker.dp_size
        if count:
            yield pool, range(first, first + count)
        first += count
