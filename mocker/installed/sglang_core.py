"""The core of an engine with SGLang's scheduler.

Prompts are computed in batches of their own, beside which all that decodes waits. A sequence that is aborted while it runs
is over at once for the driver. SGLang hears of it before it closes the next batch, and ends it with its next token.
"""

from mocker.batch import NOBODY, Batch
from mocker.installed.core import InstalledCore
from mocker.installed.scheduler import InstalledScheduler
from mocker.sequence import OVER, WAITING, Sequence
from mocker.sglang.config import SglangConfig
from mocker.sglang.core import refuse_long_prompt
from mocker.step_log import StepLog


class InstalledSglangCore(InstalledCore):
    """Asks SGLang's scheduler."""

    def __init__(
        self, config: SglangConfig, num_pages: int, scheduler: InstalledScheduler, *, steps: StepLog | None = None
    ) -> None:
        """Start idle."""
        super().__init__(config, num_pages, scheduler, steps=steps)
        self._max_input = config.max_input_tokens(num_pages * config.page_size)
        self._to_abort: list[Sequence] = []

    def _check(self, sequence: Sequence) -> None:
        refuse_long_prompt(sequence, self._max_input)

    def schedule(self) -> Batch | None:
        """See `Core`."""
        if self.pause != "all":
            for sequence in self._to_abort:
                if sequence in self._numbers:
                    self._num_free = self._scheduler.abort(self._numbers[sequence])
            self._to_abort = []
        return super().schedule()

    def abort(self, sequence: Sequence) -> None:
        """See `Core`."""
        if sequence.state == WAITING:
            super().abort(sequence)
        elif sequence.state != OVER:
            sequence.state = OVER
            self._to_abort.append(sequence)
            self.dropped.append(sequence)

    def update(self, batch: Batch, num_iterations: int = 1) -> tuple[list[Sequence], list[Sequence]]:
        """See `Core`."""
        sampled, finished = super().update(batch, num_iterations)
        if self.dropped:
            self.dropped = [one for one in self.dropped if one in self._numbers and one.is_over]
        return sampled, finished

    def _preempt(self, sequence: Sequence) -> Sequence:
        """Let a sequence wait again; a token in flight is dropped."""
        if any(batch.computes(sequence) for batch in self._flights):
            self.dropped.append(sequence)
        return super()._preempt(sequence)

    def _left_out(self, batch: Batch, given: set[int]) -> list[Sequence]:
        """Return those that decode, if prompts are computed alone."""
        if batch.decodes or not batch.chunks:
            return NOBODY
        return [one for one in self.running if self._numbers[one] not in given and one not in self._prefilling]
