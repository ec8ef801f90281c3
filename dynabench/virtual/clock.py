"""The clock of virtual time: a queue of callbacks at known times. simpy's processes run on it, too (`processes.py`).

The loop is ours because nearly all that happens is a callback at a known time, and simpy's events cost more than twice as
much for it and take delays, which round (docs/decisions/0041).
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

COMPLETION: Final = 0
ARRIVAL: Final = 1
SCHEDULING: Final = 2
"""Priorities of what happens at the same instant, lowest first."""

LOOK_EVERY: Final = 64
"""Events between two looks of somebody outside, which may use files."""

Callback = Callable[[], object]


class Clock:
    """See the module."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time (s)."""
        self.num_events = 0
        """Events so far."""
        self.on_look: Callback | None = None
        """Called now and then between two events."""
        self._appointments: list[tuple[float, int, int, Callback]] = []
        self._num_made = 0

    def at(self, time: float, priority: int, callback: Callback) -> None:
        """Schedule a callback; of equal times, the lower priority number comes first."""
        self._num_made += 1
        heappush(self._appointments, (time, priority, self._num_made, callback))

    def peek(self) -> float:
        """Return the time of the next event (s), infinity if there is none."""
        return self._appointments[0][0] if self._appointments else math.inf

    def step(self) -> None:
        """Advance to the next event and process it; there must be one."""
        self.now, _, _, callback = heappop(self._appointments)
        callback()
        self.num_events += 1
        if self.on_look is not None and not self.num_events % LOOK_EVERY:
            self.on_look()

    def run(self, until: float = math.inf) -> None:
        """Process all events before a time (s), to which the clock then advances if it is finite."""
        appointments = self._appointments
        while appointments and appointments[0][0] < until:
            self.step()
        if until < math.inf:
            self.now = until
