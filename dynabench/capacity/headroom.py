"""How much more load a layout takes: a bisection whose steps depend on nothing but its results."""

PRECISION = 0.05
"""How close the highest load that met the limits and the lowest that missed one come, as a share of the first."""
MOST = 2.0
"""The most load that is tried, as a multiple of the load planned for."""


def next_load(met: float, missed: float | None) -> float | None:
    """Return the load to try next, as a multiple of the one planned for; None if enough is known.

    Args:
        met: the highest load known to meet the limits; at first 1.
        missed: the lowest load known to miss one; None if none is.
    """
    if missed is None:
        return None if met >= MOST else (MOST if met > 1 else (1 + MOST) / 2)
    return None if missed - met <= PRECISION * met else round((met + missed) / 2, 2)
