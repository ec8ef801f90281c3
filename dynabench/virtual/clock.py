"""The clock of virtual time: simpy's, with appointments at absolute times."""

import itertools
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.core import EmptySchedule

COMPLETION, ARRIVAL, SCHEDULING = 0, 1, 2
"""The order of what happens at one instant."""

Callback = Callable[[], object]


class Clock(simpy.Environment):
    """A simpy environment with a queue of its own, in which a time is kept as it is given: sums of delays would round."""

    now: float = 0.0  # simpy's is a property, which costs a call each time it is asked
    """The time (s)."""

    def __init__(self) -> None:
        super().__init__()
        self._appointments: list[tuple[float, int, int, Callback]] = []
        self._numbers = itertools.count()

    def at(self, time: float, priority: int, callback: Callback) -> None:
        """Call back at a time; of equal times, the lower priority number comes first."""
        heappush(self._appointments, (time, priority, next(self._numbers), callback))

    def schedule(self, event: simpy.Event, priority: int = 1, delay: float = 0) -> None:
        """Process a simpy event after a delay (s)."""
        self.at(self.now + delay, priority, partial(_process, event))

    def peek(self) -> float:
        """Return the time of the next appointment (s), infinity if there is none."""
        return self._appointments[0][0] if self._appointments else float("inf")

    def step(self) -> None:
        """Go to the next appointment and keep it.

        Raises:
            EmptySchedule: there is none.
        """
        if not self._appointments:
            raise EmptySchedule
        self.now, _, _, callback = heappop(self._appointments)
        callback()


def _process(event: Any) -> None:
    """Call back those who wait for an event; a failure that none of them takes is raised."""
    callbacks, event.callbacks = event.callbacks, None
    for callback in callbacks:
        callback(event)
    if not event.ok and not event.defused:
        raise event.value
