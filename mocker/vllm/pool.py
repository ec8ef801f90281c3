"""What anyone may ask of an engine's pool of blocks, whichever way it keeps account of them."""

from abc import ABC, abstractmethod
from collections.abc import Hashable

from mocker.events import BlockEvent


class Pool(ABC):
    """Blocks, their events, and how many are free.

    There are two: `BlockPool` counts blocks in runs, for one table a sequence; `GroupPool` numbers them, for several.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        """Without the null block."""
        self.has_listener = True
        """Whether `events` is filled."""
        self.events: list[BlockEvent] = []

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""

    @property
    @abstractmethod
    def num_blank(self) -> int:
        """Those of them that have nothing cached; they are allocated first."""

    @abstractmethod
    def queue(self) -> list[Hashable]:
        """Return the free blocks in the order in which they are taken: by number, or else by content (None: blank)."""

    @abstractmethod
    def reset(self) -> bool:
        """Forget all cached blocks, or return False if any block is in use."""
