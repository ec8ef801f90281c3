"""What a rank reports to routers about its KV in the store: chunks that were added or removed.

The store knows chunks by their keys, and a router knows blocks by theirs. A chunk's key is that of its last block, so for
chunks of one block it suffices. The other blocks of larger chunks are learned from prompts. A chunk that no prompt has named
yet is not reported.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from serving.kv_tiers.tier import Changes
from serving.router.events import BlocksEvent, BlocksRemoved, BlocksStored


class StoreReports:
    """The reports of one rank."""

    def __init__(self, blocks_per_chunk: int, max_named: int, changes: Changes) -> None:
        """Start; remember the blocks of at most `max_named` chunks that are not in the store."""
        self._size = blocks_per_chunk
        self._max_named = max_named
        self._changes = changes
        self._named: OrderedDict[int, list[int]] = OrderedDict()  # key of a chunk -> its blocks
        self._reported: dict[int, list[int]] = {}
        self._unnamed: dict[int, None] = {}  # chunks in the store whose blocks are unknown

    def learn(self, chunks: Iterable[list[int]]) -> None:
        """Learn which blocks are in chunks that the store has, or may have soon."""
        for blocks in chunks:
            key = blocks[-1]
            self._named[key] = blocks
            self._named.move_to_end(key)
            if key in self._unnamed:
                del self._unnamed[key]
                self._changes.came([key])
        while len(self._named) > self._max_named:
            self._named.popitem(last=False)

    def take(self) -> Iterator[BlocksEvent]:
        """Yield the changes in the store since the last call."""
        came, left = self._changes.take()
        if self._size > 1:
            came, left = self._came(came), self._left(left)
        if left:
            yield BlocksRemoved(left, "SHARED")
        if came:
            yield BlocksStored(came, None, "SHARED")

    def _came(self, keys: list[int]) -> list[int]:
        """Return the known blocks of chunks that were added."""
        chunks = {key: self._named[key] for key in keys if key in self._named}
        self._unnamed.update(dict.fromkeys([key for key in keys if key not in chunks]))
        self._reported.update(chunks)
        return [block for chunk in chunks.values() for block in chunk]

    def _left(self, keys: list[int]) -> list[int]:
        """Return the known blocks of chunks that were removed; others may have reported some of them."""
        for key in keys:
            self._unnamed.pop(key, None)
        reported = self._reported
        chunks = [reported.pop(key) if key in reported else self._named.get(key, [key]) for key in keys]
        return [block for chunk in chunks for block in chunk]
