"""Which router, which settings, how many GPUs? Benchmark and simulate LLM serving without a GPU.

    import dynabench as db

    trace = db.Workload.read("trace.jsonl.gz")
    fleet = db.Deployment(model="meta-llama/Llama-3.1-8B", gpu="h100", workers=8)
    db.simulate(trace, fleet, vary={"router_mode": ["round-robin", "kv"]}, slo=["ttft.p99 <= 2s"])

What `__all__` names is public, and so are the public attributes of these classes and what they return: it changes
incompatibly only with a major version (before 1.0: a minor one), and was deprecated in a release before. All other
modules may change at any time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from foundation.namesake import refuse_namesake

if TYPE_CHECKING:
    from dynabench.api.deployment import Deployment
    from dynabench.api.differences import ArmDifference, Estimate
    from dynabench.api.experiments import bench, load, plan, rehearse, run, simulate, sweep
    from dynabench.api.rehearsal_result import RehearsalResult
    from dynabench.api.result import PlanResult, Result, SweepResult
    from dynabench.api.workload import Workload
    from foundation.errors import UserError

__all__ = [
    "ArmDifference",
    "Deployment",
    "Estimate",
    "PlanResult",
    "RehearsalResult",
    "Result",
    "SweepResult",
    "UserError",
    "Workload",
    "bench",
    "load",
    "plan",
    "rehearse",
    "run",
    "simulate",
    "sweep",
]

_HOMES = {
    "ArmDifference": "dynabench.api.differences",
    "Deployment": "dynabench.api.deployment",
    "Estimate": "dynabench.api.differences",
    "PlanResult": "dynabench.api.result",
    "RehearsalResult": "dynabench.api.rehearsal_result",
    "Result": "dynabench.api.result",
    "SweepResult": "dynabench.api.result",
    "UserError": "foundation.errors",
    "Workload": "dynabench.api.workload",
}
"""Where names are that are not in `dynabench.api.experiments`: they are imported when they are first used."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dynabench' has no attribute {name!r}")
    refuse_namesake()
    found = getattr(import_module(_HOMES.get(name, "dynabench.api.experiments")), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
