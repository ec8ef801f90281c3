"""What a driver may ask of an engine."""

from typing import NamedTuple


class View(NamedTuple):
    """What an engine is doing: the sequences by what they do now, and its KV blocks."""

    num_running: int
    num_queued: int
    """Sequences that wait and hold no blocks."""
    num_fetching: int
    """Those of them for which tiers behind host memory work."""
    num_to_load: int
    """Those of them whose KV another engine has, and whose load has not started."""
    num_loading: int
    """Sequences that hold blocks for KV that is on its way."""
    num_loaded: int
    """Sequences that wait although all the KV that they need has arrived."""
    num_retained: int
    """Sequences that have ended, and whose blocks are kept until a transfer has ended."""
    num_blocks: int
    """KV blocks that can hold tokens."""
    num_free_blocks: int
    """Those of them that could be allocated now."""
    is_copying: bool
    """Whether KV is being copied to or from host memory, or fetched from a tier behind it."""
    is_locked: bool
    """Whether nothing can continue until a sequence is aborted."""

    @property
    def num_waiting(self) -> int:
        """Count the sequences that wait for blocks, for their KV or for a seat."""
        return self.num_queued + self.num_loading + self.num_loaded

    @property
    def num_used_blocks(self) -> int:
        """Count the blocks in use."""
        return self.num_blocks - self.num_free_blocks
