"""Sequences that decode, where groups of layers have tables of their own: when their blocks change, and how.

Between two changes a decode touches no block. With one token in each iteration, changes come at regular positions:

    position    0 ........ b-1 | b ........... 2b-1 | ...
                takes a    fills| takes a            a window or a chunk moves on by a block; a state is no longer read
                block      it   | block
"""

from heapq import heapify, heapreplace

from mocker.position import num_started, num_within, starting
from mocker.sequence import Sequence
from mocker.vllm.decoding import Decoding
from mocker.vllm.groups.cache import GroupedCache

UNSETTLED = 3
"""Iterations after a prompt in which steps in flight, and states that were just computed, may make a difference."""


class GroupedDecoding(Decoding):
    """Decodes with several tables, each of which knows at which position its blocks change next."""

    def __init__(
        self, running: list[Sequence], cache: GroupedCache, in_flight: dict[Sequence, int], *, block_size: int, lag: int
    ) -> None:
        """Start with none; see `Decoding`. `in_flight` has the chunks of prompts in the step in flight."""
        super().__init__(running, block_size=block_size, lag=lag)
        self._cache = cache
        self._in_flight = in_flight
        self._changes = cache.changes(lag)
        self._sizes = cache.block_sizes
        self.most_blocks = len(self._sizes)

    def num_new_blocks(self, decodes: list[Sequence], iteration: int) -> int:
        """See `Decoding`; what windows free before is not counted."""
        return sum([len(starting(decodes, iteration, size)) for size in self._sizes])

    def num_iterations(self, decodes: list[Sequence], first: int, limit: int) -> int:
        """See `Decoding`; what windows free meanwhile is not counted."""
        free, sizes = self._cache.pool.num_free, self._sizes
        if len(decodes) * sum([limit // size + 1 for size in sizes]) <= free:
            return limit
        return num_within(
            lambda count: sum([num_started(decodes, first, first + count, size) for size in sizes]), free, limit
        )

    def grow(self, decodes: list[Sequence], iteration: int) -> None:
        """See `Decoding`."""
        for sequence in decodes:
            if iteration - sequence.origin >= sequence.next_touch:
                self._touch(sequence, iteration - sequence.origin)

    def _touch(self, sequence: Sequence, computed: int) -> None:
        """Let a decode go on to its next token: what it no longer sees is freed first."""
        lag, cache = self._lag, self._cache
        cache.skip(sequence, computed - self._in_flight.get(sequence, lag))
        cache.grow(sequence, computed + 1)
        cache.store(sequence, computed + 1 - lag)
        if computed - sequence.num_known < UNSETTLED:
            sequence.next_touch = computed + 1
        else:
            sequence.next_touch = min([computed + 1 + (place - computed - 1) % size for size, place in self._changes])

    def grow_in_order(self, decodes: list[Sequence], first: int, stop: int) -> None:
        """See `Decoding`."""
        self.grow_at_once(decodes, first, stop)

    def grow_at_once(self, decodes: list[Sequence], first: int, stop: int) -> None:
        """See `Decoding`; in order, because the blocks that are freed meanwhile are taken again."""
        due = [(max(each.origin + each.next_touch, first), place) for place, each in enumerate(decodes)]
        heapify(due)
        while due and due[0][0] < stop:
            iteration, place = due[0]
            sequence = decodes[place]
            self._touch(sequence, iteration - sequence.origin)
            heapreplace(due, (sequence.origin + sequence.next_touch, place))

    def start(self, sequence: Sequence, iteration: int) -> None:
        """See `Decoding`."""
        super().start(sequence, iteration)
        sequence.next_touch = 0
