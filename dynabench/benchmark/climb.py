"""Which load to try next: up in large steps until throughput stops growing, then closer to where something changes.

1  4  16  64  128        steps get smaller where throughput grows more slowly than the load; 128 gives no more than 64
       32                closer to the knee: does it lie between 16 and 64?
          24 28          closer to the highest load within the limits, if there are any, and to where loads stop being valid
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from reports.sweep.curve import edge_of_limits, knee

STEP = 4.0
"""By what loads are multiplied on the way up, while throughput grows with them."""
SMALL_STEP = 2.0
"""The same once throughput no longer grows with the load: a load far beyond the knee takes long, and its requests mostly
wait."""
SCALES = 0.75
"""Throughput grows with the load if it does by at least this power of it."""
GROWTH = 1.12
"""Throughput that grows by less when the load is doubled is about as high as it gets: the next step would mostly wait."""
CLOSE = 1.5
"""The knee lies between loads that differ by less than this factor, and so does where loads stop being valid."""

Seeks = Literal["knee", "limits"]


class Tried(NamedTuple):
    """What came of a load."""

    load: float
    throughput: float
    """0 if nothing was answered, or the load is not valid."""
    is_met: bool | None
    """Whether all limits hold; None if there are none, or if that is not known."""


class Climb:
    """The loads that were tried, and the next one."""

    def __init__(
        self,
        loads: Sequence[float] | tuple[float, float],
        *,
        is_range: bool,
        is_whole: bool,
        seeks: Seeks = "knee",
        closeness: float = 0.1,
    ) -> None:
        """Start at the lowest load.

        Args:
            loads: the loads to try in their order, or the lowest and the highest of a range.
            is_range: whether it is a range, in which loads are chosen by what came of those before.
            is_whole: whether loads are whole numbers.
            seeks: what decides how far to go: the throughput's growth, or the limits.
            closeness: the relative distance between the last load within the limits and the first beyond them at which the
                search ends.
        """
        self._loads, self._is_range, self._is_whole = list(loads), is_range, is_whole
        self._seeks, self._closeness = seeks, closeness
        self.tried: list[Tried] = []

    def learn(self, tried: Tried) -> None:
        """Note what came of a load."""
        self.tried = sorted([*self.tried, tried])

    def next(self) -> float | None:
        """Return the load to try, None if there is nothing left to learn."""
        known = {each.load for each in self.tried}
        if not self._is_range:
            return next((load for load in self._loads if load not in known), None)
        low, high = self._loads
        if not self.tried:
            return low
        last = self.tried[-1]
        if last.load < high and not self._is_far_enough():
            return min(self._rounded(last.load * (STEP if self._keeps_up() else SMALL_STEP)), high)
        return next((load for edge in self._edges() if (load := self._between(*edge)) is not None), None)

    def _is_far_enough(self) -> bool:
        """Return whether higher loads would teach nothing."""
        last = self.tried[-1]
        if not last.throughput:
            return True
        if self._seeks == "limits":
            return last.is_met is False
        before = max(self.tried[:-1], key=lambda each: each.throughput, default=None)
        return before is not None and last.throughput < before.throughput * GROWTH ** math.log2(last.load / before.load)

    def _keeps_up(self) -> bool:
        """Return whether throughput grew with the load in the last step."""
        *_, before, last = [Tried(0.0, 0.0, None), *self.tried]
        return not before.throughput or last.throughput >= before.throughput * (last.load / before.load) ** SCALES

    def _edges(self) -> list[tuple[float, float, float]]:
        """Return pairs of neighbours between which something changes, and how close they have to be."""
        found = []
        if (edge := self._edge_of_limits()) is not None:
            found.append((*edge, 1 + self._closeness))
        if (edge := self._edge_of_valid()) is not None:
            found.append((*edge, CLOSE))
        if self._seeks == "knee" and (edge := self._edge_of_knee()) is not None:
            found.append((*edge, CLOSE))
        return found

    def _edge_of_limits(self) -> tuple[float, float] | None:
        """Return the lowest load beyond the limits, and the one below it, which holds them or of which it is not known."""
        _, missed = edge_of_limits([each.is_met for each in self.tried])
        return (self.tried[missed - 1].load, self.tried[missed].load) if missed else None

    def _edge_of_valid(self) -> tuple[float, float] | None:
        """Return the lowest load that gives nothing valid, and the one below it."""
        place = next((place for place, each in enumerate(self.tried) if not each.throughput), None)
        return (self.tried[place - 1].load, self.tried[place].load) if place else None

    def _edge_of_knee(self) -> tuple[float, float] | None:
        """Return the lowest load with nearly the highest throughput, and the one below it."""
        place = knee([each.throughput for each in self.tried])
        return (self.tried[place - 1].load, self.tried[place].load) if place else None

    def _between(self, low: float, high: float, close: float) -> float | None:
        """Return a load between two, None if they are close."""
        middle = self._rounded(math.sqrt(low * high))
        return middle if high > low * close and low < middle < high else None

    def _rounded(self, load: float) -> float:
        return float(round(load)) if self._is_whole else float(f"{load:.3g}")
