"""The layout of a KV block, or of a chunk of several, in memory, in a file or in a store.

The simulated core's blocks have no content. Here they get one: each byte is a pure function of the block's key (a hash of
all tokens up to its end) and of its position in the block.

    slot:   generation | key | checksum | checksum of the window | block's bytes | window's bytes

The generation is written last and wiped first. So a reader that knows it and the key can detect that it came too early or
too late, or that it read another block, or one that changed in the meantime.
"""

import struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

HEADER = struct.Struct("<QQQQ")
PAGE: npt.NDArray[np.uint64] = np.arange(1, 8193, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
PAGE_STEP = np.uint64(0xBF58476D1CE4E5B9)


class KvLayout(NamedTuple):
    """Bytes of a KV block in memory."""

    block_bytes: int
    """Bytes in the layers that keep the whole context."""
    window_bytes: int = 0
    """Bytes in the layers that attend to a window."""
    num_window_blocks: int = 0
    """How many of a prompt's last blocks contain its window."""

    @property
    def slot_bytes(self) -> int:
        """Bytes that one block occupies."""
        return HEADER.size + self.block_bytes + self.window_bytes

    def num_bytes(self, num_behind: int) -> int:
        """Return how many bytes are read of a block that `num_behind` other blocks of the prompt follow."""
        window_bytes = self.window_bytes if num_behind < self.num_window_blocks else 0
        return HEADER.size + self.block_bytes + window_bytes


def write_block(memory: memoryview, key: int, generation: int, layout: KvLayout) -> None:
    """Write a block into its slot, its header last."""
    body = memory[HEADER.size :]
    with body:
        _write_content(body, key)
        sums = _checksums(body, key, layout)
    HEADER.pack_into(memory, 0, generation, key, *sums)


def find_fault(memory: memoryview, key: int, generation: int, layout: KvLayout) -> str:
    """Return what is wrong with a block that was read, "" if it is right."""
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
    """Write the content for this key: a page of numbers, to each of which a number specific to the key and page is added."""
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
