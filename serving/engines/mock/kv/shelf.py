"""The KV blocks that a mocker keeps ready for others: their bytes, in memory that others read.

`serving/kv_tiers/blocks.py` describes what a slot contains and how a reader detects a wrong block. A generation is never
used twice. Offers of the same block share its slot.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import KvSize, kv_size_of
from serving.kv_tiers.blocks import HEADER, KvLayout, write_block
from serving.transfer.config import TransferRunConfig

MAX_SLOTS = 1 << 18
"""Most slots, however small they are."""

WORD_BYTES = 8


def layout_of(transfer: TransferRunConfig, timing: TimingConfig, *, block_size: int) -> KvLayout:
    """Return the layout of the blocks that a worker transfers.

    Raises:
        ValueError: the size of its model's KV is unknown, or there is no memory for a single block.
    """
    size = kv_size_of(timing, block_size=block_size, kv_bytes_per_token=transfer.kv_bytes_per_token)
    layout = scaled_layout(size, transfer.kv_bytes_scale)
    if layout.slot_bytes > transfer.num_bytes:
        raise ValueError(
            f"transfer_memory_mb must have room for a KV block of {layout.slot_bytes} bytes, not {transfer.transfer_memory_mb}"
        )
    return layout


def scaled_layout(size: KvSize, scale: float) -> KvLayout:
    """Return the layout of blocks scaled to a share of their size."""
    return KvLayout(_words(size.block * scale), _words(size.window_block * scale), size.num_window_blocks)


@dataclass(slots=True, eq=False)
class Slot:
    """Where a block is."""

    number: int
    key: int
    generation: int
    num_users: int = 0


@dataclass(slots=True)
class Placement:
    """The blocks of one offer."""

    slots: list[Slot]
    fresh: list[Slot] = field(default_factory=list)
    """The slots among them that have to be filled."""


class Shelf:
    """See the module."""

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.layout = layout
        self.num_slots = min(len(memory) // layout.slot_bytes, MAX_SLOTS)
        self._memory = memory
        self._free = list(range(self.num_slots))  # a heap: low ones first, so that memory is reused
        self._slots: dict[int, Slot] = {}
        self._generation = 0

    @property
    def num_free(self) -> int:
        """Slots that are empty."""
        return len(self._free)

    def place(self, keys: Sequence[int]) -> Placement | None:
        """Take slots for blocks, or share the slots they are already in; return None if there are too few.

        The placement can be announced once `fill` is done with it and with those before it.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._slots]
        if len(missing) > len(self._free):
            return None
        fresh = [self._take(key) for key in missing]
        slots = [self._slots[key] for key in keys]
        for slot in slots:
            slot.num_users += 1
        return Placement(slots, fresh)

    def fill(self, placement: Placement) -> None:
        """Write the blocks that nobody has written yet; may be called in a thread."""
        layout = self.layout
        for slot in placement.fresh:
            start = slot.number * layout.slot_bytes
            with self._memory[start : start + layout.slot_bytes] as memory:
                write_block(memory, slot.key, slot.generation, layout)

    def release(self, placement: Placement) -> None:
        """Release a placement that is not being filled."""
        for slot in placement.slots:
            slot.num_users -= 1
            if not slot.num_users:
                start = slot.number * self.layout.slot_bytes
                self._memory[start : start + HEADER.size] = bytes(HEADER.size)
                del self._slots[slot.key]
                heapq.heappush(self._free, slot.number)

    def _take(self, key: int) -> Slot:
        self._generation += 1
        slot = self._slots[key] = Slot(heapq.heappop(self._free), key, self._generation)
        return slot


def _words(num_bytes: float) -> int:
    """Return a number of bytes, rounded up to whole words."""
    return -(-int(num_bytes) // WORD_BYTES) * WORD_BYTES
