"""The best rank for a request, found by trying each in a copy of the cluster."""

import copy

from dynabench.virtual.cluster import Cluster
from serving.router.decision import NOBODY, NoWorkersError
from workloads import WorkloadError

HORIZON_S = 60.0
"""How far a rollout simulates ahead."""
MAX_REQUESTS = 5000


def best_by_rollout(cluster: Cluster, number: int) -> int:
    """Try each rank for a request in a copy of the cluster; return the slot that leads to the least total waiting time.

    The copies continue for a minute of simulated time with the actual future requests, routed by the base policy. With
    W copies per request, this upper bound is practical only for small workloads.

    Raises:
        NoWorkersError: there is no rank.
        WorkloadError: the workload is too large, or the cores are compiled.
    """
    if not cluster.routing.ranks:
        raise NoWorkersError(NOBODY)
    if len(cluster.log) > MAX_REQUESTS:
        raise WorkloadError(
            f"oracle-rollout copies the simulation for every request; expected at most {MAX_REQUESTS} requests"
        )
    until = cluster.clock.now + HORIZON_S
    waits = {}
    for slot in [rank.number for rank in cluster.routing.ranks]:
        try:
            fork = copy.deepcopy(cluster, {id(shared): shared for shared in cluster.shared})
        except TypeError as error:
            raise WorkloadError(
                "oracle-rollout copies the engines, but compiled engines cannot be copied; install without "
                "DYNABENCH_COMPILE"
            ) from error
        fork.flights.choose = None
        fork.flights.send_to(fork.flights[number], slot)
        fork.resume(until)
        waits[slot] = _waited(fork, until)
    return min(waits, key=waits.__getitem__)


def _waited(cluster: Cluster, until: float) -> float:
    """Sum the time that requests have spent in the system by then."""
    total = 0.0
    for intended, ended in zip(cluster.log.intended_s, cluster.log.last_token_s, strict=True):
        if intended <= until:  # missing times are NaN in the log
            total += (ended if ended <= until else until) - intended
    return total
