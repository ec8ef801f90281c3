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
    chunk: int
    """Tokens of the chunks inside which tokens see each other; 0: there are none."""
    block_size: int
    """Tokens in a block of its own."""
    unit: int
    """Tokens in a block of a chain: not more."""
    keeps_all: bool
    """Whether no token is ever dropped."""
    is_first: bool
    """Whether it is the first of those that keep all tokens. Routers take no other: what they have is stored together."""

    def name(self, chain: BlockChain, num_tokens: int) -> Hashable:
        """Name what comes before this many tokens of a chain; inside a block of the chain, that block's name is it."""
        return chain.key(-(-num_tokens // self.unit) - 1)


class GroupStored(NamedTuple):
    """Blocks of a group are now cached, each of `size` tokens.

    Of those with a chain's tokens `start` to `stop`, they are the ones that end at `ends`: what a group need not keep for
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
        return [self.group.name(self.chain, end) for end in self.ends]


class GroupRemoved(NamedTuple):
    """Blocks of a group, each of `size` tokens, were evicted, the last first: those with a chain's tokens `start` to `stop`."""

    chain: BlockChain
    group: BlockGroup
    size: int
    start: int
    stop: int

    @property
    def ends(self) -> tuple[int, ...]:
        """Where the blocks end, in the order in which they were evicted."""
        return tuple(range(self.stop, self.start, -self.size))

    def keys(self) -> list[Hashable]:
        """Name the blocks in the order in which they were evicted."""
        return [self.group.name(self.chain, end) for end in self.ends]


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


def shared_keys(event: GroupStored | GroupRemoved) -> list[Hashable]:
    """Name the blocks of an event that other prompts can have, too, if they are whole."""
    group, chain = event.group, event.chain
    if event.size < group.block_size:
        return []
    limit = chain.num_named * group.unit
    return [group.name(chain, end) for end in event.ends if end <= limit]


def for_routers(event: GroupStored | GroupRemoved) -> tuple[int, int]:
    """Return which blocks of its chain an event of a group that keeps all tokens is about: from one to before another.

    Routers go by the first such group, and by whole blocks: the end of a prompt inside a block, which vLLM also names, is
    nothing to them. All blocks between such an event's ends are cached.
    """
    group = event.group
    if not group.is_first or event.size < group.block_size:
        return 0, 0
    return event.start // group.unit, event.stop // group.unit


BlockEvent = BlockStored | BlockRemoved | GroupStored | GroupRemoved | AllBlocksCleared
TierEvent = TierStored | TierRemoved
KvEvent = BlockEvent | TierEvent
