"""Blocks that others need after their sequence: another engine reads them, or a step may still write them.

    RUNNING ---- ends, and another engine is to read its prompt's KV ----> held ---- `let_go` ----> free
    LOADING ---- aborted; a transfer in progress cannot be stopped ------> held ---- it arrived --> free
    RUNNING ---- ends while a later step computes it, in a consumer -----> fenced -- that step ended --> free

The fence exists because a load may write a block that is freed at once, in no order with the GPU's remaining work.
"""

from collections import deque

from mocker.sequence import Sequence
from mocker.vllm.block_pool import BlockPool


class Retention:
    """The sequences that retain blocks of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.held: dict[Sequence, None] = {}  # in order
        self.fenced: deque[tuple[int, Sequence]] = deque()  # with the iteration after whose end they are free
        self._pool = pool

    def hold(self, sequence: Sequence) -> None:
        """Keep a sequence's blocks until `let_go`."""
        self.held[sequence] = None

    def let_go(self, sequence: Sequence) -> bool:
        """Free the blocks of a sequence that is held; return whether it was held."""
        if sequence not in self.held:
            return False
        del self.held[sequence]
        self._pool.release(sequence, sequence.num_blocks)
        return True

    def fence(self, sequence: Sequence, last_iteration: int) -> None:
        """Keep a sequence's blocks until an iteration has ended."""
        self.fenced.append((last_iteration, sequence))

    def pass_fences(self, num_ended: int) -> None:
        """Free the blocks that waited for iterations before this one."""
        while self.fenced and self.fenced[0][0] < num_ended:
            _, sequence = self.fenced.popleft()
            self._pool.release(sequence, sequence.num_blocks)
