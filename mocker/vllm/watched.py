"""The core of vLLM's family, with a log of its steps."""

from mocker.batch import Batch
from mocker.step_log import StepLog
from mocker.vllm.core import VllmCore


class WatchedVllmCore(VllmCore):
    """Logs each iteration when it is closed."""

    steps: StepLog

    def schedule(self) -> Batch | None:
        """See `Core`."""
        batch = super().schedule()
        if batch is not None:
            self.steps.add(batch, self.num_new_tokens(batch), self.pool.num_free)
        return batch

    def leap(self, num_iterations: int, *, is_ordered: bool) -> None:
        """See `Core`."""
        super().leap(num_iterations, is_ordered=is_ordered)
        self.steps.repeat(num_iterations)
