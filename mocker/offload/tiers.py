"""What an engine asks of its driver about the tiers beyond host memory: a worker's disk, a store that workers share.

The engine does not know what a tier holds, nor how long it takes: the driver does.
"""

from collections.abc import Sequence as Several
from typing import NamedTuple

from mocker.chain import BlockChain
from mocker.offload.config import TierName
from mocker.sequence import Sequence

Range = tuple[int, int]
"""Chunks, from the first to before the second."""


class Found(NamedTuple):
    """Chunks up to `stop` that a tier has, behind those that were found before."""

    tier: TierName
    stop: int


class LookUp:
    """Which of the chunks `start` to `stop` of a sequence, the first of which host memory lacks, are in a tier."""

    __slots__ = ("is_hurried", "sequence", "start", "stop")

    def __init__(self, sequence: Sequence, start: int, stop: int) -> None:
        self.sequence = sequence
        self.start = start
        self.stop = stop
        self.is_hurried = False


class Read:
    """Chunks of a sequence that a tier has and that host memory has made room for."""

    __slots__ = ("is_hurried", "ranges", "sequence", "tier")

    def __init__(self, tier: TierName, sequence: Sequence, ranges: list[Range]) -> None:
        self.tier = tier
        self.sequence = sequence
        self.ranges = ranges
        self.is_hurried = False

    @property
    def num_chunks(self) -> int:
        """Count the chunks."""
        return count(self.ranges)


class Write:
    """Chunks of a chain that a tier is to have, if it lacks them."""

    __slots__ = ("chain", "is_pinned", "ranges", "tier")

    def __init__(self, tier: TierName, chain: BlockChain, ranges: list[Range], *, is_pinned: bool) -> None:
        self.tier = tier
        self.chain = chain
        self.ranges = ranges
        self.is_pinned = is_pinned
        """Whether host memory keeps them until the write has ended; else they have left it, and wait in a buffer."""


class Hurry(NamedTuple):
    """A sequence's turn has come: of what is looked up or read for it, what has come by now is enough."""

    fetch: LookUp | Read


TierWork = LookUp | Read | Write | Hurry


def count(ranges: Several[Range]) -> int:
    """Count the chunks of ranges."""
    return sum([stop - start for start, stop in ranges])


def overlap(ranges: Several[Range], start: int, stop: int) -> list[Range]:
    """Return the parts of ranges that are between two chunks."""
    return [(max(low, start), min(high, stop)) for low, high in ranges if max(low, start) < min(high, stop)]


def split(ranges: Several[Range], num_chunks: int) -> tuple[list[Range], list[Range]]:
    """Divide ranges into their first chunks, so many, and the rest."""
    first: list[Range] = []
    rest: list[Range] = []
    for start, stop in ranges:
        middle = min(start + num_chunks, stop)
        num_chunks -= middle - start
        if start < middle:
            first.append((start, middle))
        if middle < stop:
            rest.append((middle, stop))
    return first, rest
