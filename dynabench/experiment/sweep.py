"""Sweeps: every combination of settings, or the highest rate that meets the limits, in virtual time on all cores.

Each simulated point is saved in its own file as soon as it is done, so that an interrupted sweep can be resumed.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from dynabench.arm import Arm, Settings
from dynabench.deployment.engines import SIZES, refuse_idle_settings
from dynabench.experiment.arms import comparison_of, why_idle
from dynabench.experiment.axes import SENT, change_setting, kinds_of, path_of, setting_of
from dynabench.experiment.cost import expected_s, num_processes
from dynabench.experiment.head import head_of
from dynabench.experiment.limits import check_values
from dynabench.experiment.manifest import manifest_of, subtitle_of
from dynabench.experiment.no_effect import no_effect
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.points import simulate_point
from dynabench.experiment.refused import check_refusals
from dynabench.experiment.search import Bracket, Sense
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from dynabench.experiment.source import Given, Source, source_of
from dynabench.experiment.store import PointStore, identity_of
from dynabench.interrupt import Interrupt, InterruptError
from dynabench.progress import Display
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.own_code import shown
from foundation.settings import short_value
from reports import gate
from reports.figures.conditions import Condition
from reports.sweep.points import AnyPoint, Point, SearchResult, Sweep

ALONE = 4
"""How much coarser the search on a single repeat is, because it only has to show how much repeats differ."""


def run_sweep(
    given: Given,
    config: SweepConfig,
    experiment: ExperimentConfig,
    settings: Settings,
    *,
    console: Terminal,
    gates: Sequence[Condition] = (),
) -> tuple[Path, dict[str, Any], Sweep]:
    """Carry out a sweep and write its folder; return the folder, the manifest, and the table.

    A folder that contains the same sweep is resumed.

    Raises:
        UserError: the folder contains something else, or a search has no limits.
        ValueError: an axis is not understood, or a gate could not be judged.
    """
    from reports.sweep import report as sweep_report

    limits = experiment.limits
    if config.find is not None and not limits:
        raise UserError(
            "--find searches for the highest value that meets the limits; set them with --slo or --slo-preset"
        )
    modes = replace(experiment, noise_floor=False)
    arms, left_out = comparison_of(modes, settings)
    if config.find is not None:
        name = setting_of(config.find)
        idle = {arm.name: reason for arm in arms if (reason := why_idle(arm.settings.deployment, name))}
        if len(idle) == len(arms):
            raise UserError(f"--find {name}: {idle[arms[0].name]}")
        arms = [arm for arm in arms if arm.name not in idle]
        left_out += [f"{arm} ({name} has no effect: {reason})" for arm, reason in idle.items()]
    basis = gate.Basis(num_arms=len(arms), has_limits=bool(limits), finds=config.find is not None)
    gate.refuse_idle(gates, basis)
    if setting_of(config.find or "").rpartition(".")[2] not in SIZES:
        refuse_idle_settings([arm.settings.deployment for arm in arms])
    searched = {name: getattr(config, name) for name in ("find", "low", "high", "precision", "attainment")}
    identity = identity_of(given, experiment, settings, searched)
    out = experiment.out or Path("results") / f"sweep-{identity.key}"
    store = PointStore(out, identity, "sweep")
    for reason in left_out:
        console.item(f"left out: {reason}")
    source = source_of(given, experiment)
    workload = source(arms[0].settings.shape)
    if config.find is not None:
        check_values(limits, workload, arms[0].settings.load)
    with Interrupt() as interrupt:
        work = _Work(source, experiment, config, store, limits, interrupt)
        if config.find is None:
            is_complete = _grid(work, arms, console)
            found: list[SearchResult] = []
        else:
            is_complete, found = _search(work, arms, console)
        rows = (
            [row for row in (work.store.known(arm) for arm in arms) if row is not None]
            if config.find is None
            else found
        )
        store.check_unchanged(identity_of(given, experiment, settings, searched))
        manifest = manifest_of("virtual", given, workload, experiment, settings, arms, [])
        manifest |= {"sweep": asdict(config), "identity": identity.key, "left_out": left_out}
        if varied := _varied(arms):
            manifest["title"] = f"{workload.name}: {varied}"
        if tried := [_at(arm, row.find, value) for arm, row in zip(arms, found, strict=False) for value in row.tried]:
            manifest["subtitle"] = subtitle_of("virtual", workload, experiment, settings, tried)
            deployments, loads = [arm.settings.deployment for arm in tried], [arm.settings.load for arm in tried]
            manifest["head"] = head_of(workload, deployments, loads) | no_effect("virtual", workload, deployments)
        return out, manifest, sweep_report.write(out, manifest, rows, work.store.all(), is_complete=is_complete)


def _varied(arms: list[Arm]) -> str:
    """Describe the varied settings, each once."""
    values: dict[str, dict[Any, None]] = {}
    for arm in arms:
        for name, value in arm.changes.items():
            values.setdefault(name, {})[value] = None
    parts = []
    for name, its in values.items():
        if len(its) > 1:
            is_range = len(its) > 2 and all(isinstance(value, (int, float)) and value is not True for value in its)
            text = (
                f"{short_value(min(its))} to {short_value(max(its))}"
                if is_range
                else ", ".join(shown(short_value(value)) for value in its)
            )
            parts.append(text if name == "router_mode" else f"{name.replace('_', ' ')} {text}")
    return "; ".join(parts)


@dataclass(frozen=True)
class _Work:
    """Everything that the points of a sweep need, and the points known so far."""

    source: Source
    experiment: ExperimentConfig
    config: SweepConfig
    store: PointStore
    limits: list[Condition]
    interrupt: Interrupt
    took_s: list[float] = field(default_factory=list)
    """How long each point that was simulated took."""

    def call(self, arm: Arm) -> tuple[Any, tuple[Any, ...]]:
        """Return the call that simulates a point."""
        experiment = self.experiment
        return simulate_point, (
            arm, self.source, experiment.seed, experiment.repeats, self.limits, self.config.attainment, self.interrupt.flag,
        )  # fmt: skip

    def point_s(self, arm: Arm) -> float:
        """Return how long a point takes, about: as long as those before it, or as its number of requests says."""
        if self.took_s:
            return fmean(self.took_s)
        return expected_s(len(self.source(arm.settings.shape)) * self.experiment.repeats)


def _grid(work: _Work, arms: list[Arm], console: Terminal) -> bool:
    """Simulate the missing points; return whether all points are known now."""
    todo = [arm for arm in arms if work.store.known(arm) is None]
    if len(todo) < len(arms):
        console.say(f"{len(arms) - len(todo)} of {len(arms)} points are already simulated")
    with contextlib.suppress(InterruptError), Display("sweeping", "points", work.interrupt, console):
        return _simulate(work, todo)
    return False


def _search(work: _Work, arms: list[Arm], console: Terminal) -> tuple[bool, list[SearchResult]]:
    """Search each combination for the value at which the limits stop being met, all combinations at once."""
    config, name = work.config, work.config.find
    assert name is not None
    if any(name in arm.changes for arm in arms):
        raise UserError(f"{name} is what --find searches for; it cannot also be varied")
    is_whole, sense = _kind_of(name, arms[0].settings)
    check_refusals(name, arms, work.source, work.limits, config.attainment)

    def bracket(precision: float) -> Bracket:
        return Bracket(config.low, config.high, precision=precision, is_whole=is_whole, sense=sense)

    searches, is_complete = [_Search(arm, bracket(config.precision)) for arm in arms], False
    display = Display(f"searching {name}", "simulations", work.interrupt, console)
    with contextlib.suppress(InterruptError), display:
        is_complete = _carry_on(work, name, searches, display)
        for search in searches if is_complete else ():
            met = search.at(work, name, search.bracket.met)
            if isinstance(met, Point) and search.bracket.missed is not None:
                coarse = min(ALONE * config.precision, 0.99)
                search.alone = [_Search(search.arm, bracket(coarse), place) for place in range(len(met.repeats))]
        is_complete = is_complete and _carry_on(work, name, [one for each in searches for one in each.alone], display)
    return is_complete, [search.found(work, name) for search in searches]


class _Search:
    """The search of one combination, decided by all repeats together or by one repeat."""

    def __init__(self, arm: Arm, bracket: Bracket, repeat: int | None = None) -> None:
        self.arm, self.bracket, self.repeat = arm, bracket, repeat
        self.alone: list[_Search] = []
        """The searches on its single repeats."""

    def learn(self, value: float, point: AnyPoint) -> None:
        """Record a point that the search asked for."""
        if self.repeat is None:
            missed = frozenset(outcome.limit for outcome in point.outcomes if outcome.state != "met")
            self.bracket.learn(value, is_met=point.state == "met", missed=missed)
        else:
            is_met = isinstance(point, Point) and bool(point.repeats) and point.repeats[self.repeat]
            self.bracket.learn(value, is_met=is_met)

    def at(self, work: _Work, name: str, value: float | None) -> AnyPoint | None:
        """Return the known point at a value."""
        return None if value is None else work.store.known(_at(self.arm, name, value))

    def found(self, work: _Work, name: str) -> SearchResult:
        """Return the result of the search."""
        bracket = self.bracket
        met = self.at(work, name, bracket.met)
        assert met is None or isinstance(met, Point)
        return SearchResult(
            arm=self.arm.name,
            changes=self.arm.plain_changes,
            find=name,
            sense=bracket.sense,
            met=bracket.met,
            missed_at=bracket.missed,
            is_at_end=bracket.is_at_end,
            point=met,
            missed=self.at(work, name, bracket.missed),
            interval=bracket.interval([one.bracket for one in self.alone]),
            is_over=bracket.is_over,
        )


def _carry_on(work: _Work, name: str, searches: list[_Search], display: Display) -> bool:
    """Run all searches at once until they end; return whether all did."""
    while open_ := [search for search in searches if not search.bracket.is_over]:
        display.what = f"searching {name} ({len(searches) - len(open_)} of {len(searches)} done)"
        tried = [(search, arm) for search in open_ if (arm := _tried(search.arm, name, search.bracket)) is not None]
        new = {str(arm.changes): arm for _, arm in tried if work.store.known(arm) is None}
        is_complete = _simulate(work, list(new.values()))
        for search, arm in tried:
            if (point := work.store.known(arm)) is not None:
                search.learn(arm.changes[name], point)
        if not is_complete:
            return False
    return True


def _tried(arm: Arm, name: str, bracket: Bracket) -> Arm | None:
    """Return an arm with the value that a search tries next; None if no value is possible."""
    reason: ValueError | None = None
    while (value := bracket.next()) is not None:
        try:
            return _at(arm, name, value)
        except ValueError as error:
            reason = error
            bracket.forbid(value)
    if bracket.met is None and bracket.missed is None and reason is not None:
        raise reason
    return None


def _kind_of(name: str, settings: Settings) -> tuple[bool, Sense | None]:
    """Return whether a searched setting is a whole number, and whether to find its highest or lowest value.

    Raises:
        ValueError: it is not a setting, or not a number.
    """
    if name == "rate":
        return False, "highest"
    path, kinds = path_of(name, settings), kinds_of(name, settings)
    if kinds.isdisjoint((int, float)):
        raise ValueError(f"{name} is not a number; --find searches for the number at which the limits stop being met")
    if path.partition(".")[0] in SENT:
        return float not in kinds, "highest"
    return float not in kinds, "lowest" if path.endswith((".replicas", "gpus", ".num_gpu_blocks")) else None


def _simulate(work: _Work, arms: list[Arm]) -> bool:
    """Simulate combinations and save their points; return whether all are known now."""
    config, calls = work.config, [work.call(arm) for arm in arms]
    if not calls:
        return True
    jobs = work.experiment.jobs
    if config.backend == "local":
        jobs = num_processes(jobs, len(arms) * work.point_s(arms[0]))
    count = 0
    for place, point in in_parallel(
        calls, jobs, interrupt=work.interrupt, backend=config.backend, address=config.cluster
    ):
        work.store.keep(arms[place], point)
        if isinstance(point, Point):
            work.took_s.append(point.wall_s)
        count += 1
    return count == len(arms)


def _at(arm: Arm, name: str, value: Any) -> Arm:
    """Set the searched setting of an arm to a value."""
    settings = arm.settings
    if name == "rate" and settings.shape.arrival is None:
        settings = replace(settings, shape=replace(settings.shape, arrival="poisson", rate=value))
    else:
        settings = change_setting(settings, {name: value})
    return Arm(arm.name, settings, {**arm.changes, name: value})
