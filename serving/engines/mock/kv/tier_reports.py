"""What a rank reports to routers about its KV in the store: chunks that were added or removed.

The store knows chunks by their keys, and a router knows blocks by theirs. A chunk's key is that of its last block, so for
chunks of one block it suffices. The other blocks of larger chunks are learned from the prompts that ask for them.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from serving.kv_tiers.tier import Changes
from serving.router.events import BlocksEvent, BlocksRemoved, BlocksStored


class StoreReports:
    """The reports of one rank."""

    def __init__(self, max_named: int, changes: Changes) -> None:
        """Start; remember the blocks of at most `max_named` chunks that are not in the store."""
        self._max_named = max_named
        self._changes = changes
        self._named: OrderedDict[int, list[int]] = OrderedDict()  # key of a chunk -> its blocks
        self._reported: dict[int, list[int]] = {}

    def learn(self, chunks: Iterable[list[int]]) -> None:
        """Learn which blocks are in chunks of several that the store has, or may have soon."""
        for blocks in chunks:
            self._named[blocks[-1]] = blocks
            self._named.move_to_end(blocks[-1])
        while len(self._named) > self._max_named:
            self._named.popitem(last=False)

    def take(self) -> Iterator[BlocksEvent]:
        """Yield the changes in the store since the last call; others may have reported some of what was removed."""
        came, left = self._changes.take()
        if left:
            yield BlocksRemoved(
                [block for key in left for block in self._reported.pop(key, self._blocks(key))], "SHARED"
            )
        self._reported |= {key: self._named[key] for key in came if key in self._named}
        if came:
            yield BlocksStored([block for key in came for block in self._blocks(key)], None, "SHARED")

    def _blocks(self, key: int) -> list[int]:
        return self._named.get(key, [key])
