"""The sequences that decode: what they read, when the next one finishes, and how their blocks grow.

No step touches each of them: sums over all follow from their positions (`mocker/position.py`), and only a sequence whose
position starts or fills a block needs any work.

    position    0 ........ size-1 | size ........ 2*size-1 | ...
                takes a    fills  | takes a       fills    |
                block      it     | block         it       |
"""

from abc import ABC, abstractmethod

from mocker.position import NEVER, Total, num_full, num_started, num_within, starting, starting_or_filling
from mocker.sequence import Sequence
from mocker.vllm.block_pool import BlockPool, num_blocks_of


class Decoding(ABC):
    """Sums over the decoding sequences, and the blocks they allocate and fill."""

    most_blocks = 1
    """Blocks that a decode allocates at most in an iteration."""

    def __init__(self, running: list[Sequence], *, block_size: int, lag: int) -> None:
        """Start with none of those that run.

        A token is known, and its block can be cached, `lag` iterations after it is computed.
        """
        self.context = Total()
        """The tokens of context that all of them read."""
        self.next_finish = NEVER
        """The iteration at whose end the next of them finishes."""
        self._running = running
        self._size = block_size
        self._lag = lag

    def start(self, sequence: Sequence, iteration: int) -> None:
        """Add a sequence whose prefill an iteration completes."""
        sequence.begin_decoding(iteration)
        self.context.add(sequence)
        self.next_finish = min(self.next_finish, sequence.last_iteration)

    def stop(self, sequences: list[Sequence], iteration: int, *, was_granted: bool = False) -> None:
        """Remove sequences that have computed their tokens before an iteration, and that in it if `was_granted`."""
        for sequence in sequences:
            num_computed = sequence.computed(iteration) + int(was_granted)
            self.context.remove(sequence)
            sequence.end_decoding(num_computed)
            sequence.num_blocks = num_blocks_of(num_computed, self._size)
        self._find_next_finish()

    def delay(self, sequences: list[Sequence], iteration: int) -> None:
        """Give sequences no token in an iteration."""
        for sequence in sequences:
            self.context.remove(sequence)
            sequence.delay(iteration)
            self.context.add(sequence)
        self._find_next_finish()

    def _find_next_finish(self) -> None:
        self.next_finish = min([s.last_iteration for s in self._running if s.decoding], default=NEVER)

    # Blocks

    @abstractmethod
    def num_new_blocks(self, decodes: list[Sequence], iteration: int) -> int:
        """Return the number of blocks that these decodes allocate in an iteration, if not fewer."""

    @abstractmethod
    def num_iterations(self, decodes: list[Sequence], first: int, limit: int) -> int:
        """Return for how many iterations from `first` on the free blocks suffice, at most `limit`."""

    @abstractmethod
    def grow(self, decodes: list[Sequence], iteration: int) -> None:
        """Give each decode a block if it needs one, and cache the block that its known tokens have filled."""

    def grow_in_order(self, decodes: list[Sequence], first: int, stop: int) -> None:
        """Do the same for iterations `first` to `stop`, exclusive, one after the other."""
        for iteration in range(first, stop):
            self.grow(decodes, iteration)

    @abstractmethod
    def grow_at_once(self, decodes: list[Sequence], first: int, stop: int) -> None:
        """Do the same for these iterations in any order."""


class OneTableDecoding(Decoding):
    """Decodes that each have one table, whose blocks are counted in runs."""

    def __init__(self, running: list[Sequence], pool: BlockPool, *, block_size: int, lag: int) -> None:
        """See `Decoding`."""
        super().__init__(running, block_size=block_size, lag=lag)
        self._pool = pool

    def num_new_blocks(self, decodes: list[Sequence], iteration: int) -> int:
        """See `Decoding`."""
        return len(starting(decodes, iteration, self._size))

    def num_iterations(self, decodes: list[Sequence], first: int, limit: int) -> int:
        """See `Decoding`."""
        size, free = self._size, self._pool.num_free
        if len(decodes) * (limit // size + 1) <= free:
            return limit
        return num_within(lambda count: num_started(decodes, first, first + count, size), free, limit)

    def grow(self, decodes: list[Sequence], iteration: int) -> None:
        """See `Decoding`."""
        pool, size, num_new_known = self._pool, self._size, 1 - self._lag
        if num_new_known:
            touching = starting_or_filling(decodes, iteration, size)
        else:
            touching = starting(decodes, iteration, size)
        for sequence in touching:
            computed = sequence.computed(iteration)
            if computed % size == 0:
                pool.allocate(1)
            if (computed + num_new_known) % size == 0:
                pool.store(sequence, (computed + num_new_known) // size)

    def grow_at_once(self, decodes: list[Sequence], first: int, stop: int) -> None:
        """See `Decoding`; one sequence after the other."""
        pool, size = self._pool, self._size
        taken = num_started(decodes, first, stop, size)
        if taken:
            pool.allocate(taken)
        if pool.enable_prefix_caching:
            for index, count in enumerate(num_full(decodes, stop - self._lag, size)):
                if count > decodes[index].num_cached_blocks:
                    pool.store(decodes[index], count)
