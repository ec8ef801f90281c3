"""Why settings cannot change anything with a workload, so that equal arms are no surprise."""

from collections.abc import Iterator, Sequence

from dynabench.deployment.description import Deployment, Pool
from foundation.settings import changed
from mocker.config import EngineType
from serving.router.policies.modes import Mode
from workloads import Workload
from workloads.formats.results import MEDIA_LEFT_OUT

BY_PRIORITY: dict[EngineType, str] = {
    "vllm": "scheduling_policy priority",
    "sglang": "enable_priority_scheduling",
}
WITHOUT_PRIORITIES: dict[EngineType, str] = {
    "vllm": "the engines' scheduling_policy is fcfs",
    "sglang": "the engines' enable_priority_scheduling is false",
    "trtllm": "TensorRT-LLM's scheduler has none",
}


def no_effect(clock: str, workload: Workload, deployments: Sequence[Deployment]) -> dict[str, str]:
    """Return a labelled fact about the settings that change nothing; nothing if there are none."""
    found = list(_reasons(clock, workload, deployments))
    return {"No effect": "; ".join(found)} if found else {}


def _reasons(clock: str, workload: Workload, deployments: Sequence[Deployment]) -> Iterator[str]:
    pools = [pool for deployment in deployments for pool in deployment.pools]
    simulated = [pool for pool in pools if pool.engine == "mocker"]
    by_priority = [pool.engine_type for pool in simulated if _is_by_priority(pool)]
    if workload.has_priorities and clock != "virtual":
        yield "priorities are not sent over HTTP; dynabench simulate uses them"
    elif workload.has_priorities and simulated and not by_priority:
        said = dict.fromkeys(WITHOUT_PRIORITIES[pool.engine_type] for pool in simulated)
        yield f"the requests' priorities, because {' and '.join(said)}"
    elif not workload.has_priorities and by_priority:
        yield (
            f"{BY_PRIORITY[by_priority[0]]} orders requests by arrival, as fcfs does, because all have the same priority "
            "(`dynabench workload synth --priority-levels 2` makes some with two)"
        )
    if not workload.columns.adapters and any(pool.mocker.enable_lora for pool in simulated):
        yield (
            "enable_lora, because no request asks for an adapter (`dynabench workload synth --adapters 8` makes such requests)"
        )
    if not workload.columns.has_media and any(pool.mocker.has_encoder for pool in simulated):
        because = "no request has images or other media (`dynabench workload synth --images 2` makes some)"
        if clock != "virtual":
            because = "media are not sent to our own stack; dynabench simulate, sweep and plan use it"
        elif MEDIA_LEFT_OUT in workload.notes:
            because = f"of the workload, {MEDIA_LEFT_OUT}"
        yield f"max_tokens_per_mm_item, because {because}"
    affine = [mode for deployment in deployments for mode in _modes(deployment) if Mode.parse(mode).adapter]
    if affine and not workload.columns.adapters:
        yield f"adapter({Mode.parse(affine[0]).adapter:g}) of router mode {affine[0]}, because no request asks for an adapter"
    if clock == "virtual" and any(pool.mocker.lora_modules for pool in simulated):
        yield "lora_modules, because in virtual time the adapters are those that requests name"
    idle = {name: pool.engine_type for pool in simulated for name in pool.simulated.idle}
    for name, kind in idle.items():
        yield f"{name}, where engine_type is {kind}"
    yield from dict.fromkeys(reason for pool in simulated for reason in _of_ranks(pool))
    if len({deployment.router_mode for deployment in deployments}) > 1 and all(map(_is_one_rank, deployments)):
        yield "with one worker, router modes differ at most in how long requests wait at the router"


def _modes(deployment: Deployment) -> Iterator[str]:
    """Yield the router modes of a deployment."""
    yield deployment.router_mode
    yield from [pool.router_mode for pool in deployment.pools if pool.router_mode is not None]


def _of_ranks(pool: Pool) -> Iterator[str]:
    """Yield the settings of attention DP that a pool without it, or without its balance, ignores."""
    if pool.engine_type == "sglang" and "load_balance_method" in changed(pool.sglang) and pool.sglang.attn_dp_size == 1:
        yield "load_balance_method, where attn_dp_size is 1"
    if pool.engine_type == "trtllm" and not pool.trtllm.attention_dp_enable_balance:
        for name in ("attention_dp_timeout_iters", "attention_dp_batching_wait_iters"):
            if name in changed(pool.trtllm):
                yield f"{name}, where attention_dp_enable_balance is false"


def _is_by_priority(pool: Pool) -> bool:
    """Return whether its engines admit requests by their priority."""
    match pool.engine_type:
        case "vllm":
            return pool.mocker.scheduling_policy == "priority"
        case "sglang":
            return pool.sglang.enable_priority_scheduling
        case "trtllm":
            return False


def _is_one_rank(deployment: Deployment) -> bool:
    """Return whether there is only one place to send a request to, at any time."""
    ranks = sum(pool.replicas * pool.dp_size for pool in deployment.pools)
    return ranks == 1 and deployment.planner.planner == "static" and not deployment.fleet.events
