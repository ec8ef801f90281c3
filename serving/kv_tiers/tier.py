"""What a tier is: chunks of KV beyond the GPU, found by key, kept as long as there is room.

A tier is a cache. Whatever goes wrong in it, the answer is that less was found; nothing of it reaches a request as an error.
A chunk is verified by who reads it (`blocks.find_fault`), so what comes from a tier is right, or it does not come.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, Self

from xxhash import xxh3_64_intdigest

from serving.kv_tiers.blocks import KvLayout, find_fault, write_block

VERSION = 1
"""Of what a chunk holds; those of another one are not read."""

GENERATION = 1
"""Of every chunk in a tier: one that is being written has none yet."""


class TierError(Exception):
    """A tier that cannot be used; the message says why in one line."""


class FolderTakenError(TierError):
    """Another worker has the folder."""


class ChunkFormat(NamedTuple):
    """What all chunks of a tier's user have in common."""

    layout: KvLayout
    """Of a whole chunk."""
    identity: int
    """Two users whose chunks are not the same thing, although they may have one key and size, have two of these."""

    @classmethod
    def of(cls, layout: KvLayout, *facts: str | float) -> Self:
        """Return the format of chunks of which these facts are true, such as the model's name."""
        return cls(layout, xxh3_64_intdigest(repr((VERSION, *layout, *facts)).encode()))

    @property
    def chunk_bytes(self) -> int:
        """What one chunk takes."""
        return self.layout.slot_bytes

    def write(self, memory: memoryview, key: int) -> None:
        """Write a chunk as the mocker makes it."""
        write_block(memory, key, GENERATION, self.layout)

    def find_fault(self, memory: memoryview, key: int) -> str:
        """Return what is wrong with a chunk, "" if nothing is."""
        return find_fault(memory, key, GENERATION, self.layout)


class TierCounts(NamedTuple):
    """What a tier holds, and what it did since it was started; chunks, unless it says bytes."""

    num_chunks: int = 0
    capacity: int = 0
    num_hits: int = 0
    """Found by look-ups."""
    num_misses: int = 0
    """Not found by look-ups, or behind one that was not."""
    num_read: int = 0
    num_lost: int = 0
    """That were to be read and did not come."""
    num_faults: int = 0
    """Of these, those that were corrupt; and reads and writes that failed or took too long."""
    num_written: int = 0
    num_refused: int = 0
    """That were to be written, and were not."""
    num_evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Changes:
    """Chunks that came into a tier and that left it, each as it ended."""

    def __init__(self) -> None:
        self._is_there: dict[int, bool] = {}

    def came(self, keys: Iterable[int]) -> None:
        """Note chunks that are there now."""
        self._is_there.update(dict.fromkeys(keys, True))

    def left(self, keys: Iterable[int]) -> None:
        """Note chunks that are not there any more."""
        self._is_there.update(dict.fromkeys(keys, False))

    def take(self) -> tuple[list[int], list[int]]:
        """Return which came and which left since the last call."""
        if not self._is_there:
            return [], []
        changes, self._is_there = self._is_there, {}
        return [key for key, is_there in changes.items() if is_there], [
            key for key, is_there in changes.items() if not is_there
        ]


class Tier(Protocol):
    """One tier as one user has it, in a running event loop. Nothing that it is asked raises."""

    @property
    def counts(self) -> TierCounts:
        """What it holds and did."""
        ...

    async def start(self) -> None:
        """Begin.

        Raises:
            TierError: it cannot be used.
        """
        ...

    async def look_up(self, keys: Sequence[int]) -> int:
        """Return how many of the first keys are there."""
        ...

    async def read(self, keys: Sequence[int], into: Sequence[memoryview]) -> int:
        """Return how many of the first chunks came whole and right; what lies in the other memories is undefined.

        One that is missing, short or corrupt ends the run and is dropped. Nothing is written into the memories any more
        once this has returned or was cancelled.
        """
        ...

    async def write(self, keys: Sequence[int], chunks: Sequence[memoryview]) -> int:
        """Return how many of the first chunks are there now; others give way, the least recently used first, but none of these.

        Chunks must not change meanwhile. One that does is found out by who reads it.
        """
        ...

    async def remove(self, keys: Sequence[int]) -> None:
        """Forget chunks."""
        ...

    async def close(self) -> None:
        """Give everything back."""
        ...


class Tally:
    """Counts of a tier, as they grow."""

    def __init__(self, capacity: int = 0) -> None:
        self.counts = TierCounts(capacity=capacity)

    def found(self, num_found: int, num_asked: int) -> int:
        """Count a look-up; return what was found."""
        self.add(num_hits=num_found, num_misses=num_asked - num_found)
        return num_found

    def read(self, num_read: int, num_asked: int, chunk_bytes: int) -> int:
        """Count a read; return what came."""
        self.add(num_read=num_read, num_lost=num_asked - num_read, bytes_read=num_read * chunk_bytes)
        return num_read

    def written(self, num_written: int, num_refused: int, chunk_bytes: int) -> None:
        """Count a write."""
        self.add(num_written=num_written, num_refused=num_refused, bytes_written=num_written * chunk_bytes)

    def add(self, **more: int) -> None:
        """Raise counts."""
        counts = self.counts
        self.counts = counts._replace(**{name: getattr(counts, name) + value for name, value in more.items()})
