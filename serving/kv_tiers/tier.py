"""The protocol of a tier: chunks of KV beyond the GPU, found by key, and kept as long as there is room.

A tier is a cache. Whatever goes wrong in it, less is found, but no request sees an error. A chunk's reader verifies it
(`blocks.find_fault`), so what comes from a tier is right, or it does not come.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, Self

from xxhash import xxh3_64_intdigest

from serving.kv_tiers.blocks import KvLayout, find_fault, write_block

VERSION = 1
"""Version of a chunk's content; chunks of other versions are not read."""

GENERATION = 1
"""Generation of every chunk in a tier; a chunk that is being written has none yet."""


class TierError(Exception):
    """A tier that cannot be used; the message says why in one line."""


class FolderTakenError(TierError):
    """Another worker has the folder."""


class ChunkFormat(NamedTuple):
    """The format of all chunks of one user of a tier."""

    layout: KvLayout
    """Layout of a whole chunk."""
    identity: int
    """Differs between users whose chunks differ even if key and size are equal."""

    @classmethod
    def of(cls, layout: KvLayout, *facts: str | float) -> Self:
        """Return the format of chunks with these facts, such as the model's name."""
        return cls(layout, xxh3_64_intdigest(repr((VERSION, *layout, *facts)).encode()))

    @property
    def chunk_bytes(self) -> int:
        """Bytes that one chunk occupies."""
        return self.layout.slot_bytes

    def write(self, memory: memoryview, key: int) -> None:
        """Write the mocker's content of a chunk."""
        write_block(memory, key, GENERATION, self.layout)

    def find_fault(self, memory: memoryview, key: int) -> str:
        """Return what is wrong with a chunk, "" if it is right."""
        return find_fault(memory, key, GENERATION, self.layout)


class TierCounts(NamedTuple):
    """What a tier contains, and what it did since it was started, in chunks unless the name says bytes."""

    num_chunks: int = 0
    capacity: int = 0
    num_hits: int = 0
    """Chunks that look-ups found."""
    num_misses: int = 0
    """Chunks that look-ups did not find, and those after them."""
    num_read: int = 0
    num_lost: int = 0
    """Chunks that were requested but could not be read."""
    num_faults: int = 0
    """Chunks among these that were corrupt, and reads and writes that failed or took too long."""
    num_written: int = 0
    num_refused: int = 0
    """Chunks that should have been written but were not."""
    num_evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


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


class Tier(Protocol):
    """One user's view of a tier, in a running event loop. Its methods do not raise, except `start`."""

    @property
    def counts(self) -> TierCounts:
        """What it contains and did."""
        ...

    async def start(self) -> None:
        """Start.

        Raises:
            TierError: it cannot be used.
        """
        ...

    async def look_up(self, keys: Sequence[int]) -> int:
        """Return how many of the first keys are there."""
        ...

    async def read(self, keys: Sequence[int], into: Sequence[memoryview]) -> int:
        """Return how many of the first chunks arrived complete and right; the content of the other memories is undefined.

        A chunk that is missing, short or corrupt is dropped, and so are those after it that are: the next write brings all
        of them back. Once this has returned or was cancelled, nothing is written into the memories any more.
        """
        ...

    async def write(self, keys: Sequence[int], chunks: Sequence[memoryview]) -> int:
        """Return how many of the first chunks are there now; the least recently used others are evicted for them.

        Chunks must not change in the meantime. If one does, its reader will notice.
        """
        ...

    async def remove(self, keys: Sequence[int]) -> None:
        """Forget chunks."""
        ...

    async def close(self) -> None:
        """Release everything."""
        ...


class Tally:
    """The running counts of a tier."""

    def __init__(self, capacity: int = 0) -> None:
        self.counts = TierCounts(capacity=capacity)

    def found(self, num_found: int, num_asked: int) -> int:
        """Count a look-up; return `num_found`."""
        self.add(num_hits=num_found, num_misses=num_asked - num_found)
        return num_found

    def read(self, num_read: int, num_asked: int, chunk_bytes: int) -> int:
        """Count a read; return `num_read`."""
        self.add(num_read=num_read, num_lost=num_asked - num_read, bytes_read=num_read * chunk_bytes)
        return num_read

    def written(self, num_written: int, num_refused: int, chunk_bytes: int) -> None:
        """Count a write."""
        self.add(num_written=num_written, num_refused=num_refused, bytes_written=num_written * chunk_bytes)

    def add(self, **more: int) -> None:
        """Increase counts."""
        counts = self.counts
        self.counts = counts._replace(**{name: getattr(counts, name) + value for name, value in more.items()})
