"""The KV blocks that a mocker holds ready for others: their bytes, in memory that others read.

The simulated core's blocks have no content. Here they get one: bytes that are a pure function of the block's key (a hash of
all tokens up to its end) and of their place in it. Offers of the same block share its slot.

    slot:   generation | key | checksum | checksum of the window | block's bytes | window's bytes

A generation is never used twice. It is written last and wiped first, so a reader who knows the generation and the key finds
out by itself that it came too early or too late, or got another block, or one that changed under its hands.
"""

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import KvSize, kv_size_of
from serving.transfer.config import TransferRunConfig

MAX_SLOTS = 1 << 18
"""However small they are."""

HEADER = struct.Struct("<QQQQ")
WORD_BYTES = 8
PAGE: npt.NDArray[np.uint64] = np.arange(1, 8193, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
PAGE_STEP = np.uint64(0xBF58476D1CE4E5B9)


class KvLayout(NamedTuple):
    """Bytes of a KV block as it lies in memory."""

    block_bytes: int
    """In the layers that keep the whole context."""
    window_bytes: int = 0
    """In those that attend to a window."""
    num_window_blocks: int = 0
    """The last blocks of a prompt that hold its window."""

    @classmethod
    def of(cls, size: KvSize, scale: float) -> Self:
        """Return the layout of blocks of a share of their size."""
        return cls(_words(size.block * scale), _words(size.window_block * scale), size.num_window_blocks)

    @property
    def slot_bytes(self) -> int:
        """What one block takes."""
        return HEADER.size + self.block_bytes + self.window_bytes

    def num_bytes(self, num_behind: int) -> int:
        """Return what is read of a block behind which the prompt has so many others."""
        window_bytes = self.window_bytes if num_behind < self.num_window_blocks else 0
        return HEADER.size + self.block_bytes + window_bytes


def layout_of(transfer: TransferRunConfig, timing: TimingConfig, *, block_size: int) -> KvLayout:
    """Return the layout of the blocks of a worker that reads them.

    Raises:
        ValueError: the size of its model's KV is not known, or there is no memory for a single block.
    """
    size = kv_size_of(timing, block_size=block_size, kv_bytes_per_token=transfer.kv_bytes_per_token)
    layout = KvLayout.of(size, transfer.kv_bytes_scale)
    if layout.slot_bytes > transfer.num_bytes:
        raise ValueError(
            f"transfer_memory_mb must have room for a KV block of {layout.slot_bytes} bytes, not {transfer.transfer_memory_mb}"
        )
    return layout


@dataclass(slots=True, eq=False)
class Slot:
    """Where a block lies."""

    number: int
    key: int
    generation: int
    num_users: int = 0


@dataclass(slots=True)
class Placement:
    """The blocks of one offer."""

    slots: list[Slot]
    fresh: list[Slot] = field(default_factory=list)
    """Those of them that are to be filled."""


class Shelf:
    """See the module."""

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.layout = layout
        self.num_slots = min(len(memory) // layout.slot_bytes, MAX_SLOTS)
        self._memory = memory
        self._free = list(range(self.num_slots))  # a heap: low ones first, so that memory once used is used again
        self._slots: dict[int, Slot] = {}
        self._generation = 0

    @property
    def num_free(self) -> int:
        """Slots in which nothing lies."""
        return len(self._free)

    def place(self, keys: Sequence[int]) -> Placement | None:
        """Take slots for blocks, or share those in which they lie; return None if there are too few.

        The placement can be told to others once `fill` is through with it, and with those that came before it.
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
        """Let a placement go that is not being filled."""
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


def write_block(memory: memoryview, key: int, generation: int, layout: KvLayout) -> None:
    """Write a block into its slot, its header last."""
    body = memory[HEADER.size :]
    with body:
        _write_content(body, key)
        sums = _checksums(body, key, layout)
    HEADER.pack_into(memory, 0, generation, key, *sums)


def find_fault(memory: memoryview, key: int, generation: int, layout: KvLayout) -> str:
    """Return what is wrong with a block that was read, "" if nothing is."""
    found_generation, found_key, *sums = HEADER.unpack_from(memory)
    if not found_generation:
        return "it is not there, or no longer"
    if found_generation != generation:
        return "another block has taken its place"
    if found_key != key:
        return "it is another block"
    with memory[HEADER.size :] as body:
        has_window = len(body) > layout.block_bytes
        is_right = list(_checksums(body, key, layout))[: 1 + has_window] == sums[: 1 + has_window]
    return "" if is_right else "its checksum does not match its content"


def _write_content(body: memoryview, key: int) -> None:
    """Write what a block of this key holds: a page of numbers, each raised by one that only this key's page has."""
    if not body:
        return
    words = np.frombuffer(body, np.uint64)
    num_pages, num_left = divmod(len(words), len(PAGE))
    more = np.uint64(key) + np.arange(num_pages + 1, dtype=np.uint64) * PAGE_STEP
    np.add.outer(more[:-1], PAGE, out=words[: num_pages * len(PAGE)].reshape(num_pages, len(PAGE)))
    np.add(PAGE[:num_left], more[-1], out=words[len(words) - num_left :])


def _checksums(body: memoryview, key: int, layout: KvLayout) -> tuple[int, int]:
    """Return the checksums of a block's bytes and of its window's."""
    with body[: layout.block_bytes] as block, body[layout.block_bytes :] as window:
        return xxh3_64_intdigest(block, key), xxh3_64_intdigest(window, key)


def _words(num_bytes: float) -> int:
    """Return a number of bytes, rounded up to whole words."""
    return -(-int(num_bytes) // WORD_BYTES) * WORD_BYTES
