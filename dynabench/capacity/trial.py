"""Try one layout with a number of workers; a run that cannot meet a limit any more is not simulated to its end."""

from dynabench.arm import Arm
from dynabench.capacity.cutoff import Cutoff, DecidedError
from dynabench.capacity.sureness import sureness_in
from dynabench.experiment.points import point_of, simulate_runs
from dynabench.experiment.source import Source
from dynabench.interrupt import Flag
from reports.capacity.answer import Sureness
from reports.figures.conditions import Condition
from reports.sweep.points import AnyPoint, Cut, Impossible


def attempt(
    arm: Arm,
    source: Source,
    seed: int,
    repeats: int,
    limits: list[Condition],
    attainment: float,
    flag: Flag,
    is_sure_wanted: bool,
) -> tuple[AnyPoint, list[Sureness]]:
    """Simulate a combination of settings until it has missed a limit for certain, or else to its end.

    If wanted, also return how certain it is that the limits are met, as long as the runs are at hand.
    """
    workload = source(arm.settings.shape)
    has_window = arm.settings.load.has_window  # then it is not known before the end how many values count
    cutoff = None if has_window else Cutoff(limits, workload, attainment, repeats=repeats)
    try:
        runs = simulate_runs(arm, source, seed, repeats, flag, cutoff)
    except DecidedError as decided:
        return Cut(arm.name, arm.plain_changes, decided.missed, decided.requests), []
    if isinstance(runs, Impossible):
        return runs, []
    point = point_of(arm, source, runs, limits, attainment)
    is_needed = is_sure_wanted and point.state == "met"
    return point, sureness_in(runs[0], arm, limits, attainment) if is_needed else []
