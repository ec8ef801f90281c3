"""Search for the value of a setting at which the limits start or stop being met."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

from reports.figures.statistics import student_t

Sense = Literal["highest", "lowest"]


def skipped(missed: Mapping[int, frozenset[str]]) -> int | None:
    """Return a whole number between two that miss the limits, which may meet them because the two miss different ones.

    A limit that is missed on both sides is missed between them, too. Where it is not known what is missed, nothing is
    expected between.

    Args:
        missed: the limits that each value tried misses.
    """
    for low, high in pairwise(sorted(missed)):
        if high - low > 1 and missed[low] and missed[high] and not missed[low] & missed[high]:
            return (low + high) // 2
    return None


class Bracket:
    """The values of a setting between which the limits stop being met, and the value to try next.

    The search doubles from the easy end until it finds the other side, then halves the ratio, or for whole numbers the
    distance. If the easy end is unknown, it tries both ends first. Where none meets them, but neighbours among the whole
    numbers that were tried miss different limits, it tries those between.
    """

    def __init__(self, low: float, high: float, *, precision: float, is_whole: bool, sense: Sense | None) -> None:
        """Start a search.

        Args:
            low: the lowest value to try.
            high: the highest value to try.
            precision: the relative width at which the search ends; whole numbers are determined exactly.
            is_whole: whether values are whole numbers.
            sense: whether to find the highest or the lowest value that meets the limits; None: to be determined.
        """
        if is_whole:
            low, high = max(math.ceil(low), 1), math.floor(high)
        self.low, self.high = low, high
        self.sense = sense
        self.met: float | None = None
        """The best known value that meets the limits."""
        self.missed: float | None = None
        """The nearest known value that does not meet them."""
        self._precision = precision
        self._is_whole = is_whole
        self._is_over = False
        self._is_met_at_low: bool | None = None
        self._misses: dict[int, frozenset[str]] = {}
        self._skipped: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to try."""
        return self.next() is None

    @property
    def is_at_end(self) -> bool:
        """Whether the limits are met as far as values were tried, so there may be better values beyond."""
        return self.met is not None and (self.missed is None or not self.is_over)

    def next(self) -> float | None:
        """Return the value to try, or None if the search is over."""
        if self._is_over:
            return None
        if self._skipped is not None:
            return self._skipped
        if self.sense is None:
            return self.low if self._is_met_at_low is None else self.high
        if self.met is not None and self.missed is not None:
            return self._between(self.met, self.missed)
        last = self.met if self.sense == "highest" else self.missed
        return self.low if last is None else min(self._rounded(last * 2), self.high)

    def learn(self, value: float, *, is_met: bool, missed: frozenset[str] = frozenset()) -> None:
        """Record whether the value to try meets the limits, and which of them it misses, if that is known."""
        if not is_met:
            self._misses[int(value)] = missed
        if self._skipped is not None:
            self._learn_skipped(int(value), is_met=is_met)
        elif self.sense is None:
            self._learn_sense(value, is_met=is_met)
        else:
            self._learn_edge(value, is_met=is_met)
        if self._is_over and self.met is None and self._is_whole and (found := skipped(self._misses)) is not None:
            self._skipped, self._is_over = found, False

    def _learn_edge(self, value: float, *, is_met: bool) -> None:
        """Record the result on the way from the easy end, or between the two sides."""
        if is_met:
            self.met = value
        else:
            self.missed = value
        easy, hard = (self.low, self.high) if self.sense == "highest" else (self.high, self.low)
        if self.met is not None and self.missed is not None:
            self._is_over = self._is_narrow()
        else:
            self._is_over = value == (hard if is_met else easy)

    def _learn_skipped(self, value: int, *, is_met: bool) -> None:
        """Record the result of a number between two that miss different limits; from one that meets them, go down."""
        self._skipped = None
        self.met, self.missed = (value, max(n for n in self._misses if n < value)) if is_met else (None, value)
        self.sense = "lowest" if is_met else self.sense
        self._is_over = not is_met or self._is_narrow()

    def forbid(self, value: float) -> None:
        """Record that the value to try is impossible; the search stays below it."""
        self.high = value - 1 if self._is_whole else self.low
        self._is_over = self.high < self.low or self.high in (self.met, self.missed) or not self._is_whole

    def _learn_sense(self, value: float, *, is_met: bool) -> None:
        """Record the result at one end; with both, the sense is known, or that there is no edge between them."""
        if self._is_met_at_low is None:
            self._is_met_at_low = is_met
            return
        if is_met == self._is_met_at_low:
            self.met, self.missed = (value, None) if is_met else (None, value)
            self._is_over = True
            return
        self.sense = "lowest" if is_met else "highest"
        self.met, self.missed = (self.high, self.low) if is_met else (self.low, self.high)
        self._is_over = self._is_narrow()

    def edge(self) -> float | None:
        """Return the searched value: a whole number, or the middle of its bracket; None if it is unknown."""
        if self.met is None or self.missed is None or not self.is_over:
            return None
        return self.met if self._is_whole else math.sqrt(self.met * self.missed)

    def interval(self, repeats: "Sequence[Bracket]") -> tuple[float, float] | None:
        """Return the 95% interval of the value, from searches on single repeats; None if one of them found no edge.

        It is no narrower than the bracket of the search itself.
        """
        known = [math.log(edge) for bracket in repeats if (edge := bracket.edge()) is not None]
        if self.met is None or self.missed is None or len(known) < max(len(repeats), 2):
            return None
        middle, half = fmean(known), student_t(len(known) - 1) * stdev(known) / math.sqrt(len(known))
        ends = (self.met,) if self._is_whole else (self.met, self.missed)
        low = max(min(math.exp(middle - half), *ends), self.low)
        high = min(max(math.exp(middle + half), *ends), self.high)
        if self._is_whole:
            return math.floor(low + 1e-9), math.ceil(high - 1e-9)
        return self._rounded(low), self._rounded(high)

    def _between(self, met: float, missed: float) -> float:
        return (int(met) + int(missed)) // 2 if self._is_whole else self._rounded(math.sqrt(met * missed))

    def _rounded(self, value: float) -> float:
        """Round to as many digits as the precision justifies; the middle of a wide bracket stays inside it."""
        if self._is_whole:
            return int(value)
        return float(f"{value:.{2 - math.ceil(math.log10(self._precision))}g}")

    def _is_narrow(self) -> bool:
        assert self.met is not None
        assert self.missed is not None
        if self._is_whole:
            return abs(self.missed - self.met) <= 1
        return abs(math.log(self.missed / self.met)) <= math.log1p(self._precision)
