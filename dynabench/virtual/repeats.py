"""Looks of a planner that would only repeat the ones before, because nothing happens in the cluster for a long time.

    last event      settled: has seen the same for `after_s`                    next event
        |--looks--------|--a cycle--|..cycles that are left out..|--looks for `after_s`--|

The looks at the end are taken, so that whatever the planner remembers of a window of time is what it would be.
"""

from collections import deque
from dataclasses import replace

from serving.planner import Observation, Rest, ScalingDecision


class Repeats:
    """Recognises a planner that only repeats itself."""

    def __init__(self, rest: Rest | None, interval_s: float) -> None:
        """Follow a planner that decides at this interval."""
        self._rest, self._interval_s = rest, interval_s
        self._last: Observation | None = None
        self._since_s = 0.0
        self._cycle: deque[tuple[str, ...]] = deque(maxlen=1 if rest is None else rest.every)

    def add(self, seen: Observation, decision: ScalingDecision) -> None:
        """Record a look."""
        if decision.orders or self._last is None or not _is_same(seen, self._last):
            self._since_s = seen.now
        self._last = seen
        self._cycle.append(decision.notes)

    def cycles(self, until_s: float) -> int:
        """Return how many whole cycles of looks can be left out, if nothing happens until then."""
        if self._rest is None or self._last is None:
            return 0
        after_s, cycle_s, now = self._rest.after_s, self._rest.every * self._interval_s, self._last.now
        if now - self._since_s < after_s + cycle_s:
            return 0
        return max(int((until_s - now - after_s) / cycle_s) - 1, 0)

    @property
    def notes(self) -> list[str]:
        """The notes of the last cycle."""
        return [note for notes in self._cycle for note in notes]

    @property
    def looks(self) -> int:
        """The looks of a cycle."""
        return len(self._cycle)


def _is_same(seen: Observation, other: Observation) -> bool:
    """Return whether a planner sees the same, apart from the time; sums of times may round."""
    if seen.traffic is None or other.traffic is None:
        return False
    return replace(seen, now=other.now, traffic=replace(seen.traffic, duration_s=other.traffic.duration_s)) == other
