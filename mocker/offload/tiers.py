"""What an engine asks of its driver about the tiers beyond host memory: a worker's disk, a store that workers share.

The engine does not know what a tier holds, nor how long it takes: the driver does.
"""

from typing import NamedTuple

from mocker.chain import BlockChain
from mocker.offload.config import TierName
from mocker.offload.ranges import Range, count
from mocker.sequence import Sequence


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
