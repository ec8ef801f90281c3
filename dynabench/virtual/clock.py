"""The clock of virtual time: simpy's environment around a queue of our own.

The loop is ours because nearly all that happens is a callback at a known time, and simpy's events cost more than twice as
much for it and take delays, which round (docs/decisions/0041). simpy's processes and events run on this clock, too, and
simpy itself processes them.
"""

import itertools
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import simpy
from simpy.core import EmptySchedule
from simpy.events import URGENT

COMPLETION, ARRIVAL, SCHEDULING = 0, 1, 2
"""Priorities of what happens at the same instant, lowest first."""

LOOK_EVERY = 64
"""Events between two looks of somebody outside, which may use files."""

Callback = Callable[[], object]


class Clock(simpy.Environment):
    """See the module."""

    now: float = 0.0  # simpy's is a property, which costs a call at each access
    """The time (s)."""

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0
        """Events so far."""
        self.on_look: Callback | None = None
        """Called now and then between two events."""
        self._appointments: list[tuple[float, int, int, Callback]] = []
        self._numbers = itertools.count()

    def at(self, time: float, priority: int, callback: Callback) -> None:
        """Schedule a callback; of equal times, the lower priority number comes first."""
        heappush(self._appointments, (time, priority, next(self._numbers), callback))

    def schedule(self, event: simpy.Event, priority: int = 1, delay: float = 0) -> None:
        """Process a simpy event after a delay (s)."""
        self.at(self.now + delay, priority, partial(self._process, event))

    def peek(self) -> float:
        """Return the time of the next event (s), infinity if there is none."""
        return self._appointments[0][0] if self._appointments else float("inf")

    def step(self) -> None:
        """Advance to the next event and process it.

        Raises:
            EmptySchedule: there is none.
        """
        if not self._appointments:
            raise EmptySchedule
        self.now, _, _, callback = heappop(self._appointments)
        callback()
        self.num_events += 1
        if self.on_look is not None and not self.num_events % LOOK_EVERY:
            self.on_look()

    def _process(self, event: simpy.Event) -> None:
        """Process a simpy event as simpy does; its queue has no other."""
        self._queue.append((self.now, URGENT, 0, event))
        super().step()
