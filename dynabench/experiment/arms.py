"""The arms of an experiment, with the settings of each."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dynabench.arm import Arm, Settings
from dynabench.deployment import budget
from dynabench.deployment.description import Deployment
from dynabench.experiment.axes import OF_ROLES, SENT, change_setting, path_of, read_axis
from dynabench.experiment.settings import ExperimentConfig
from foundation.own_code import shown
from foundation.settings import short_value
from foundation.text import printable
from reports.figures.conditions import Condition
from reports.summary import NOISE_FLOOR

DECODE_WORKERS = "decode_workers"
ENDPOINT = "endpoint"
"""The only arm that measures a server of others."""


class ComparedArms(NamedTuple):
    """The arms that an experiment compares."""

    arms: list[Arm]
    left_out: list[str]
    """Why combinations are left out: they need a different number of GPUs."""


def comparison_of(experiment: ExperimentConfig, settings: Settings) -> ComparedArms:
    """Make every combination of the values of all axes; the first is the baseline.

    If prefill workers are varied within a budget of GPUs, decode workers get the rest, and the baseline is the
    aggregated deployment on the same number of GPUs.

    Raises:
        ValueError: an axis is not a setting, a value is invalid for it, or no combination fits the GPUs.
    """
    settings = with_limits(settings, experiment.limits)
    axes = _axes(experiment, settings)
    varied = {name for name, values in axes.items() if len(values) > 1}
    alone = ENDPOINT if settings.url else shown(axes["router_mode"][0])
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if split := _split_axis(axes, settings):
        arms, left_out = _splits(combinations, split, varied, settings)
    else:
        arms, left_out = _possible(combinations, varied, settings, alone)
    if experiment.noise_floor:
        first = arms[0]
        arms.append(replace(first, name=first.name + NOISE_FLOOR, is_repeated=True))
    return ComparedArms(arms, left_out)


def with_limits(settings: Settings, limits: Sequence[Condition]) -> Settings:
    """Give a planner without its own limits those of the experiment: the strictest of TTFT, and of ITL or TPOT."""
    planner = settings.deployment.planner
    given = {
        "planner_ttft_ms": [limit.value * 1e3 for limit in limits if limit.metric == "ttft"],
        "planner_itl_ms": [limit.value * 1e3 for limit in limits if limit.metric in ("itl", "tpot")],
    }
    filled: dict[str, Any] = {
        name: min(values) for name, values in given.items() if values and getattr(planner, name) is None
    }
    if not filled:
        return settings
    return replace(settings, deployment=replace(settings.deployment, planner=replace(planner, **filled)))


def _possible(
    combinations: list[dict[str, Any]], varied: set[str], settings: Settings, alone: str
) -> tuple[list[Arm], list[str]]:
    """Return the arms of the valid combinations, and why the others are invalid.

    A setting that its engines do not have is no part of an arm.

    Raises:
        ValueError: none is valid.
    """
    arms, reasons = dict[str, Arm](), []
    for changes in combinations:
        try:
            changed = change_setting(settings, changes)
            used = {name: value for name, value in changes.items() if not why_idle(changed.deployment, name)}
            arm = _arm(used, changed, varied, alone)
            arms.setdefault(arm.name, arm)
        except ValueError as error:
            reasons.append((arm_name({name: value for name, value in changes.items() if name in varied}), error))
    if not arms:
        raise reasons[0][1]
    return list(arms.values()), [f"{name} ({error})" for name, error in reasons]


def why_idle(deployment: Deployment, name: str) -> str | None:
    """Return why a setting changes nothing, if no pool simulates the engines, or the part of them, that have it; else None."""
    simulated = [pool.simulated for pool in deployment.pools if pool.engine == "mocker"]
    reasons = [engine.why_unused(name.rpartition(".")[2]) for engine in simulated]
    return reasons[0] if reasons and all(reasons) else None


def _arm(changes: dict[str, Any], changed: Settings, varied: set[str], alone: str = "") -> Arm:
    """Make an arm, named by what is varied, or `alone` if nothing is."""
    shown = {name: value for name, value in changes.items() if name in varied}
    return Arm(arm_name(shown) or alone, changed, changes)


def _axes(experiment: ExperimentConfig, settings: Settings) -> dict[str, list[Any]]:
    """Return the values of everything that is varied, by its name; the router mode comes first."""
    modes = experiment.router_mode or (settings.deployment.router_mode,)
    axes = [("router_mode", list(modes))] + [read_axis(text, settings) for text in experiment.vary]
    places = [path_of(name, settings) for name, _ in axes]
    if twice := {name for (name, _), path in zip(axes, places, strict=True) if places.count(path) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} is varied twice")
    ours = [name for (name, _), path in zip(axes[1:], places[1:], strict=True) if path.partition(".")[0] not in SENT]
    if settings.url and ours:
        raise ValueError(
            f"{', '.join(ours)} cannot be varied with --url: the server there has its own settings; "
            "vary the load instead, such as concurrency=8,16"
        )
    return dict(axes)


def _split_axis(axes: Mapping[str, list[Any]], settings: Settings) -> str | None:
    """Return the axis of prefill workers if decode workers get the rest of the GPU budget."""
    deployment = settings.deployment
    counts = {f"pools.{pool.name}.replicas": pool.role for pool in deployment.pools}
    found = {counts.get(path_of(name, settings)): name for name in axes}
    has_budget = None not in axes.get("gpus", [deployment.gpus])
    return found.get("prefill") if has_budget and "decode" not in found else None


def _splits(
    combinations: list[dict[str, Any]], split: str, varied: set[str], settings: Settings
) -> tuple[list[Arm], list[str]]:
    """Return the aggregated deployments on the same GPUs, then every combination; and why some are left out."""
    arms: dict[str, list[Arm]] = {"aggregated": [], "split": []}
    left_out: list[str] = []
    for changes in combinations:
        for kind, made in (("aggregated", _aggregated), ("split", _split)):
            try:
                arm = made(changes, split, varied, settings)
            except budget.BudgetError as error:
                left_out += [str(error)] * (str(error) not in left_out)
            else:
                arms[kind] += [arm] * (arm not in arms[kind])
    if not all(arms.values()):
        raise ValueError(left_out[0])
    return arms["aggregated"] + arms["split"], left_out


def _split(changes: dict[str, Any], split: str, varied: set[str], settings: Settings) -> Arm:
    """Make the arm of a combination, with decode workers on the remaining GPUs."""
    free = change_setting(settings, changes | {"gpus": None})
    pool = budget.pool_of_rest(free.deployment)
    filled = budget.filled(free.deployment, pool.name, _gpus(changes, settings))
    counted = changes | {DECODE_WORKERS: filled.pool(pool.name).replicas}
    return _arm(counted, replace(free, deployment=filled), varied | {split, DECODE_WORKERS})


def _aggregated(changes: dict[str, Any], split: str, varied: set[str], settings: Settings) -> Arm:
    """Make the aggregated arm that matches a combination, with the varied settings that apply to aggregated workers."""
    shared = {name: value for name, value in changes.items() if _is_shared(path_of(name, settings))}
    free = replace(settings, deployment=budget.aggregated(settings.deployment))
    free = change_setting(free, shared | {"gpus": None})
    filled = budget.filled(free.deployment, budget.AGGREGATED, _gpus(changes, settings))
    said = {name: shared.get(name, budget.AGGREGATED) for name in changes if name in shared or name == split}
    arm = _arm(said, replace(free, deployment=filled), varied - {split})
    return replace(arm, name=", ".join(filter(None, (budget.AGGREGATED, arm.name))))


def _gpus(changes: dict[str, Any], settings: Settings) -> int:
    gpus: int | None = changes.get("gpus", settings.deployment.gpus)
    assert gpus is not None
    return gpus


def _is_shared(path: str) -> bool:
    """Return whether a setting also applies to aggregated workers."""
    head, _, rest = path.partition(".")
    return head not in OF_ROLES and (head != "pools" or rest.startswith("*."))


SHORT = {
    "tensor_parallel_size": "TP",
    "pipeline_parallel_size": "PP",
    "max_num_batched_tokens": "chunk",
    "max_num_seqs": "seqs",
    "enable_prefix_caching": "caching",
    "quantization": "weights",
}
"""Short names of some settings, for places with little room."""


def layout_name(changes: Mapping[str, Any]) -> str:
    """Name a layout in few words."""
    parts = (f"{SHORT.get(name, name.replace('_', ' '))} {short_value(value)}" for name, value in changes.items())
    return printable(", ".join(parts))


def arm_name(changes: dict[str, Any]) -> str:
    """Name an arm by its differences."""
    parts = (
        shown(value) if name == "router_mode" else f"{name} {shown(short_value(value))}"
        for name, value in changes.items()
    )
    return printable(", ".join(parts))
