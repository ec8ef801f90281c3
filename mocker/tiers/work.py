"""An engine's requests to its driver for the tiers beyond host memory: a worker's disk, a store that workers share.

The engine does not know the content of a tier, nor how long it takes: the driver does.
"""

from typing import NamedTuple

from mocker.chain import BlockChain
from mocker.sequence import Sequence
from mocker.tiers.config import TierName
from mocker.tiers.ranges import Range, count


class Found(NamedTuple):
    """Chunks up to `stop` that a tier has, after those found before."""

    tier: TierName
    stop: int


class LookUp:
    """A question: which of the chunks `start` to `stop` of a sequence are in a tier? Host memory lacks the first."""

    __slots__ = ("is_hurried", "sequence", "start", "stop")

    def __init__(self, sequence: Sequence, start: int, stop: int) -> None:
        self.sequence = sequence
        self.start = start
        self.stop = stop
        self.is_hurried = False


class Read:
    """Chunks of a sequence that a tier has, and for which host memory has made room."""

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
    """Chunks of a chain to write to a tier, if it lacks them."""

    __slots__ = ("chain", "is_pinned", "ranges", "tier")

    def __init__(self, tier: TierName, chain: BlockChain, ranges: list[Range], *, is_pinned: bool) -> None:
        self.tier = tier
        self.chain = chain
        self.ranges = ranges
        self.is_pinned = is_pinned
        """Whether host memory keeps them until the write has ended; if not, they have left it, and wait in a buffer."""


class Hurry(NamedTuple):
    """A sequence's turn has come: the results of its look-ups and reads so far are enough."""

    fetch: LookUp | Read


TierWork = LookUp | Read | Write | Hurry
