"""Blocks that others need after their sequence: another engine reads them, or a step may still write them.

    RUNNING ---- ends, and another engine is to read its prompt's KV ----> kept ---- it was read -> free
    LOADING ---- aborted; a transfer in progress cannot be stopped ------> kept ---- it arrived --> free
    RUNNING ---- ends while a later step computes it, in a consumer -----> fenced -- that step ended --> free

The fence exists because a load may write a block that is freed at once, in no order with the GPU's remaining work.
"""

from collections import deque

from mocker.batch import Batch
from mocker.sequence import Sequence
from mocker.vllm.block_pool import BlockPool


class Retention:
    """The sequences that retain blocks of the pool."""

    def __init__(self, pool: BlockPool, *, has_fence: bool) -> None:
        self.kept: dict[Sequence, None] = {}  # in order
        self.fenced: deque[tuple[int, Sequence]] = deque()  # with the iteration after whose end they are free
        self.has_fence = has_fence
        self._pool = pool
        self._before = self._latest = Batch(0)  # the two batches closed last, if there is a fence

    def keep(self, sequence: Sequence) -> None:
        """Keep a sequence's blocks until `release`."""
        self.kept[sequence] = None

    def release(self, sequence: Sequence) -> bool:
        """Free the blocks of a sequence if they are kept; return whether they were."""
        if sequence not in self.kept:
            return False
        del self.kept[sequence]
        self._pool.release(sequence, sequence.num_blocks)
        return True

    def free(self, sequence: Sequence, iteration: int, num_ended: int) -> None:
        """Free the blocks of a sequence that is over, once nothing can write them any more."""
        if self.has_fence and self.is_in_flight(sequence, iteration, num_ended):
            is_last_empty = self._latest.is_empty  # then there is nothing to wait for in it
            self.fenced.append((iteration - 1 - int(is_last_empty), sequence))
        else:
            self._pool.release(sequence, sequence.num_blocks)

    # Iterations in flight: needed only for the fence

    def close(self, batch: Batch) -> None:
        """Follow a batch that is now in flight."""
        self._before, self._latest = self._latest, batch

    def pass_fences(self, num_ended: int) -> None:
        """Free the blocks that waited for iterations before this one, which have ended."""
        while self.fenced and self.fenced[0][0] < num_ended:
            _, sequence = self.fenced.popleft()
            self._pool.release(sequence, sequence.num_blocks)

    def is_in_flight(self, sequence: Sequence, iteration: int, num_ended: int) -> bool:
        """Return whether an iteration that has not ended computes tokens of a sequence; `iteration` is the next."""
        if num_ended < iteration and self._latest.computes(sequence):
            return True
        return num_ended < self._latest.iteration and self._before.computes(sequence)
