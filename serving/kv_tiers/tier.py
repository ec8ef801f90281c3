"""Chunks of KV in a store, found by key, and what is counted of them.

A store is a cache. Whatever goes wrong in it, less is found, but no request sees an error. A chunk's reader verifies it
(`ChunkFormat.find_fault`), so what comes from a store is right, or it does not come.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple, Self

from xxhash import xxh3_64_intdigest

VERSION = 2
"""Version of a chunk's header; chunks of other versions are not read."""

HEADER = struct.Struct("<QQ")


class TierError(Exception):
    """A tier that cannot be used; the message says why in one line."""


class ChunkFormat(NamedTuple):
    """The format of all chunks of one user of a store: a header, and the bytes that this user puts behind it.

    header:   key | checksum of the bytes, with the key as its seed
    """

    chunk_bytes: int
    """Bytes of a chunk, with its header."""
    identity: int
    """Differs between users whose chunks differ even if key and size are equal."""

    @classmethod
    def of(cls, num_bytes: int, *facts: str | float) -> Self:
        """Return the format of chunks with so many bytes of KV and these facts, such as the model's name."""
        return cls(HEADER.size + num_bytes, xxh3_64_intdigest(repr((VERSION, num_bytes, *facts)).encode()))

    def seal(self, chunk: memoryview, key: int) -> None:
        """Write the header of a chunk whose bytes are in place."""
        with chunk[HEADER.size :] as content:
            HEADER.pack_into(chunk, 0, key, xxh3_64_intdigest(content, key))

    def find_fault(self, chunk: memoryview, key: int) -> str:
        """Return what is wrong with a chunk that was read, "" if it is right."""
        found_key, checksum = HEADER.unpack_from(chunk)
        if found_key != key:
            return "it is another chunk"
        with chunk[HEADER.size :] as content:
            is_right = xxh3_64_intdigest(content, key) == checksum
        return "" if is_right else "its checksum does not match its content"


class TierCounts(NamedTuple):
    """What a tier contains, and what it did since it was started, in chunks."""

    num_chunks: int = 0
    capacity: int = 0
    num_hits: int = 0
    """Chunks that look-ups found."""
    num_misses: int = 0
    """Chunks that look-ups did not find, and those after them."""
    num_read: int = 0
    num_faults: int = 0
    """Chunks that were corrupt, and reads and writes that failed or took too long."""
    num_written: int = 0
    num_refused: int = 0
    """Chunks that should have been written but were not."""
    num_evicted: int = 0


class Changes:
    """Chunks that entered and left a tier; for each chunk, its final state."""

    def __init__(self) -> None:
        self._is_there: dict[int, bool] = {}

    def came(self, keys: Iterable[int]) -> None:
        """Note chunks that are there now."""
        self._is_there.update(dict.fromkeys(keys, True))

    def left(self, keys: Iterable[int]) -> None:
        """Note chunks that are no longer there."""
        self._is_there.update(dict.fromkeys(keys, False))

    def take(self) -> tuple[list[int], list[int]]:
        """Return which chunks came and which left since the last call."""
        if not self._is_there:
            return [], []
        changes, self._is_there = self._is_there, {}
        return [key for key, is_there in changes.items() if is_there], [
            key for key, is_there in changes.items() if not is_there
        ]


class Tally:
    """The running counts of a tier."""

    def __init__(self) -> None:
        self.counts = TierCounts()

    def found(self, num_found: int, num_asked: int) -> int:
        """Count a look-up; return `num_found`."""
        self.add(num_hits=num_found, num_misses=num_asked - num_found)
        return num_found

    def add(self, **more: int) -> None:
        """Increase counts."""
        counts = self.counts
        self.counts = counts._replace(**{name: getattr(counts, name) + value for name, value in more.items()})
