"""About how long a plan will take: the simulations that may follow, times what one has taken so far."""

from dynabench.capacity.findings import Findings
from dynabench.capacity.headroom import MAY_TRY
from dynabench.capacity.search import Search

FOR_A_LOAD = 2
"""Simulations for each further multiple of the load: the chosen layout, and a larger one or an equally cheap one."""


def num_left(found: Findings, search: Search, *, num_modes: int) -> int:
    """Return about how many simulations follow."""
    is_first = search is found.search
    loads = [load for load in found.config.multiples if load not in found.finished]
    around = FOR_A_LOAD * (len(loads) - is_first) + (2 * num_modes if num_modes > 1 else 0) + MAY_TRY
    return search.num_open + around


def told(count: int, each_s: float) -> str:
    """Say how long so many simulations take."""
    left_s = count * each_s
    unit = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{max(left_s, 1):.0f} s"
    return f"about {unit} left"
