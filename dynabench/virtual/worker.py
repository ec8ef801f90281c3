"""Engines on the clock: one that takes its steps alone, or ranks that take them together."""

from collections.abc import Callable

from dynabench.virtual.clock import COMPLETION, SCHEDULING, Clock
from mocker import Engine, Sequence, StepOutput
from mocker.engine import NO_LIMIT


class Worker:
    """One engine on the clock."""

    def __init__(
        self, number: int, engine: Engine, clock: Clock, *, on_step: Callable[["Worker", StepOutput], object]
    ) -> None:
        """Put an engine on the clock; `on_step` is told what each step brought."""
        self.number = number
        self.engine = engine
        self.caught_up_s = -1.0
        """When the router last took in this worker's leap."""
        self.lockstep: Lockstep | None = None
        """The ranks it takes its steps with."""
        self._clock = clock
        self._on_step = on_step
        self._wake_at = -1.0  # the appointment that counts; others are left over from cut leaps
        self._is_starting = False

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use."""
        return 1 - self.engine.num_free_blocks / self.engine.scheduler.pool.num_blocks

    def add(self, sequence: Sequence) -> None:
        """Take a request."""
        self.engine.add(sequence)
        if self.lockstep is not None:
            self.lockstep.wake()
            return
        step = self.engine.step
        if step is None:
            self._start_soon()
        elif step.cut(self._clock.now):
            self._wake_at = step.end
            self._clock.at(step.end, COMPLETION, self._complete)

    def finish_step(self) -> None:
        """End the step in flight and pass on what it brought."""
        self._on_step(self, self.engine.complete())

    def _start_soon(self) -> None:
        if not self._is_starting:
            self._is_starting = True
            self._clock.at(self._clock.now, SCHEDULING, self._start)

    def _start(self) -> None:
        self._is_starting = False
        step = self.engine.schedule(self._clock.now, max_iterations=NO_LIMIT)
        if step is not None:
            self._wake_at = step.end
            self._clock.at(step.end, COMPLETION, self._complete)

    def _complete(self) -> None:
        now = self._clock.now
        if now != self._wake_at or self.engine.step is None:
            return
        self.finish_step()
        if self._clock.peek() > now:
            self._start()
        else:
            self._start_soon()


class Lockstep:
    """Data-parallel ranks that share experts: each waits for the slowest, and all pad to the largest batch.

    Their steps are taken one iteration at a time, as any rank may hold up the others at any step.
    """

    def __init__(self, clock: Clock, ranks: list[Worker]) -> None:
        self._clock = clock
        self._ranks = ranks
        self._is_busy = False
        for rank in ranks:
            rank.lockstep = self

    def wake(self) -> None:
        """Take a step at this instant, unless one is under way."""
        if not self._is_busy:
            self._is_busy = True
            self._clock.at(self._clock.now, SCHEDULING, self._start)

    def _start(self) -> None:
        now = self._clock.now
        steps = [step for rank in self._ranks if (step := rank.engine.schedule(now)) is not None]
        if not steps:
            self._is_busy = False
            return
        end = max(step.end for step in steps)
        for rank in self._ranks:
            rank.engine.stretch(end)
        self._clock.at(end, COMPLETION, self._complete)

    def _complete(self) -> None:
        for rank in self._ranks:
            if rank.engine.step is not None:
                rank.finish_step()
        self._clock.at(self._clock.now, SCHEDULING, self._start)
