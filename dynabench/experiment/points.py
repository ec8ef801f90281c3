"""Points: what a combination of settings does in virtual time, over all its repeats."""

from collections.abc import Callable

from msgspec import UNSET

from dynabench.arm import Arm, Run, runs_of
from dynabench.deployment.engines import check_fits, engines_of
from dynabench.experiment.source import Source
from dynabench.interrupt import Flag, InterruptError
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.run import simulate
from reports.figures import fleet as fleet_figures
from reports.figures import insight, sufficiency, tiers
from reports.figures.conditions import METRICS, Condition
from reports.figures.outcomes import STEADY_QUEUE, Outcome, of_requests, state_of
from reports.figures.statistics import blocks_of
from reports.record.records import Record
from reports.summarize import ByRequest, summarize
from reports.summary import ArmSummary
from reports.sweep.best_point import series
from reports.sweep.points import Impossible, Point, PointSeries, Quantiles
from workloads import Workload, WorkloadError


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
    return runs if isinstance(runs, Impossible) else point_of(arm, runs, limits, attainment)


def simulate_runs(
    arm: Arm,
    source: Source,
    seed: int,
    repeats: int,
    flag: Flag,
    watch: Callable[[Cluster], object] | None = None,
) -> list[Record] | Impossible:
    """Simulate every repeat of a combination of settings, or say why it is impossible; `watch`: see `simulate`.

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
        _simulated_whole(run, workload, flag, flag.progress.of(len(workload), run=number, runs=repeats), watch)
        for number, run in enumerate(runs_of([arm], repeats, seed))
    ]


def point_of(arm: Arm, runs: list[Record], limits: list[Condition], attainment: float) -> Point:
    """Return the figures of a combination of settings over all its repeats."""
    deployment, repeats = arm.settings.deployment, len(runs)
    is_closed = arm.settings.load.is_closed
    figures, outcomes = _judged(runs, limits, attainment, is_closed=is_closed)
    alone = [_judged([run], limits, attainment, is_closed=is_closed)[1] for run in runs] if repeats > 1 else []
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
        offered_per_s=len(intended) / (stop - start) if stop > start else None,
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
        drafts=figures.drafts or [],
        gpu_s=tiers.gpu_seconds(spent),
        spent=spent,
        fleet=fleet_figures.figures(runs, limits, fleet_figures.windows(runs)) or UNSET,
        series=_series(runs),
        too_little=sufficiency.remarks(runs[0].measured),
        held=insight.held([run.measured for run in runs]),
        server=figures.server,
        notes=list(dict.fromkeys(note for run in runs for note in run.notes)),
        requests=figures.requests,
        failed=figures.failed,
        with_failures={
            name: Quantiles.with_failures(figures.metric(name)) for name in METRICS.values() if figures.failed
        },
    )


def _series(runs: list[Record]) -> PointSeries:
    """Return the values of a point by parts of the workload."""
    measured = [run.measured for run in runs]
    table = ByRequest(measured, max(int(run.requests.request.max(initial=-1)) for run in runs) + 1)
    blocks = blocks_of(table["intended_s"], table["e2e_sched"])
    return series(table, int(blocks.max(initial=0)) + 1)


def _simulated_whole(
    run: Run,
    workload: Workload,
    flag: Flag,
    on_progress: Callable[[int], None],
    watch: Callable[[Cluster], object] | None,
) -> Record:
    """Simulate a run, all of it.

    Raises:
        InterruptError: the user interrupted it.
    """
    record = simulate(run, workload, on_progress=on_progress, is_interrupted=flag.is_raised, watch=watch)
    if not record.is_complete:
        raise InterruptError
    return record


def _judged(
    runs: list[Record], limits: list[Condition], attainment: float, *, is_closed: bool
) -> tuple[ArmSummary, list[Outcome]]:
    """Return the figures of runs of one arm, and the outcomes of the limits, including a steady queue if it could grow."""
    (figures,) = summarize(runs, limits, with_intervals=False).arms.values()
    outcomes = list(figures.outcomes or [])
    if figures.goodput and (attained := of_requests(limits, figures.goodput, attainment)) is not None:
        outcomes.append(attained)
    if not (figures.stability.is_stable or is_closed):
        start, end = figures.stability.start, figures.stability.end
        grew = f"the queue grows: {start:.0f} requests were waiting at first, {end:.0f} at the end"
        outcomes.append(Outcome(STEADY_QUEUE, "missed", reason=grew))
    return figures, outcomes
