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


class BlockGroup(NamedTuple):
    """Layers of a model that share tables of blocks, as events describe them."""

    number: int
    kind: str
    """full_attention, sliding_window, chunked_local_attention or mamba, as in vLLM's events."""
    window: int
    """Tokens of a sliding window; 0: it is none."""
    size: int
    """Blocks of a chain in a block of its own."""
    is_routed: bool
    """Whether routers go by its blocks: the first group that keeps all tokens, whose cached prefixes no hit exceeds."""


class GroupStored(NamedTuple):
    """Blocks of a group are now cached, each with `size` blocks of a chain.

    Of those with the chain's blocks `start` to `stop`, they are the ones that end at `ends`: what a group need not keep for
    later hits is left out, and can be all.
    """

    chain: BlockChain
    group: BlockGroup
    size: int
    start: int
    stop: int
    ends: tuple[int, ...]

    def keys(self) -> list[Hashable]:
        """Name the blocks that are cached, first to last."""
        return [self.chain.key(end - 1) for end in self.ends]

    @property
    def is_for_routers(self) -> bool:
        """Whether it is about whole blocks that routers go by; of that group, all between `start` and `stop` are cached."""
        return self.group.is_routed and self.size == self.group.size


class GroupRemoved(NamedTuple):
    """A block of a group was evicted: that with the `size` blocks of a chain before `stop`."""

    chain: BlockChain
    group: BlockGroup
    stop: int
    size: int

    @property
    def start(self) -> int:
        """The first of the chain's blocks in it."""
        return self.stop - self.size

    @property
    def is_for_routers(self) -> bool:
        """Whether it is a whole block that routers go by."""
        return self.group.is_routed and self.size == self.group.size

    def keys(self) -> list[Hashable]:
        """Name the block."""
        return [self.chain.key(self.stop - 1)]


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


BlockEvent = BlockStored | BlockRemoved | GroupStored | GroupRemoved | AllBlocksCleared
TierEvent = TierStored | TierRemoved
KvEvent = BlockEvent | TierEvent
