"""Which load to try next: up in large steps until throughput stops growing, then closer to where something changes.

1  4  16  64  256        throughput stops growing: 256 gives no more than 64
       32                closer to the knee: does it lie between 16 and 64?
          24 28          closer to the highest load within the limits, if there are any
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from reports.sweep.curve import NEAR

STEP = 4.0
"""By what loads are multiplied on the way up."""
GROWTH = 1.25
"""Throughput that grows by less in a step is about as high as it gets: the next step would mostly wait."""
CLOSE = 1.5
"""The knee lies between loads that differ by less than this factor."""

Seeks = Literal["knee", "limits"]


class Tried(NamedTuple):
    """What came of a load."""

    load: float
    throughput: float
    """0 if nothing was answered."""
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
        precision: float = 0.1,
    ) -> None:
        """Start at the lowest load.

        Args:
            loads: the loads to try in their order, or the lowest and the highest of a range.
            is_range: whether it is a range, in which loads are chosen by what came of those before.
            is_whole: whether loads are whole numbers.
            seeks: what decides how far to go: the throughput's growth, or the limits.
            precision: the relative distance between the last load within the limits and the first beyond them at which the
                search ends.
        """
        self._loads, self._is_range, self._is_whole = list(loads), is_range, is_whole
        self._seeks, self._precision = seeks, precision
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
            return min(self._rounded(last.load * STEP), high)
        return next((load for edge in self._edges() if (load := self._between(*edge)) is not None), None)

    def _is_far_enough(self) -> bool:
        """Return whether higher loads would teach nothing."""
        last = self.tried[-1]
        if not last.throughput:
            return True
        if self._seeks == "limits":
            return last.is_met is False
        before = max((each.throughput for each in self.tried[:-1]), default=0.0)
        return last.throughput < GROWTH * before

    def _edges(self) -> list[tuple[float, float, float]]:
        """Return pairs of neighbours between which something changes, and how close they have to be."""
        found = []
        if (edge := self._edge_of_limits()) is not None:
            found.append((*edge, 1 + self._precision))
        if self._seeks == "knee" and (edge := self._edge_of_knee()) is not None:
            found.append((*edge, CLOSE))
        return found

    def _edge_of_limits(self) -> tuple[float, float] | None:
        """Return the highest load within the limits, and the lowest beyond them."""
        missed = next((place for place, each in enumerate(self.tried) if each.is_met is False), None)
        if not missed or not self.tried[missed - 1].is_met:
            return None
        return self.tried[missed - 1].load, self.tried[missed].load

    def _edge_of_knee(self) -> tuple[float, float] | None:
        """Return the lowest load with nearly the highest throughput, and the one below it."""
        most = max(each.throughput for each in self.tried)
        place = next(place for place, each in enumerate(self.tried) if each.throughput >= NEAR * most)
        return (self.tried[place - 1].load, self.tried[place].load) if place else None

    def _between(self, low: float, high: float, close: float) -> float | None:
        """Return a load between two, None if they are close."""
        if high <= low * close or (self._is_whole and high - low <= 1):
            return None
        return self._rounded(math.sqrt(low * high))

    def _rounded(self, load: float) -> float:
        return float(round(load)) if self._is_whole else float(f"{load:.3g}")
