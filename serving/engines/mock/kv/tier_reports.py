"""What a rank reports to routers about its KV on disk and in the store: chunks that were added or removed.

A tier knows chunks by their keys, and a router knows blocks by theirs. A chunk's key is that of its last block, so for chunks
of one block it suffices. The other blocks of larger chunks are learned from prompts. A chunk that no prompt has named yet,
such as one on a warm disk, is not reported.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from serving.kv_tiers.tier import Changes
from serving.router.events import BlocksEvent, BlocksRemoved, BlocksStored, Medium

TierName = Literal["disk", "store"]

MEDIA: dict[TierName, Medium] = {"disk": "STORAGE", "store": "SHARED"}


class TierReports:
    """The reports of one rank."""

    def __init__(self, blocks_per_chunk: int, max_named: int) -> None:
        """Start; remember the blocks of at most `max_named` chunks that are not in a tier."""
        self._size = blocks_per_chunk
        self._max_named = max_named
        self._named: OrderedDict[int, list[int]] = OrderedDict()  # key of a chunk -> its blocks
        self._reported: dict[TierName, dict[int, list[int]]] = {name: {} for name in MEDIA}
        self._unnamed: dict[TierName, dict[int, None]] = {
            name: {} for name in MEDIA
        }  # chunks in the tier whose blocks are unknown

    def learn(self, chunks: Iterable[list[int]], tiers: Mapping[TierName, Changes]) -> None:
        """Learn which blocks are in chunks that a tier has, or may have soon."""
        for blocks in chunks:
            key = blocks[-1]
            self._named[key] = blocks
            self._named.move_to_end(key)
            for name, changes in tiers.items():
                if key in self._unnamed[name]:
                    del self._unnamed[name][key]
                    changes.came([key])
        while len(self._named) > self._max_named:
            self._named.popitem(last=False)

    def take(self, tiers: Mapping[TierName, Changes]) -> Iterator[BlocksEvent]:
        """Yield the changes in tiers since the last call."""
        for name, changes in tiers.items():
            came, left = changes.take()
            if self._size > 1:
                came, left = self._came(name, came), self._left(name, left)
            if left:
                yield BlocksRemoved(left, MEDIA[name])
            if came:
                yield BlocksStored(came, None, MEDIA[name])

    def _came(self, name: TierName, keys: list[int]) -> list[int]:
        """Return the known blocks of chunks that were added."""
        chunks = {key: self._named[key] for key in keys if key in self._named}
        self._unnamed[name].update(dict.fromkeys([key for key in keys if key not in chunks]))
        self._reported[name].update(chunks)
        return [block for chunk in chunks.values() for block in chunk]

    def _left(self, name: TierName, keys: list[int]) -> list[int]:
        """Return the known blocks of chunks that were removed; others may have reported some of them."""
        for key in keys:
            self._unnamed[name].pop(key, None)
        reported = self._reported[name]
        chunks = [reported.pop(key) if key in reported else self._named.get(key, [key]) for key in keys]
        return [block for chunk in chunks for block in chunk]
