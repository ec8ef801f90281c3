"""How far demand exceeded the expectation, and so how much room to leave for unforeseen demand."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from itertools import accumulate

FEWEST = 24
"""With fewer comparisons, nothing is predicted."""
SMALLEST = 0.05
"""An expectation is at least this share of the usual demand: compared with almost nothing, all is a surprise."""


class Surprises:
    """Recent demand, compared with the demand that was expected some time before."""

    def __init__(self, ahead_s: float, memory_s: float) -> None:
        """Compare demand with the expectation of `ahead_s` before, and remember that for `memory_s`."""
        self._ahead_s = ahead_s
        self._memory_s = memory_s
        self._expected: deque[tuple[float, float]] = deque()
        self._level: float | None = None  # the demand expected for the present
        self._seen: deque[tuple[float, float, float]] = deque()  # time, demand, expected demand

    def add(self, now: float, demand: float, expected: float) -> None:
        """Record the demand since the last look, and the demand expected `ahead_s` from now."""
        while self._expected and self._expected[0][0] <= now:
            self._level = self._expected.popleft()[1]
        self._expected.append((now + self._ahead_s, expected))
        if self._level is not None:
            self._seen.append((now, demand, self._level))
        while self._seen and self._seen[0][0] < now - self._memory_s:
            self._seen.popleft()

    def foresee(self, expected: float, share: float) -> float | None:
        """Return the demand to be ready for, given the expected demand; None if too little is known.

        It is the expectation times the factor that sufficed for this share of recent demand, but at most the demand
        that itself sufficed for that share: an unexpected burst need not come on top of the present load.
        """
        total = sum(demand for _, demand, _ in self._seen)
        if len(self._seen) < FEWEST or not total:
            return None
        least = SMALLEST * total / len(self._seen)
        times = _within(((demand / max(level, least), demand) for _, demand, level in self._seen), share * total)
        most = _within(((demand, demand) for _, demand, _ in self._seen), share * total)
        return max(min(times * expected, most), expected)


def _within(rows: Iterable[tuple[float, float]], total: float) -> float:
    """Return the value up to which rows of (value, weight) add up to this weight."""
    ordered = sorted(rows)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[min(bisect_left(sums, total), len(ordered) - 1)][0]
