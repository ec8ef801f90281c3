"""The layouts that a plan chooses from: every combination of the free settings, with any number of workers."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynabench.arm import Arm, Settings
from dynabench.capacity.settings import PlanConfig
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import check_ranks, refuse_idle_settings
from dynabench.deployment.flags import SPLIT, PoolConfig, RoleConfig, simulated_pools
from dynabench.experiment.arms import layout_name
from dynabench.experiment.axes import change_setting, read_axis, setting_of
from dynabench.experiment.settings import ExperimentConfig
from mocker.config import EngineType
from mocker.timing.config import TimingConfig
from workloads.shape import ShapeConfig


@dataclass(frozen=True)
class Candidate:
    """A layout, and how it is simulated."""

    changes: Mapping[str, Any]
    """Its distinguishing settings, by name."""
    settings: Settings
    """Settings with one worker of the kind whose number is searched for."""
    number: str
    """The setting that is searched for: `workers` or `decode_workers`."""

    @property
    def name(self) -> str:
        """Its distinguishing settings, in words."""
        return named(self.said)

    @property
    def said(self) -> dict[str, Any]:
        """Its distinguishing settings without the router mode."""
        return {name: value for name, value in self.changes.items() if name != "router_mode"}

    @property
    def kinds(self) -> tuple[str, str]:
        """The kinds of layout that it belongs to: split or not, and by GPU."""
        gpus = dict.fromkeys(str(pool.timing.gpu) for pool in self.settings.deployment.pools)
        return "split layouts" if self.prefill else "layouts that are not split", f"layouts on {' and '.join(gpus)}"

    @property
    def counted(self) -> Pool:
        """The workers whose number is searched for."""
        return next(pool for pool in self.settings.deployment.pools if pool.role != "prefill")

    @property
    def prefill(self) -> Pool | None:
        """The prefill workers, whose number is part of the layout."""
        return next((pool for pool in self.settings.deployment.pools if pool.role == "prefill"), None)

    def arm(self, workers: int, *, load: float = 1.0, changes: Mapping[str, Any] | None = None) -> Arm:
        """Return it with this many workers, at a multiple of the load, optionally with other settings."""
        more = {self.number: workers, **(changes or {})}
        settings = change_setting(self.settings, more)
        if load != 1:
            settings = heavier(settings, load)
        said = {**self.changes, **more} | ({"load": load} if load != 1 else {})
        return Arm(layout_name(said), settings, said)


COUNTED = ("workers", "replicas", "decode_workers", "pools.*.replicas", "pools.decode.replicas", "gpus")
"""Names of the settings that are searched for."""


CHUNK: dict[EngineType, str] = {
    "vllm": "max_num_batched_tokens",
    "sglang": "chunked_prefill_size",
    "trtllm": "max_num_tokens",
}
"""What limits the prompt tokens of a step. The plan chooses it by vLLM's name."""


CLOSED = ("concurrency", "session_concurrency")
"""The settings of a closed loop, whose load does not depend on the rate."""


def named(changes: Mapping[str, Any]) -> str:
    """Name a layout; a disaggregated one says so first."""
    return "split: " * (not SPLIT.isdisjoint(changes)) + layout_name(changes)


def heavier(settings: Settings, load: float) -> Settings:
    """Return settings with a multiple of the load: of the rate or, in a closed loop, of what is kept in flight."""
    for name in CLOSED:
        if (count := getattr(settings.load, name)) is not None:
            more = math.ceil(round(count * load, 6))
            return replace(settings, load=replace(settings.load, **{name: more}))
    return replace(settings, shape=_faster(settings.shape, load))


def reached(settings: Settings, load: float, to_whole: Callable[[float], int] = math.ceil) -> float:
    """Return the multiple of the load that this multiple comes to: a closed loop keeps whole numbers in flight."""
    counts = [count for name in CLOSED if (count := getattr(settings.load, name)) is not None]
    return round(max((to_whole(round(count * load, 6)) / count for count in counts), default=load), 4)


def load_told(settings: Settings, load: float) -> str:
    """Name a multiple of the load, in a closed loop with what is kept in flight."""
    kept = [(name, count) for name in CLOSED if (count := getattr(heavier(settings, load).load, name)) is not None]
    return f"{load:g}x" + "".join(f" ({name.replace('_', ' ')} {count:,})" for name, count in kept)


def _faster(shape: ShapeConfig, load: float) -> ShapeConfig:
    """Return a shape in which requests arrive at a multiple of its rate."""
    if shape.rate is not None:
        return replace(shape, rate=shape.rate * load)
    return replace(shape, rate_scale=shape.rate_scale * load)


def has_one_size(config: PlanConfig, timing: TimingConfig) -> bool:
    """Return whether step times are only for one tensor parallel size, as measured ones are."""
    return timing.timing_name != "roofline" and not config.price


def candidates_of(
    config: PlanConfig, experiment: ExperimentConfig, settings: Settings, router_mode: str
) -> tuple[list[Candidate], dict[str, str]]:
    """Return every layout to choose from, and why others are impossible, by name.

    Raises:
        ValueError: an axis is not a setting, or a value is not valid for it.
    """
    (pool,) = settings.deployment.pools
    bases = [settings]
    if any(setting_of(text) in SPLIT for text in experiment.vary):
        bases.append(replace(settings, deployment=_apart(settings.deployment, pool)))
    free = dict(config.free)
    if has_one_size(config, pool.timing) and len(free["tensor_parallel_size"]) > 1:
        del free["tensor_parallel_size"]
    found: list[Candidate] = []
    impossible: dict[str, str] = {}
    for base in bases:
        axes = _axes(experiment.vary, base, is_last=base is bases[-1])
        prefill = {name: values for name, values in axes.items() if name in SPLIT}
        axes = {**prefill, **free, **axes}
        for combination in itertools.product(*axes.values()):
            changes = dict(zip(axes, combination, strict=True))
            try:
                candidate = _candidate({"router_mode": router_mode, **changes}, base)
            except ValueError as error:
                impossible[named(changes)] = str(error)
            else:
                _check_prices(config, candidate.settings.deployment)
                found.append(candidate)
    refuse_idle_settings([candidate.settings.deployment for candidate in found])
    return found, impossible


def _axes(vary: Sequence[str], base: Settings, *, is_last: bool) -> dict[str, Sequence[Any]]:
    """Parse the axes; one that only the last base has, such as one of prefill workers, is left out for the others."""
    found: dict[str, Sequence[Any]] = {}
    for text in vary:
        if (name := setting_of(text)) in COUNTED:
            raise ValueError(f"vary {text!r}: a plan searches for {name}; leave it out, or use dynabench sweep")
        try:
            name, values = read_axis(text, base)
        except ValueError:
            if is_last:
                raise
            continue
        found[name] = values
    return found


def _check_prices(config: PlanConfig, deployment: Deployment) -> None:
    """Refuse a kind of GPU without a price if others have one."""
    for pool in deployment.pools if config.price else ():
        if pool.timing.gpu not in config.prices:
            raise ValueError(f"gpu {pool.timing.gpu} has no price; add --price {pool.timing.gpu}=...")


def _apart(deployment: Deployment, pool: Pool) -> Deployment:
    one = RoleConfig(workers=1)
    return replace(deployment, pools=simulated_pools(PoolConfig(prefill=one, decode=one), pool))


def _candidate(changes: Mapping[str, Any], base: Settings) -> Candidate:
    (first, *_) = base.deployment.pools
    chunk = CHUNK[changes.get("engine_type", first.engine_type)]
    settings = change_setting(
        base, {chunk if name == CHUNK["vllm"] else name: value for name, value in changes.items()}
    )
    check_ranks(settings.deployment)
    number = "decode_workers" if settings.deployment.is_disaggregated else "workers"
    return Candidate(changes, settings, number)
