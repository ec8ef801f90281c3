"""Copies of KV between a GPU and host memory."""

from typing import Final

from mocker.sequence import Sequence
from mocker.tiers.ranges import Range, count


class Copy:
    """Chunks on their way between the GPU and the host."""

    __slots__ = ("is_store", "is_within_step", "num_chunks", "number")

    def __init__(self, number: int, num_chunks: int, *, is_store: bool) -> None:
        self.number = number
        self.num_chunks = num_chunks
        self.is_store = is_store
        self.is_within_step = False  # a load that must end before the step computes with which it starts


class SequenceCopy(Copy):
    """Chunks of a sequence on their way."""

    __slots__ = ("num_local", "num_tokens", "ranges", "sequence")

    def __init__(self, number: int, sequence: Sequence, ranges: list[Range], *, is_store: bool) -> None:
        super().__init__(number, count(ranges), is_store=is_store)
        self.num_local = 0  # tokens that were on the GPU before a load
        self.num_tokens = 0  # that a load brings
        self.sequence = sequence
        self.ranges = ranges


class Work:
    """The copies of a step. It waits for flushed ones, and for loads within it, before it computes."""

    __slots__ = ("flushed", "loads", "ready", "stores")

    def __init__(self) -> None:
        self.loads: list[Copy] = []  # start with it
        self.ready: list[Copy] = []  # stores that start with it, because the KV that they copy is computed
        self.stores: list[Copy] = []  # start after it
        self.flushed: dict[Copy, None] = {}  # in order

    def __bool__(self) -> bool:
        return bool(self.loads or self.ready or self.stores or self.flushed)


NO_WORK: Final = Work()  # shared, never changed
