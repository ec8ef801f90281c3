"""Why settings cannot change anything with a workload, so that equal arms are no surprise."""

from collections.abc import Iterator, Sequence

from dynabench.deployment.description import Deployment, Pool
from workloads import Workload


def no_effect(clock: str, workload: Workload, deployments: Sequence[Deployment]) -> dict[str, str]:
    """Return a labelled fact about the settings that change nothing; nothing if there are none."""
    found = list(_reasons(clock, workload, deployments))
    return {"No effect": "; ".join(found)} if found else {}


def _reasons(clock: str, workload: Workload, deployments: Sequence[Deployment]) -> Iterator[str]:
    pools = [pool for deployment in deployments for pool in deployment.pools]
    policies = {_policy(pool) for pool in pools if pool.engine == "mocker"}
    if workload.has_priorities and clock != "virtual":
        yield "priorities are not sent over HTTP; dynabench simulate uses them"
    elif workload.has_priorities and policies == {"fcfs"}:
        yield "the requests' priorities, because the engines admit by arrival"
    elif not workload.has_priorities and "priority" in policies:
        yield (
            "scheduling_policy priority orders requests by arrival, as fcfs does, because all have the same priority "
            "(`dynabench workload synth --priority-levels 2` makes some with two)"
        )
    if len({deployment.router_mode for deployment in deployments}) > 1 and all(map(_is_one_rank, deployments)):
        yield "with one worker, router modes differ at most in how long requests wait at the router"


def _policy(pool: Pool) -> str:
    match pool.engine_type:
        case "vllm":
            return pool.mocker.scheduling_policy
        case "sglang":
            return "priority" if pool.sglang.enable_priority_scheduling else "fcfs"
        case "trtllm":
            return "fcfs"


def _is_one_rank(deployment: Deployment) -> bool:
    """Return whether there is only one place to send a request to, at any time."""
    ranks = sum(pool.replicas * pool.dp_size for pool in deployment.pools)
    return ranks == 1 and deployment.planner.planner == "static" and not deployment.fleet.events
