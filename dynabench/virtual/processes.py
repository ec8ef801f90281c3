"""simpy's processes in virtual time: they run on the cluster's clock, between its callbacks."""

from functools import partial

import simpy
from simpy.core import EmptySchedule
from simpy.events import URGENT

from dynabench.virtual.clock import Clock


class Processes(simpy.Environment):
    """simpy's environment with the queue of a clock; simpy itself processes its events."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @property
    def now(self) -> float:
        """The time (s)."""
        return self._clock.now

    def schedule(self, event: simpy.Event, priority: int = 1, delay: float = 0) -> None:
        """Process an event after a delay (s)."""
        self._clock.at(self._clock.now + delay, priority, partial(self._process, event))

    def peek(self) -> float:
        """Return the time of the next event (s), infinity if there is none."""
        return self._clock.peek()

    def step(self) -> None:
        """Advance to the next event on the clock and process it.

        Raises:
            EmptySchedule: there is none.
        """
        if self._clock.peek() == float("inf"):
            raise EmptySchedule
        self._clock.step()

    def _process(self, event: simpy.Event) -> None:
        """Process an event as simpy does; its own queue has no other."""
        self._queue.append((self._clock.now, URGENT, 0, event))
        super().step()
