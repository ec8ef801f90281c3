"""Copies of KV between a GPU and host memory."""

from typing import Final

from mocker.sequence import Sequence
from mocker.tiers.ranges import Range, count


class Copy:
    """Chunks of a sequence on their way between the GPU and the host."""

    __slots__ = ("is_store", "num_local", "number", "ranges", "sequence")

    def __init__(self, number: int, sequence: Sequence, ranges: list[Range], *, is_store: bool) -> None:
        self.number = number
        self.num_local = 0  # tokens that were on the GPU before a load
        self.sequence = sequence
        self.ranges = ranges
        self.is_store = is_store

    @property
    def num_chunks(self) -> int:
        """Count the chunks to copy."""
        return count(self.ranges)


class Work:
    """The copies of a step: loads start with it, stores after it, and it waits for flushed ones."""

    __slots__ = ("flushed", "loads", "stores")

    def __init__(self) -> None:
        self.loads: list[Copy] = []
        self.stores: list[Copy] = []
        self.flushed: dict[Copy, None] = {}  # in order

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.flushed)


NO_WORK: Final = Work()  # shared, never changed
