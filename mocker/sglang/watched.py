"""The core of SGLang's family, with a log of its steps."""

from mocker.batch import Batch
from mocker.sglang.core import SglangCore
from mocker.step_log import StepLog


class WatchedSglangCore(SglangCore):
    """Logs each iteration when it is closed."""

    steps: StepLog

    def schedule(self) -> Batch | None:
        """See `Core`."""
        batch = super().schedule()
        if batch is not None:
            tokens = [*batch.chunks, *[(sequence, 1) for sequence in batch.decodes]]
            self.steps.add(batch, tokens, self.num_free_blocks)
        return batch

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`."""
        super().leap(num_iterations, is_ordered=is_ordered)
        self.steps.repeat(num_iterations)
