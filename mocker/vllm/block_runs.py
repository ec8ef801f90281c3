"""Runs of blocks that sequences hold, and watches over them."""

from typing import Final

from mocker.chain import BlockChain
from mocker.sequence import Sequence


class BlockWatch:
    """Whether blocks that a sequence left are reused, by eviction or by sharing, while something still reads them."""

    __slots__ = ("is_on", "sequence", "taken")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.is_on = True
        self.taken: list[tuple[int, int]] = []
        """Blocks of its chain, from the first to before the second, that were reused since this was emptied."""


class LeftBlocks:
    """Blocks without content that were left together: those of a table that remain, its tail having been taken first."""

    __slots__ = ("num_blocks", "watch")

    def __init__(self, watch: BlockWatch | None, num_blocks: int) -> None:
        self.watch = watch
        self.num_blocks = num_blocks


UNWATCHED: Final[list[BlockWatch]] = []  # shared, never changed
UNHELD: Final[dict[Sequence, None]] = {}  # shared, never changed: most of what a full cache holds is held by nobody


class BlockRun:
    """Physical blocks with blocks `start` to `stop` of a chain, held and evicted together.

    `holders` are the sequences that use them, in order of arrival (a dict for its order; an unheld run
    waits in the free queue). Of several copies of one content the oldest is `primary`: the one found.
    A `sealed` run does not grow, as blocks of other sequences may follow its end.
    """

    __slots__ = ("chain", "holders", "primary", "sealed", "start", "stop", "watches")

    def __init__(self, chain: BlockChain, start: int, stop: int, *, primary: bool = True) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.holders: dict[Sequence, None] = UNHELD
        self.primary = primary
        self.sealed = False
        self.watches: list[BlockWatch] = UNWATCHED

    def __repr__(self) -> str:
        return f"Run({self.start}:{self.stop}, holders={len(self.holders)}, primary={self.primary})"
