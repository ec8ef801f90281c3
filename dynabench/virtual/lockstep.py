"""Data-parallel ranks that share experts take their steps together: each waits for the slowest, and all pad to the largest batch.

Taken one iteration at a time, as any rank may hold up the others at any step.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynabench.virtual.cluster import Clock, Worker

COMPLETION, SCHEDULING = 0, 2


class Lockstep:
    """The ranks of one engine on the clock."""

    def __init__(self, clock: "Clock", workers: list["Worker"]) -> None:
        self._clock = clock
        self._workers = workers
        self._is_busy = False

    def wake(self) -> None:
        """Take a step at this instant, unless one is under way."""
        if not self._is_busy:
            self._is_busy = True
            self._clock.at(self._clock.now, SCHEDULING, self._start)

    def _start(self, _: object) -> None:
        now = self._clock.now
        steps = [step for worker in self._workers if (step := worker.engine.schedule(now)) is not None]
        if not steps:
            self._is_busy = False
            return
        end = max(step.end for step in steps)
        for worker in self._workers:
            worker.engine.stretch(end)
        self._clock.at(end, COMPLETION, self._complete)

    def _complete(self, _: object) -> None:
        for worker in self._workers:
            if worker.engine.step is not None:
                worker.finish_step()
        self._clock.at(self._clock.now, SCHEDULING, self._start)
