"""The KV events by which ranks report the contents of their caches; `serving/worker/kv_events.py` puts them on the wire."""

from typing import Literal, NamedTuple

Medium = Literal["GPU", "CPU", "STORAGE", "SHARED"]
"""Where blocks are: on the GPU, in host memory, on a rank's own disks, or in a store that all ranks share.

The names are those of vLLM's events, in which a shared store is STORAGE with the locality REMOTE. The rank that writes
to it reports stored and removed blocks for all ranks.
"""


class BlocksStored(NamedTuple):
    """Blocks now cached, in order, after a parent (none: from the start); for a chunk, all its blocks.

    Blocks beyond the GPU need no parent.
    """

    hashes: list[int]
    parent: int | None
    medium: Medium = "GPU"


class BlocksRemoved(NamedTuple):
    """Blocks no longer cached, in the order of their removal."""

    hashes: list[int]
    medium: Medium = "GPU"


class BlocksCleared(NamedTuple):
    """All blocks are gone from a medium, or from all media (none) except a shared store."""

    medium: Medium | None = None


BlocksEvent = BlocksStored | BlocksRemoved | BlocksCleared
