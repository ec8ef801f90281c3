"""The events of an engine's KV cache. Blocks are named by position in a chain: see `BlockChain.key`."""

from collections.abc import Hashable
from typing import Literal, NamedTuple

from mocker.chain import BlockChain

Medium = Literal["CPU", "STORAGE", "SHARED"]
"""Where KV is beyond the GPU: in host memory, on an engine's own disks, or in a store that all engines share.

The names are those of vLLM's events, in which a shared store is STORAGE with the locality REMOTE.
"""


class BlockStored(NamedTuple):
    """Blocks `start` to `stop` of a chain are now cached; their parent is block `start - 1`."""

    chain: BlockChain
    start: int
    stop: int

    def keys(self) -> list[Hashable]:
        """Name the blocks, first to last."""
        return [self.chain.key(block) for block in range(self.start, self.stop)]


class BlockRemoved(NamedTuple):
    """Blocks `start` to `stop` of a chain were evicted, the last one first as vLLM does, or the first one first."""

    chain: BlockChain
    start: int
    stop: int
    is_tail_first: bool = True

    def keys(self) -> list[Hashable]:
        """Name the blocks in the order in which they were evicted."""
        keys = [self.chain.key(block) for block in range(self.start, self.stop)]
        return keys[::-1] if self.is_tail_first else keys


class AllBlocksCleared(NamedTuple):
    """The prefix cache was reset."""


class TierStored(NamedTuple):
    """Chunks `start` to `stop` of a chain, of this many blocks each, are now in a tier beyond the GPU."""

    medium: Medium
    chain: BlockChain
    start: int
    stop: int
    blocks_per_chunk: int

    def names(self) -> list[Hashable]:
        """Name the chunks, each by its last block."""
        return [self.chain.key((chunk + 1) * self.blocks_per_chunk - 1) for chunk in range(self.start, self.stop)]


class TierRemoved(NamedTuple):
    """Chunks `start` to `stop` of a chain, of this many blocks each, were evicted from a tier beyond the GPU."""

    medium: Medium
    chain: BlockChain
    start: int
    stop: int
    blocks_per_chunk: int
    is_tail_first: bool

    def names(self) -> list[Hashable]:
        """Name the chunks, each by its last block, in the order in which they were evicted."""
        names = TierStored(*self[:5]).names()
        return names[::-1] if self.is_tail_first else names


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
TierEvent = TierStored | TierRemoved
KvEvent = BlockEvent | TierEvent
