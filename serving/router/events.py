"""The KV events by which ranks report the contents of their caches; `serving/worker/kv_events.py` puts them on the wire."""

from typing import Any, Literal, NamedTuple

Medium = Literal["GPU", "CPU", "STORAGE", "SHARED"]
"""Where blocks are: on the GPU, in host memory, on a rank's own disks, or in a store that all ranks share.

The names are those of vLLM's events, in which a shared store is STORAGE with the locality REMOTE. The rank that writes
to it reports stored and removed blocks for all ranks.
"""


MAX_GROUP = 255
"""Largest number of a group of a model's layers."""

MOST_TOKENS = 1 << 40
"""More than a sequence has."""


class LayerGroup(NamedTuple):
    """Layers of a model that keep only a part of a prompt's KV, in blocks of their own on the GPU."""

    number: int
    """Of the group among those of the model."""
    unit: int
    """Tokens in a block as routers know it."""
    block_size: int
    """Tokens in a block of the group: at least as many, and not always a multiple."""
    window: int
    """Tokens that a token sees, itself included; 0: it sees no window."""
    chunk: int
    """Tokens of the chunks inside which tokens see each other; 0: there are none. Without either, a block is a state."""

    def first_needed(self, num_tokens: int) -> int:
        """Return how many leading tokens the layers do not need to go on from a start of this many: whole blocks."""
        if self.chunk:
            unseen = num_tokens // self.chunk * self.chunk
        else:
            unseen = num_tokens - (self.window - 1 if self.window else self.block_size)
        return max(unseen, 0) // self.block_size * self.block_size


def layer_group(numbers: list[Any]) -> LayerGroup:
    """Return a group that something outside describes.

    Raises:
        ValueError: no group can be like that.
    """
    if len(numbers) == len(LayerGroup._fields) and all(type(each) is int and each >= 0 for each in numbers):
        group = LayerGroup(*numbers)
        if group.number <= MAX_GROUP and 1 <= group.unit <= group.block_size and max(numbers) <= MOST_TOKENS:
            return group
    raise ValueError(f"not a group of layers: {str(numbers)[:100]}")


class BlocksStored(NamedTuple):
    """Blocks now cached, in order, after a parent (none: from the start); for a chunk, all its blocks.

    Blocks beyond the GPU, and those of a group of layers, need no parent.
    """

    hashes: list[int]
    parent: int | None
    medium: Medium = "GPU"
    group: LayerGroup | None = None
    """Whose they are; none: those of layers that keep everything. Each is named by that of the router's blocks in which it ends."""


class BlocksRemoved(NamedTuple):
    """Blocks no longer cached, in the order of their removal."""

    hashes: list[int]
    medium: Medium = "GPU"
    group: int | None = None
    """The number of the group of layers whose they were; see `BlocksStored`."""


class BlocksCleared(NamedTuple):
    """All blocks are gone from a medium, or from all media (none) except a shared store."""

    medium: Medium | None = None


BlocksEvent = BlocksStored | BlocksRemoved | BlocksCleared
