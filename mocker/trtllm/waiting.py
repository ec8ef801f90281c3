"""Prompts wait for others, so that fewer steps are slowed down by them.

`BatchWaiting` is for one engine, `Balance` for the ranks of attention DP. Nothing is kept for a prompt that waits: it is
scheduled again in the next step. The rules are TensorRT-LLM's (`_waiting_requests`, `_balance_adp_requests`), decided by
recordings.
"""

from mocker.trtllm.micro_batch import MicroBatch
from mocker.trtllm.settings import BalanceSettings


class BatchWaiting:
    """Withholds prompts while others generate, until there is enough to compute or they have waited enough."""

    def __init__(self, *, timeout_iters: int, min_tokens: float, num_decoded: int) -> None:
        """Wait for at most so many steps, or until a step has `min_tokens`; a generating request has `num_decoded`."""
        self.num_waited = 0
        self._timeout_iters = timeout_iters
        self._min_tokens = min_tokens
        self._num_decoded = num_decoded

    def withholds(self, batch: MicroBatch) -> bool:
        """Return whether the prompts of a step wait."""
        if not (batch.contexts and batch.generating):
            return False
        num_tokens = self._num_decoded * len(batch.generating)
        for request in batch.contexts:
            num_tokens += max(1, request.cost(request.chunk))
        if self.num_waited < self._timeout_iters and num_tokens < self._min_tokens:
            self.num_waited += 1
            return True
        self.num_waited = 0
        return False


class Balance:
    """Withholds the prompts of all ranks until each has some."""

    def __init__(self, *, max_batch_size: int, settings: BalanceSettings) -> None:
        """Wait; a rank that generates `max_batch_size` requests takes no prompts."""
        self.num_waited = 0
        self.num_batching = 0
        self._max_batch_size = max_batch_size
        self._settings = settings

    def withholds(self, batches: list[MicroBatch]) -> bool:
        """Return whether the prompts of a step wait on all ranks."""
        all_generate = all(batch.generating for batch in batches)
        if all(batch.contexts and len(batch.generating) < self._max_batch_size for batch in batches):
            self.num_waited = 0
            if all_generate and self.num_batching < self._settings.batching_wait_iters:
                self.num_batching += 1
                return True
            if all_generate:
                self.num_batching = 0
            return False
        self.num_waited += 1
        if all_generate and self.num_waited < self._limit(batches):
            return True
        self.num_waited = 0
        return False

    def _limit(self, batches: list[MicroBatch]) -> int:
        fewest = min([sum([not request.is_dummy for request in batch.generating]) for batch in batches])
        settings = self._settings
        return settings.low_timeout_iters if fewest < settings.min_generating else settings.timeout_iters
