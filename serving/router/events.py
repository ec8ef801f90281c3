"""What workers report of their KV caches: the one vocabulary of KV events."""

from typing import Literal, NamedTuple

Medium = Literal["GPU", "CPU", "STORAGE"]
"""Where blocks are, as vLLM's events have it: on the GPU, in host memory, or on disks and in stores."""


class BlocksStored(NamedTuple):
    """Blocks now cached, in order, behind a parent (none: from the start)."""

    hashes: list[int]
    parent: int | None
    medium: Medium = "GPU"


class BlocksRemoved(NamedTuple):
    """Blocks no longer cached, in the order in which they went."""

    hashes: list[int]
    medium: Medium = "GPU"


class BlocksCleared(NamedTuple):
    """The whole cache was reset."""


BlocksEvent = BlocksStored | BlocksRemoved | BlocksCleared
