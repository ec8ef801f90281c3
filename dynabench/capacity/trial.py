"""Try one layout with a number of workers; a run that cannot meet a limit any more is not simulated to its end."""

from typing import NamedTuple

from dynabench.arm import Arm
from dynabench.capacity.cutoff import Cutoff, DecidedError
from dynabench.capacity.lean import anyone_preempted, lean, was_anyone_preempted
from dynabench.capacity.sureness import sureness_in
from dynabench.experiment.points import point_of, simulate_runs
from dynabench.experiment.source import Source
from dynabench.interrupt import Flag
from reports.capacity.answer import Sureness
from reports.figures.conditions import Condition
from reports.record.records import Record
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
    may_cut: bool = True,
) -> tuple[AnyPoint, list[Sureness]]:
    """Simulate a combination of settings until it has missed a limit for certain, or else to its end.

    If wanted, also return how certain it is that the limits are met, as long as the runs are at hand. Unless it may be cut, it
    is simulated to its end in any case.
    """
    rest = source, seed, repeats, limits, attainment, flag, may_cut
    found = _runs(simpler, *rest) if (simpler := _lean(arm, source)) is not arm else None
    if found is None or found.was_anyone_preempted:
        found = _runs(arm, *rest)
    if not isinstance(found.runs, list):
        return found.runs, []
    point = point_of(arm, found.runs, limits, attainment)
    is_needed = is_sure_wanted and point.state == "met"
    return point, sureness_in(found.runs[0], arm, limits, attainment) if is_needed else []


def _lean(arm: Arm, source: Source) -> Arm:
    try:
        return lean(arm, source(arm.settings.shape))
    except ValueError:
        return arm  # it cannot be simulated; `simulate_runs` says why


class _Tried(NamedTuple):
    """The runs of a combination of settings, or the point if they are none."""

    runs: list[Record] | Impossible | Cut
    was_anyone_preempted: bool


def _runs(
    arm: Arm,
    source: Source,
    seed: int,
    repeats: int,
    limits: list[Condition],
    attainment: float,
    flag: Flag,
    may_cut: bool,
) -> _Tried:
    may_cut &= not arm.settings.load.has_window  # then it is not known before the end how many values count
    cutoff = Cutoff(limits, source(arm.settings.shape), attainment, repeats=repeats) if may_cut else None
    try:
        runs = simulate_runs(arm, source, seed, repeats, flag, cutoff)
    except DecidedError as decided:
        cut = Cut(arm.name, arm.plain_changes, decided.missed, decided.cluster.num_ended)
        return _Tried(cut, anyone_preempted(decided.cluster))
    return _Tried(runs, isinstance(runs, list) and was_anyone_preempted(runs))
