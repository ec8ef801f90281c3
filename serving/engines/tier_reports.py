"""What a rank reports to routers of its KV on disk and in the store: chunks that came there and that left.

A tier knows chunks by their keys, a router blocks by theirs. The key of a chunk is that of its last block, so of a chunk of one
block it is all there is to know. Those of larger chunks are learned from prompts; until a prompt has named a chunk, such as one
that was on a warm disk, it is not reported.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several

from mocker import BlockChain
from mocker.offload.config import TierName
from mocker.offload.ranges import Range
from serving.kv_tiers.tier import Changes
from serving.router.events import BlocksEvent, BlocksRemoved, BlocksStored, Medium

MEDIA: dict[TierName, Medium] = {"disk": "STORAGE", "store": "SHARED"}


class TierReports:
    """Of one rank."""

    def __init__(self, blocks_per_chunk: int, max_named: int) -> None:
        """Begin; of so many chunks it is known at most which blocks they hold, those in tiers aside."""
        self._size = blocks_per_chunk
        self._max_named = max_named
        self._named: OrderedDict[int, list[int]] = OrderedDict()  # key of a chunk -> its blocks
        self._reported: dict[TierName, dict[int, list[int]]] = {name: {} for name in MEDIA}
        self._unnamed: dict[TierName, dict[int, None]] = {name: {} for name in MEDIA}  # chunks that are there

    def learn(self, chain: BlockChain, ranges: Several[Range], tiers: Mapping[TierName, Changes]) -> None:
        """Take note of which blocks make chunks that a tier has, or may have soon."""
        if self._size == 1:
            return
        for start, stop in ranges:
            for chunk in range(start, stop):
                blocks = [chain.key(block) for block in range(chunk * self._size, (chunk + 1) * self._size)]
                hashes = [block for block in blocks if isinstance(block, int)]
                if len(hashes) == self._size:
                    self._name(hashes, tiers)
        while len(self._named) > self._max_named:
            self._named.popitem(last=False)

    def take(self, tiers: Mapping[TierName, Changes]) -> Iterator[BlocksEvent]:
        """Yield what changed in tiers since the last call."""
        for name, changes in tiers.items():
            came, left = changes.take()
            if self._size > 1:
                came, left = self._came(name, came), self._left(name, left)
            if left:
                yield BlocksRemoved(left, MEDIA[name])
            if came:
                yield BlocksStored(came, None, MEDIA[name])

    def _name(self, hashes: list[int], tiers: Mapping[TierName, Changes]) -> None:
        key = hashes[-1]
        self._named[key] = hashes
        self._named.move_to_end(key)
        for name, changes in tiers.items():
            if key in self._unnamed[name]:
                del self._unnamed[name][key]
                changes.came([key])

    def _came(self, name: TierName, keys: list[int]) -> list[int]:
        """Return the blocks of chunks that came, as far as they are known."""
        chunks = {key: self._named[key] for key in keys if key in self._named}
        self._unnamed[name].update(dict.fromkeys([key for key in keys if key not in chunks]))
        self._reported[name].update(chunks)
        return [block for chunk in chunks.values() for block in chunk]

    def _left(self, name: TierName, keys: list[int]) -> list[int]:
        """Return the blocks of chunks that left, as far as they are known: others may have reported some."""
        for key in keys:
            self._unnamed[name].pop(key, None)
        reported = self._reported[name]
        chunks = [reported.pop(key) if key in reported else self._named.get(key, [key]) for key in keys]
        return [block for chunk in chunks for block in chunk]
