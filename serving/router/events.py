"""What workers report of their KV caches: the one vocabulary of KV events."""

from typing import NamedTuple


class BlocksStored(NamedTuple):
    """Blocks now cached, in order, behind a parent (none: from the start)."""

    hashes: list[int]
    parent: int | None


class BlocksRemoved(NamedTuple):
    """Blocks no longer cached, in the order in which they went."""

    hashes: list[int]


class BlocksCleared(NamedTuple):
    """The whole cache was reset."""


BlocksEvent = BlocksStored | BlocksRemoved | BlocksCleared
