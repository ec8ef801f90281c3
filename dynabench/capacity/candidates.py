"""The layouts that a plan chooses from: every combination of what is left free, with the number of workers open."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.description import Deployment
from dynabench.deployment.flags import SPLIT, PoolConfig, RoleConfig, simulated_pools
from dynabench.experiment.arms import layout_name
from dynabench.experiment.axes import change, read_axis, setting_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.plan import Arm, Settings
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from workloads.shape import ShapeConfig


@dataclass(frozen=True)
class Candidate:
    """A layout, and how it is simulated."""

    changes: Mapping[str, Any]
    """What sets it apart, by name of the setting."""
    settings: Settings
    """With one worker of the kind whose number is searched for."""
    number: str
    """The setting that is searched for: `workers` or `decode_workers`."""
    fixed_gpus: int
    gpus_per_worker: int
    gpu: str

    @property
    def name(self) -> str:
        """What sets it apart, in words."""
        return layout_name({name: value for name, value in self.changes.items() if name != "router_mode"})

    def arm(self, workers: int, *, load: float = 1.0, changes: Mapping[str, Any] | None = None) -> Arm:
        """Return it with so many workers, at a multiple of the workload's rate, and perhaps with other settings."""
        more = {self.number: workers, **(changes or {})}
        settings = change(self.settings, more)
        if load != 1:
            settings = replace(settings, shape=faster(settings.shape, load))
        said = {**self.changes, **more} | ({"load": load} if load != 1 else {})
        return Arm(layout_name(said), settings, said)


def faster(shape: ShapeConfig, load: float) -> ShapeConfig:
    """Return a shape in which requests come at a multiple of its rate."""
    if shape.rate is not None:
        return replace(shape, rate=shape.rate * load)
    return replace(shape, rate_scale=shape.rate_scale * load)


def candidates_of(
    config: PlanConfig, experiment: ExperimentConfig, settings: Settings, router_mode: str
) -> tuple[list[Candidate], dict[str, str]]:
    """Return every layout to choose from, and why others cannot be, by their names.

    Raises:
        ValueError: an axis is not a setting, or a value is not one of its.
    """
    (pool,) = settings.deployment.pools
    varied = {setting_of(text): text for text in experiment.vary}
    prefill = next((text for name, text in varied.items() if name in SPLIT), None)
    axes: dict[str, Sequence[Any]] = dict(
        read_axis(text, settings) for name, text in varied.items() if name not in SPLIT
    )
    axes = {**config.free, **axes}
    whole = [settings]
    if prefill is not None:
        apart = _apart(settings.deployment, pool.mocker, pool.timing)
        whole.append(replace(settings, deployment=apart))
    found: list[Candidate] = []
    impossible: dict[str, str] = {}
    for base in whole:
        own = dict(axes)
        if base.deployment.is_disaggregated and prefill is not None:
            own = {**dict([read_axis(prefill, base)]), **own}
        for combination in itertools.product(*own.values()):
            changes = dict(zip(own, combination, strict=True))
            try:
                found.append(_candidate({"router_mode": router_mode, **changes}, base))
            except ValueError as error:
                impossible[layout_name(changes)] = str(error)
    return found, impossible


def _apart(deployment: Deployment, engine: EngineConfig, timing: TimingConfig) -> Deployment:
    one = RoleConfig(workers=1)
    return replace(deployment, pools=simulated_pools(PoolConfig(prefill=one, decode=one), engine, timing))


def _candidate(changes: Mapping[str, Any], base: Settings) -> Candidate:
    settings = change(base, changes)
    deployment = settings.deployment
    counted = next(pool for pool in deployment.pools if pool.role != "prefill")
    fixed = sum(pool.num_gpus for pool in deployment.pools if pool.role == "prefill")
    return Candidate(
        changes=changes,
        settings=settings,
        number="workers" if counted.role == "aggregated" else "decode_workers",
        fixed_gpus=fixed,
        gpus_per_worker=counted.gpus_per_worker,
        gpu=counted.timing.gpu or "",
    )
