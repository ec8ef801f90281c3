"""How far demand exceeded what was expected, and so how much room to leave for what nobody foresees."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

FEWEST = 24
"""Comparisons below which nothing is foreseen."""
SMALLEST = 0.05
"""Share of the usual demand below which an expectation counts as that much: next to nothing, everything is a surprise."""


class Surprises:
    """Demand of the last while beside what was expected of it some time before."""

    def __init__(self, ahead_s: float, memory_s: float) -> None:
        """Compare demand with what was expected of it `ahead_s` before, and remember that for `memory_s`."""
        self._ahead_s = ahead_s
        self._memory_s = memory_s
        self._expected: deque[tuple[float, float]] = deque()
        self._level: float | None = None  # what was expected of the present
        self._seen: deque[tuple[float, float, float]] = deque()  # when, demand, and what was expected of it

    def add(self, now: float, demand: float, expected: float) -> None:
        """Note the demand of the last look, and what is expected of the time `ahead_s` from now on."""
        while self._expected and self._expected[0][0] <= now:
            self._level = self._expected.popleft()[1]
        self._expected.append((now + self._ahead_s, expected))
        if self._level is not None:
            self._seen.append((now, demand, self._level))
        while self._seen and self._seen[0][0] < now - self._memory_s:
            self._seen.popleft()

    def foresee(self, expected: float, share: float) -> float | None:
        """Return the demand to be ready for, given what is expected; None if too little is known.

        It is the expectation times the factor that sufficed for this share of recent demand, but at most the demand that itself
        sufficed for that share: a burst out of nothing need not come on top of the load that is there.
        """
        total = sum(demand for _, demand, _ in self._seen)
        if len(self._seen) < FEWEST or not total:
            return None
        least = SMALLEST * total / len(self._seen)
        times = _within(((demand / max(level, least), demand) for _, demand, level in self._seen), share * total)
        most = _within(((demand, demand) for _, demand, _ in self._seen), share * total)
        return max(min(times * expected, most), expected)


def _within(rows: Iterable[tuple[float, float]], total: float) -> float:
    """Return the value up to which rows of (value, weight) have this weight together."""
    ordered = sorted(rows)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[min(bisect_left(sums, total), len(ordered) - 1)][0]
