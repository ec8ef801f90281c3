"""Simulate without prefix caching where nothing can be shared: the result is the same, in two thirds of the time.

If the workload does not show which prefixes prompts share, every prompt has ids of its own. Then a cached block can only be
found again by the request that filled it, after it was preempted. So a run in which nobody was preempted is the same with
and without caching; one in which somebody was is repeated with it.
"""

from collections.abc import Sequence

from dynabench.arm import Arm
from dynabench.deployment.engines import pools_of
from dynabench.experiment.axes import change_setting
from dynabench.virtual.cluster import Cluster
from mocker.config import UNCACHED
from reports.record.records import Record
from workloads import Workload

BLIND = ("kv", "round-robin", "least-loaded", "random")
"""Router modes that look at no more of a cache than the prefix that they find in it."""


def lean(arm: Arm, workload: Workload) -> Arm:
    """Return an arm whose runs are the same unless somebody is preempted; the arm itself if there is none simpler."""
    deployment = arm.settings.deployment
    is_static = not deployment.fleet.timeline and deployment.planner.planner == "static"
    if workload.knows_prefixes or deployment.is_disaggregated or not is_static or deployment.router_mode not in BLIND:
        return arm
    if any(pool.engine_type != "vllm" for pool in deployment.pools):
        return arm  # nobody has shown it for them
    if any(pool.engine.host is not None or pool.engine.layout is not None for pool in pools_of(deployment)):
        return arm  # a cache is more than a prefix there
    return Arm(arm.name, change_setting(arm.settings, UNCACHED["vllm"]), arm.changes)


def anyone_preempted(cluster: Cluster) -> bool:
    """Return whether a request of a run in progress was preempted."""
    running = (sequence for rank in cluster.ranks for sequence in rank.sequences)
    counts = (*cluster.log.preemptions, *(sequence.num_preemptions for sequence in running))
    return max(counts, default=0) > 0  # of those that have not ended, the log has a negative number


def was_anyone_preempted(runs: Sequence[Record]) -> bool:
    """Return whether a request of some runs was preempted."""
    return any(run.requests.preemptions.filled(0).any() for run in runs)
