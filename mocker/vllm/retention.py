"""Blocks that others need after their sequence: another engine reads them, or a step may still write them.

    RUNNING ---- ends, and another engine is to read its prompt's KV ----> kept ---- it was read -> free
    LOADING ---- aborted; a transfer in progress cannot be stopped ------> kept ---- it arrived --> free
    RUNNING ---- ends while a later step computes it, in a consumer -----> fenced -- that step ended --> free

The fence exists because a load may write a block that is freed at once, in no order with the GPU's remaining work.
"""

from collections import deque

from mocker.batch import Batch
from mocker.sequence import Sequence
from mocker.vllm.blocks import Blocks


class Retention:
    """The sequences that retain blocks."""

    def __init__(self, blocks: Blocks, *, has_fence: bool) -> None:
        self.kept: dict[Sequence, None] = {}  # in order
        self.fenced: deque[tuple[int, Sequence]] = deque()  # with the iteration after whose end they are free
        self.has_fence = has_fence
        self._blocks = blocks
        self._before = self._latest = Batch(0)  # the two batches closed last, if there is a fence

    def keep(self, sequence: Sequence) -> None:
        """Keep a sequence's blocks until `release`."""
        self.kept[sequence] = None

    def release(self, sequence: Sequence) -> bool:
        """Free the blocks of a sequence if they are kept; return whether they were."""
        if sequence not in self.kept:
            return False
        del self.kept[sequence]
        self._blocks.release(sequence)
        return True

    def fence(self, sequence: Sequence, after: int) -> None:
        """Free the blocks of a sequence when `pass_fences` exceeds `after`: until then a step may write them."""
        self.fenced.append((after, sequence))

    def pass_fences(self, num_ended: int) -> None:
        """Free the blocks that waited for iterations before this one, which have ended."""
        while self.fenced and self.fenced[0][0] < num_ended:
            _, sequence = self.fenced.popleft()
            self._blocks.release(sequence)

    # Iterations in flight, at most two: needed only for the fence

    def close(self, batch: Batch) -> None:
        """Follow a batch that is now in flight."""
        self._before, self._latest = self._latest, batch

    def last_computed(self, iteration: int) -> int:
        """Return the last iteration that computes something; `iteration` is the next."""
        return iteration - 1 - int(self._latest.is_empty)

    def is_in_flight(self, sequence: Sequence, iteration: int, num_ended: int) -> bool:
        """Return whether an iteration that has not ended computes tokens of a sequence; `iteration` is the next."""
        if num_ended < iteration and self._latest.computes(sequence):
            return True
        return num_ended < self._latest.iteration and self._before.computes(sequence)
