"""Sweeps: every combination of settings, or the highest rate that meets the limits, in virtual time on all cores.

Each simulated point is saved in its own file as soon as it is done, so that an interrupted sweep can be resumed.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from msgspec import UNSET

from dynabench.deployment.engines import SIZES, check_fits, engines_of, refuse_idle_settings
from dynabench.experiment.arms import comparison_of
from dynabench.experiment.axes import SENT, change, kinds_of, path_of, setting_of
from dynabench.experiment.head import head_of
from dynabench.experiment.limits import check_values
from dynabench.experiment.manifest import manifest_of, subtitle_of
from dynabench.experiment.no_effect import no_effect
from dynabench.experiment.parallel import in_parallel
from dynabench.experiment.refused import check_refusals
from dynabench.experiment.search import Bracket, Sense
from dynabench.experiment.settings import ExperimentConfig, SweepConfig
from dynabench.experiment.source import Source, source_of
from dynabench.experiment.store import PointStore, identity_of
from dynabench.interrupt import Flag, Interrupt, InterruptError
from dynabench.plan import Arm, Plan, Settings, plans
from dynabench.progress import Display
from dynabench.terminal import Terminal
from dynabench.virtual.run import run as simulate
from foundation.errors import UserError
from foundation.settings import short
from reports import fleet_figures, gate, sufficiency, tiers
from reports.best_point import series
from reports.conditions import METRICS, Condition
from reports.outcomes import Outcome, of_requests, state_of
from reports.points import AnyPoint, Found, Impossible, Point, Quantiles, Series, Sweep
from reports.records import Record
from reports.statistics import blocks_of
from reports.summarize import by_request, summarize
from reports.summary import ArmSummary
from workloads import Workload, WorkloadError

ALONE = 4
"""How much coarser the search on a single repeat is, because it only has to show how much repeats differ."""


def run_sweep(
    files: tuple[Path, ...],
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
    from reports import sweep_report

    limits = experiment.limits
    if config.find is not None and not limits:
        raise UserError(
            "--find searches for the highest value that meets the limits; set them with --slo or --slo-preset"
        )
    modes = replace(experiment, noise_floor=False)
    arms, left_out = comparison_of(modes, settings)
    gate.refuse_idle(gates, num_arms=len(arms), has_limits=bool(limits), finds=config.find is not None)
    if setting_of(config.find or "").rpartition(".")[2] not in SIZES:
        refuse_idle_settings([arm.settings.deployment for arm in arms])
    searched = {name: getattr(config, name) for name in ("find", "low", "high", "precision", "attainment")}
    identity = identity_of(files, experiment, settings, searched)
    out = experiment.out or Path("results") / f"sweep-{identity.key}"
    store = PointStore(out, identity, "sweep")
    for reason in left_out:
        console.say(f"left out: {reason}")
    source = source_of(files, experiment)
    workload = source(arms[0].settings.shape)
    if config.find is not None:
        check_values(limits, workload, arms[0].settings.load)
    with Interrupt() as interrupt:
        work = _Work(source, experiment, config, store, limits, interrupt)
        if config.find is None:
            is_complete = _grid(work, arms, console)
            found: list[Found] = []
        else:
            is_complete, found = _search(work, arms, console)
        rows = (
            [row for row in (work.store.known(arm) for arm in arms) if row is not None]
            if config.find is None
            else found
        )
        store.check_unchanged(identity_of(files, experiment, settings, searched))
        manifest = manifest_of("virtual", files, workload, experiment, settings, arms, [])
        manifest |= {"sweep": asdict(config), "identity": identity.key}
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
            shown = f"{short(min(its))} to {short(max(its))}" if is_range else ", ".join(map(short, its))
            parts.append(shown if name == "router_mode" else f"{name.replace('_', ' ')} {shown}")
    return "; ".join(parts)


class _Work:
    """Everything that the points of a sweep need, and the points known so far."""

    def __init__(
        self,
        source: Source,
        experiment: ExperimentConfig,
        config: SweepConfig,
        store: PointStore,
        limits: list[Condition],
        interrupt: Interrupt,
    ) -> None:
        self.interrupt = interrupt
        self.source = source
        self.experiment = experiment
        self.config = config
        self.store = store
        self.limits = limits

    def call(self, arm: Arm) -> tuple[Any, tuple[Any, ...]]:
        """Return the call that simulates a point."""
        experiment = self.experiment
        return simulate_point, (
            arm, self.source, experiment.seed, experiment.repeats, self.limits, self.config.attainment, self.interrupt.flag,
        )  # fmt: skip


def simulate_point(
    arm: Arm,
    source: Source,
    seed: int,
    repeats: int,
    limits: list[Condition],
    attainment: float,
    flag: Flag,
) -> Point | Impossible:
    """Simulate a combination of settings and return its figures over all repeats, or why it is impossible.

    Raises:
        InterruptError: the user interrupted it.
    """
    runs = simulate_runs(arm, source, seed, repeats, flag)
    return runs if isinstance(runs, Impossible) else point_of(arm, source, runs, limits, attainment)


def simulate_runs(arm: Arm, source: Source, seed: int, repeats: int, flag: Flag) -> list[Record] | Impossible:
    """Simulate every repeat of a combination of settings, or say why it is impossible.

    Raises:
        InterruptError: the user interrupted it.
    """
    workload = source(arm.settings.shape)
    try:
        for engine in set(engines_of(arm.settings.deployment)):
            check_fits(workload, engine, fail_on_too_long=arm.settings.load.fail_on_too_long)
    except (ValueError, WorkloadError) as error:
        return Impossible(arm.name, arm.plain_changes, str(error))
    return [
        simulated_whole(plan, workload, flag, on_progress=flag.progress.of(len(workload), run=number, runs=repeats))
        for number, plan in enumerate(plans([arm], repeats, seed))
    ]


def point_of(arm: Arm, source: Source, runs: list[Record], limits: list[Condition], attainment: float) -> Point:
    """Return the figures of a combination of settings over all its repeats."""
    workload, deployment, repeats = source(arm.settings.shape), arm.settings.deployment, len(runs)
    figures, outcomes = _judged(runs, limits, attainment)
    alone = [_judged([run], limits, attainment)[1] for run in runs] if repeats > 1 else []
    states = [state_of(each) for each in alone]
    spent = [tiers.spent(run) for run in runs]
    by_limit = {one.limit: [other for each in alone for other in each if other.limit == one.limit] for one in outcomes}
    intended = runs[0].requests.intended_s
    start, stop = float(intended.min()), float(intended.max())
    return Point(
        name=arm.name,
        changes=arm.plain_changes,
        workers=deployment.num_workers,
        gpus=sum(pool.num_gpus for pool in deployment.pools),
        offered_per_s=len(workload) / (stop - start) if stop > start else None,
        stability=figures.stability,
        outcomes=[one.over_repeats(by_limit[one.limit]) for one in outcomes],
        is_complete=figures.is_complete,
        ttft_sched=Quantiles.of(figures.ttft_sched),
        ttft=Quantiles.of(figures.ttft),
        split=figures.split or None,
        is_apart=figures.is_apart,
        ttst=Quantiles.of(figures.metric("ttst")),
        itl=Quantiles.of(figures.itl),
        tpot=Quantiles.of(figures.tpot),
        e2e_sched=Quantiles.of(figures.e2e_sched),
        throughput=figures.throughput,
        goodput=figures.goodput or None,
        cache=figures.cache,
        imbalance=figures.imbalance,
        preemptions=figures.preemptions,
        wall_s=sum(run.wall_s for run in runs),
        repeats=[] if "unknown" in states else [state == "met" for state in states],
        hits=tiers.hits(runs),
        tiers=figures.tiers or [],
        gpu_s=tiers.gpu_seconds(spent),
        spent=spent,
        fleet=fleet_figures.figures(runs, limits, fleet_figures.windows(runs)) or UNSET,
        series=_series(runs),
        too_little=sufficiency.remarks([run.measured for run in runs]),
        requests=figures.requests,
        failed=figures.failed,
        with_failures={
            name: Quantiles.with_failures(figures.metric(name)) for name in METRICS.values() if figures.failed
        },
    )


def _series(runs: list[Record]) -> Series:
    """Return the values of a point by parts of the workload."""
    measured = [run.measured for run in runs]
    table = by_request(measured, max(int(run.requests.request.max(initial=-1)) for run in runs) + 1)
    blocks = blocks_of(table["intended_s"], table["e2e_sched"])
    return series(table, int(blocks.max(initial=0)) + 1)


def simulated_whole(
    plan: Plan, workload: Workload, flag: Flag, on_progress: Callable[[int], None] | None = None
) -> Record:
    """Simulate a run, all of it.

    Raises:
        InterruptError: the user interrupted it.
    """
    record = simulate(plan, workload, on_progress=on_progress, is_interrupted=flag.is_raised)
    if not record.is_complete:
        raise InterruptError
    return record


def _judged(runs: list[Record], limits: list[Condition], attainment: float) -> tuple[ArmSummary, list[Outcome]]:
    """Return the figures of runs of one arm, and the outcomes of the limits, including a steady queue."""
    (figures,) = summarize(runs, limits, with_intervals=False).arms.values()
    outcomes = list(figures.outcomes or [])
    if figures.goodput and (attained := of_requests(limits, figures.goodput, attainment)) is not None:
        outcomes.append(attained)
    if not figures.stability.is_stable:
        grew = f"{figures.stability.start:.0f} requests were waiting at first, {figures.stability.end:.0f} at the end"
        outcomes.append(Outcome("steady queue", "missed", reason=grew))
    return figures, outcomes


def _grid(work: _Work, arms: list[Arm], console: Terminal) -> bool:
    """Simulate the missing points; return whether all points are known now."""
    todo = [arm for arm in arms if work.store.known(arm) is None]
    if len(todo) < len(arms):
        console.print(f"{len(arms) - len(todo)} of {len(arms)} points are already simulated")
    with contextlib.suppress(InterruptError), Display("sweeping", "points", work.interrupt, console):
        return _simulate(work, todo)
    return False


def _search(work: _Work, arms: list[Arm], console: Terminal) -> tuple[bool, list[Found]]:
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

    def found(self, work: _Work, name: str) -> Found:
        """Return the result of the search."""
        bracket = self.bracket
        met = self.at(work, name, bracket.met)
        assert met is None or isinstance(met, Point)
        return Found(
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
    count = 0
    for place, point in in_parallel(
        calls, work.experiment.jobs, interrupt=work.interrupt, backend=config.backend, address=config.cluster
    ):
        work.store.keep(arms[place], point)
        count += 1
    return count == len(arms)


def _at(arm: Arm, name: str, value: Any) -> Arm:
    """Set the searched setting of an arm to a value."""
    settings = arm.settings
    if name == "rate" and settings.shape.arrival is None:
        settings = replace(settings, shape=replace(settings.shape, arrival="poisson", rate=value))
    else:
        settings = change(settings, {name: value})
    return Arm(arm.name, settings, {**arm.changes, name: value})
