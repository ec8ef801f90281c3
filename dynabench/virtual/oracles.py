"""What only a simulation can know: the true work at each worker, and what would follow from each choice."""

import copy
from typing import TYPE_CHECKING

from mocker import Engine
from workloads import WorkloadError

if TYPE_CHECKING:
    from dynabench.virtual.cluster import Cluster

HORIZON_S = 60.0
"""How far a rollout looks."""
MAX_REQUESTS = 5000


def true_work(engine: Engine, now: float) -> list[tuple[int, int, int]]:
    """Return each request at an engine: prompt tokens to compute, output tokens to come, context tokens."""
    engine.advance(now)
    scheduler = engine.scheduler
    found = []
    for sequence in (*scheduler.running, *scheduler.waiting):
        known = scheduler.num_tokens(sequence)
        to_compute = 0 if sequence.decoding else max(sequence.num_known - sequence.num_computed, 0)
        found.append((to_compute, max(sequence.num_total - known, 0), known))
    return found


def best_by_rollout(cluster: "Cluster", number: int) -> int:
    """Try each worker for a request in a copy of the cluster; return the one after which all wait least.

    The copies run on for a minute of simulated time with the requests that really come, routed by the base policy. W copies
    per request make this an upper bound for small workloads only.

    Raises:
        WorkloadError: the workload is too large, or the cores are compiled.
    """
    if len(cluster.log) > MAX_REQUESTS:
        raise WorkloadError(
            f"oracle-rollout copies the simulation for every request; expected {MAX_REQUESTS} requests or fewer"
        )
    until = cluster.clock.now + HORIZON_S
    waits = []
    for worker in range(len(cluster.workers)):
        try:
            fork = copy.deepcopy(cluster, {id(shared): shared for shared in cluster.shared})
        except TypeError as error:
            raise WorkloadError(
                "oracle-rollout copies the engines, which compiled ones cannot; install without DYNABENCH_COMPILE"
            ) from error
        fork.is_rollout = False
        fork.send_to(number, worker)
        fork.resume(until)
        waits.append(_waited(fork, until))
    return min(range(len(waits)), key=waits.__getitem__)


def _waited(cluster: "Cluster", until: float) -> float:
    """Sum the time that requests have spent in the system by then."""
    total = 0.0
    for intended, ended in zip(cluster.log.intended_s, cluster.log.last_token_s, strict=True):
        if intended <= until:  # what has not come, or not ended, has no time: NaN in a log
            total += (ended if ended <= until else until) - intended
    return total
