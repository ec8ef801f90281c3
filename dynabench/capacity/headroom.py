"""How much more load a layout takes: a bisection whose steps depend on nothing but its results."""

from collections.abc import Callable

from msgspec import structs

from reports.capacity.answer import Held
from reports.sweep.points import AnyPoint

PRECISION = 0.05
"""How close the highest load that met the limits and the lowest that missed one come, as a share of the first."""
MOST = 2.0
"""The most load that is tried, as a multiple of the load planned for."""

MAY_TRY = 3
"""About how many loads are tried that the rest of a plan has not simulated."""


def held_by(at: Callable[[float], AnyPoint], reached: Callable[[float], float], planned: float) -> Held:
    """Find the highest load at which a layout meets the limits.

    Args:
        at: returns the point of a load.
        reached: returns the load that a multiple of the planned one comes to.
        planned: the load planned for, at which it meets them.
    """
    held = Held(1.0)
    while (wanted := next_load(held.holds_to, held.misses_at)) is not None:
        times = round((load := reached(wanted)) / planned, 4)
        if times in (held.holds_to, held.misses_at):  # nothing between two whole numbers in flight
            break
        point = at(load)
        if point.state == "met":
            held = structs.replace(held, holds_to=times)
        else:
            held = structs.replace(held, misses_at=times, outcomes=list(point.outcomes))
    return held


def next_load(met: float, missed: float | None) -> float | None:
    """Return the load to try next, as a multiple of the one planned for; None if enough is known.

    Args:
        met: the highest load known to meet the limits; at first 1.
        missed: the lowest load known to miss one; None if none is.
    """
    if missed is None:
        return None if met >= MOST else (MOST if met > 1 else (1 + MOST) / 2)
    return None if missed - met <= PRECISION * met else round((met + missed) / 2, 2)
