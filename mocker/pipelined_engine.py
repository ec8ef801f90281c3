"""An engine whose model is cut into stages: several batches are in flight, each in another stage.

vLLM closes batches until its queue is full, and then waits for the oldest (`EngineCore.step_with_batch_queue`). It holds a
batch for each stage, and one more with asynchronous scheduling; batches without computation take a place, too, until
they are the oldest.

    stage 1   | a     | b   |  c   |
    stage 2           | a     | b   | c   |       a batch enters a stage when it has left the one before, and when
    stage 3                   | a    |  b  |      the batch before it has left this one

A batch with a sequence's next token cannot begin before that with the one before has left the last stage.

The engine's step is the oldest batch, from where it begins in the first stage to where it leaves the last. Steps overlap.
"""

from collections import deque

from mocker.batch import Batch
from mocker.contract import EngineSettings
from mocker.core import Core
from mocker.counted_engine import CountedEngine
from mocker.speculation.random_drafter import RandomDrafter
from mocker.step import CountedOutput, Step
from mocker.timing.model import Ramp, TimingModel


class PipelinedEngine(CountedEngine):
    """See the module. It has no host memory."""

    def __init__(
        self,
        config: EngineSettings,
        core: Core,
        timing: TimingModel,
        *,
        stage_shares: tuple[float, ...],
        kv_events: bool = True,
        ordered_events: bool = True,
        drafter: RandomDrafter | None = None,
    ) -> None:
        """Lay out the iterations of an idle core in stages, each of which takes its share of a batch's time.

        Raises:
            ValueError: the shares do not sum to 1.
        """
        if abs(sum(stage_shares) - 1.0) > 1e-9:
            raise ValueError(f"the stages take {stage_shares} of a batch's time; expected shares that sum to 1")
        super().__init__(config, core, timing, kv_events=kv_events, ordered_events=ordered_events, drafter=drafter)
        self._shares = stage_shares
        self._depth = len(stage_shares) + int(config.is_async)
        self._free_s = [0.0] * len(stage_shares)  # when each stage is free
        self._queue: deque[tuple[Batch | None, float, float]] = deque()  # batches in flight, with start and end (s)

    @property
    def is_idle(self) -> bool:
        """See `Engine`."""
        return super().is_idle and not self._queue

    @property
    def is_stuck(self) -> bool:
        """See `Engine`."""
        return super().is_stuck and not self._queue

    def schedule(self, now: float, *, max_iterations: int = 1) -> Step | None:
        """See `Engine`: fill the queue, and return the oldest batch as a step of one iteration."""
        assert self.step is None, "complete the step in flight first"
        if self.outbox.shipped:
            self.outbox.take_shipped()
        num_left = self._depth + 1  # empty batches: if so many follow each other, nothing can be computed
        while num_left:
            self._fill(now)
            if not self._queue:
                return None
            batch, start, end = self._queue[0]
            if batch is not None and not batch.is_empty:
                self.step = step = Step(batch, start, Ramp(end - start), 0, 1, end)
                return step
            self._pop_empty()
            num_left -= 1
        while self._queue:
            self._pop_empty()
        if not self._core.running and (stall := self._core.stall()) is not None:
            raise stall
        return None

    def _pop_empty(self) -> None:
        batch, _, _ = self._queue.popleft()
        if batch is not None:
            _, finished = self._core.update(batch)
            assert not finished, "an empty batch cannot end a sequence"

    def complete(self) -> CountedOutput:
        """See `CountedEngine`."""
        output = super().complete()
        self._queue.popleft()
        return output

    def _fill(self, now: float) -> None:
        """Close batches while there is room for them, and something to do."""
        core = self._core
        while len(self._queue) < self._depth and (core.running or core.num_waiting):
            batch = core.schedule()
            if batch is None or batch.is_empty:
                self._queue.append((batch, now, now))
                continue
            self.log.begin_batch(batch, now, self._times.last_end_s)
            ready = max([now, *[end for before, _, end in self._queue if before is not None and _feeds(before, batch)]])
            self._queue.append((batch, *self._pass(now, ready, self._times.mixed_s(batch))))

    def _pass(self, now: float, ready: float, duration: float) -> tuple[float, float]:
        """Let a batch that is closed now and can begin when it is ready pass through the stages.

        Returns:
            when it begins in the first stage and leaves the last (s).
        """
        start = max(ready, self._free_s[0])
        if start <= now:
            start = now + self._times.model.lead_s  # nothing is computed there meanwhile
        moment = start
        for stage, share in enumerate(self._shares):
            moment = self._free_s[stage] = max(moment, self._free_s[stage]) + share * duration
        return start, moment


def _feeds(before: Batch, batch: Batch) -> bool:
    """Return whether a batch brings a token that another one computes."""
    sources = {*before.decodes, *before.sampled}
    return any(sequence in sources for sequence in batch.decodes)
