"""By how much demand exceeded what was expected of it: how much room must be left for what nobody foresees."""

from bisect import bisect_left
from collections import deque
from itertools import accumulate

FEWEST = 24
"""Comparisons that say something."""
SMALLEST = 0.05
"""Share of the usual demand below which an expectation counts as that much: next to nothing, everything is a surprise."""


class Surprises:
    """Demand of the last while beside what was expected of it some time before."""

    def __init__(self, ahead_s: float, memory_s: float) -> None:
        """Begin to compare what comes with what was expected so long before (s), and remember it for so long (s)."""
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

    def within(self, share: float) -> float | None:
        """Return how many times what was expected the demand came to, at most, for this share of all that was asked for.

        None if too little is known.
        """
        total = sum(demand for _, demand, _ in self._seen)
        if len(self._seen) < FEWEST or not total:
            return None
        least = SMALLEST * total / len(self._seen)
        ratios = sorted((demand / max(level, least), demand) for _, demand, level in self._seen)
        sums = list(accumulate(demand for _, demand in ratios))
        return ratios[min(bisect_left(sums, share * total), len(ratios) - 1)][0]
