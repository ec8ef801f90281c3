"""What ranks report of their KV caches: the one vocabulary of KV events."""

from typing import Literal, NamedTuple

Medium = Literal["GPU", "CPU", "STORAGE", "SHARED"]
"""Where blocks are: on the GPU, in host memory, on a rank's own disks, or in a store that all ranks read.

The names are those of vLLM's events, where a store that all read is STORAGE whose locality is REMOTE. Who writes to it
reports what is stored there and what is removed, for all.
"""


class BlocksStored(NamedTuple):
    """Blocks now cached, in order, behind a parent (none: from the start); of a chunk, all its blocks.

    Blocks beyond the GPU need no parent.
    """

    hashes: list[int]
    parent: int | None
    medium: Medium = "GPU"


class BlocksRemoved(NamedTuple):
    """Blocks no longer cached, in the order in which they went."""

    hashes: list[int]
    medium: Medium = "GPU"


class BlocksCleared(NamedTuple):
    """All blocks are gone from a medium, or from all (none); a shared store stays."""

    medium: Medium | None = None


BlocksEvent = BlocksStored | BlocksRemoved | BlocksCleared
