"""Tables of fleets: the figures of each arm, what its planner changed and why, and its notes."""

from collections.abc import Callable, Mapping

from reports.figures.cells import number, share
from reports.figures.fleet import FORMULAS, FleetFigures, hours
from reports.record.records import Record
from reports.summary import ArmSummary, Summary
from reports.tables.grid import Grid

MOST_CHANGES = 200
"""The most changes of each arm that a page shows."""


def fleet_grid(summary: Summary) -> Grid | None:
    """Lay out the figures of each arm's fleet; return None if no fleet changed."""
    if not summary.has_fleet:
        return None
    columns: dict[str, Callable[[ArmSummary, FleetFigures], str]] = {
        "within limits": lambda arm, _: share(arm.goodput.attainment if arm.goodput else None),
        "GPU-hours": lambda _, its: hours(its.gpu_h),
        "good per GPU-hour": lambda _, its: number(its.good_per_gpu_h),
        "workers (mean / most)": lambda _, its: f"{its.mean_workers:.1f} / {_count(its.most_workers)}",
        "out of limits (s)": lambda _, its: number(its.out_of_limits.total_s if its.out_of_limits else None),
        "longest break (s)": lambda _, its: number(its.out_of_limits.longest_s if its.out_of_limits else None),
        "breaks": lambda _, its: _count(its.out_of_limits.breaks) if its.out_of_limits else "n/a",
        "changes": lambda _, its: _count(its.changes),
        "up / down": lambda _, its: f"{_count(its.added)} / {_count(its.removed)}" if its.changes else "-",
        "possible": lambda _, its: share(its.against_oracle.possible if its.against_oracle else None),
        "needed GPU-hours": lambda _, its: hours(its.against_oracle.needed_gpu_h) if its.against_oracle else "n/a",
        "over (GPU-s)": lambda _, its: number(its.against_oracle.over_gpu_s if its.against_oracle else None),
        "under (GPU-s)": lambda _, its: number(its.against_oracle.under_gpu_s if its.against_oracle else None),
        "died": lambda _, its: _count(its.died),
        "failed starts": lambda _, its: _count(its.failed_starts),
        "lost their worker": lambda _, its: _count(its.lost),
        "busy GPU-hours": lambda _, its: "n/a" if its.busy_gpu_h is None else hours(its.busy_gpu_h),
    }
    lines = [
        (arm, [shown(its, its.fleet) if its.fleet else "n/a" for shown in columns.values()])
        for arm, its in summary.arms.items()
    ]
    return Grid(
        "What does the fleet cost, and which limits does it meet?", list(columns), lines, fleet_note(summary)
    ).eventful()


def _count(value: float) -> str:
    """Format how often something happened; the mean over repeats may not be a whole number."""
    return number(value, 0 if float(value).is_integer() else 1)


def fleet_note(summary: Summary) -> str:
    """Explain the figures of fleets."""
    known = [arm.fleet for arm in summary.arms.values() if arm.fleet]
    text = f"GPU-hours: {FORMULAS['gpu_h']}. Workers: {FORMULAS['workers']}."
    if any(one.planner != "static" for one in known):
        text += f" Changes: {FORMULAS['changes']}."
    width = next((one.out_of_limits.window_s for one in known if one.out_of_limits), None)
    if width is not None:
        text += f" Good per GPU-hour: {FORMULAS['good_per_gpu_h']}. Out of limits: {FORMULAS['out_of_limits']}; windows of {width:g} s."
    if any(one.against_oracle for one in known):
        text += f" Needed: {FORMULAS['oracle']}."
    return f"{text} Columns without any value are left out."


def changes(runs: Mapping[str, Record]) -> list[Grid]:
    """Lay out the first changes of each arm's planner, with their reasons: a table for each arm."""
    return [_changes(arm, run) for arm, run in runs.items() if run.fleet and run.fleet.changes]


def _changes(arm: str, run: Record) -> Grid:
    assert run.fleet is not None
    every = run.fleet.changes
    has_pools = len(run.fleet.pools) > 1
    lines = [
        (f"{each.time_s:,.0f} s", [*([each.pool] * has_pools), f"{each.before} to {each.after}", each.reason])
        for each in every[:MOST_CHANGES]
    ]
    left_out = f" The first {MOST_CHANGES} of {len(every):,}." if len(every) > MOST_CHANGES else ""
    note = f"{len(every):,} changes of {run.fleet.decisions:,} decisions.{left_out}"
    return Grid(arm, [*(["pool"] * has_pools), "workers", "reason"], lines, note, "time")


def notes(runs: Mapping[str, Record]) -> list[Grid]:
    """Lay out how often each planner made each note; return nothing if none did."""
    noted = {arm: run.fleet.notes for arm, run in runs.items() if run.fleet}
    every = sorted({note for its in noted.values() for note in its})
    lines = [(note, [number(its.get(note, 0)) for its in noted.values()]) for note in every]
    return [Grid("How often", list(noted), lines, "", "note")] if lines else []
