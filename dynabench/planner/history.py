"""How the workers changed during a live run, for its record."""

from collections.abc import Sequence

from msgspec.structs import replace

from dynabench.planner.messages import Orders
from dynabench.planner.roster import PoolOfWorkers, Roster
from reports.record.fleet import FleetUse, Headcount, PoolFleet


def fleet_use(roster: Roster, planner: str, given: Sequence[Orders], *, start_s: float, end_s: float) -> FleetUse:
    """Return how the workers changed between two times of the roster's clock; returned times count from `start_s`.

    Args:
        roster: the workers.
        planner: the name of the policy.
        given: the last orders of each planner process.
        start_s: when the run began.
        end_s: when it ended.
    """
    notes: dict[str, int] = {}
    for orders in given:
        for note, count in orders.notes.items():
            notes[note] = notes.get(note, 0) + count
    changes = [change for change in roster.changes if start_s <= change.time_s <= end_s]
    return FleetUse(
        tuple(_pool(roster, pool, start_s, end_s) for pool in roster.pools),
        end_s - start_s,
        planner=planner,
        changes=tuple(replace(change, time_s=change.time_s - start_s) for change in changes),
        decisions=sum(orders.decisions for orders in given),
        notes={note[:1000]: count for note, count in notes.items()},
    )


def _pool(roster: Roster, pool: PoolOfWorkers, start_s: float, end_s: float) -> PoolFleet:
    rows = cut(roster.history.get(pool.name, []), start_s, end_s)
    ends = [row.time_s for row in rows[1:]] + [end_s - start_s]
    gpu_s = sum((end - row.time_s) * row.on_gpus for row, end in zip(rows, ends, strict=True)) * pool.gpus_per_worker
    return PoolFleet(
        pool.name,
        pool.role,
        pool.gpus_per_worker,
        rows,
        gpu_s,
        failed_starts=roster.failed_starts.get(pool.name, 0),
        died=roster.died.get(pool.name, 0),
    )


def cut(rows: Sequence[Headcount], start_s: float, end_s: float) -> tuple[Headcount, ...]:
    """Return the rows of an interval, the first with the state at its start; times count from there."""
    before = [row for row in rows if row.time_s <= start_s]
    within = [row for row in rows if start_s < row.time_s <= end_s]
    first = before[-1:] or [Headcount(start_s, 0, 0, 0, 0)]
    return tuple(replace(row, time_s=max(row.time_s - start_s, 0.0)) for row in [*first, *within])
