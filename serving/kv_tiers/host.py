"""Host memory as a tier: an arena of one worker, a slot for each chunk.

    free --`take`--> being written --`keep`--> kept --`remove`, or evicted by `take`--> free
                            |
                            +--`remove`--> free

A user that fills the arena itself, as a worker does, writes into slots that it has taken and reads slots that are kept.
"""

import asyncio
import heapq
import mmap
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from serving.kv_tiers.blocks import HEADER
from serving.kv_tiers.tier import ChunkFormat, Tally, TierCounts, TierError
from serving.transfer.stream import CHUNK_BYTES


class HostTier:
    """See the module."""

    def __init__(self, format: ChunkFormat, num_chunks: int) -> None:
        """Prepare an arena of `num_chunks` chunks."""
        self._format = format
        self.num_chunks = num_chunks
        self._memory = memoryview(b"")
        self._map: mmap.mmap | None = None
        self._kept: OrderedDict[int, int] = OrderedDict()  # key -> slot, the least recently used first
        self._being_written: dict[int, int] = {}
        self._free: list[int] = []  # a heap of slots that were used: low ones first, so that memory is reused
        self._num_used = 0  # slots that were ever used
        self._tally = Tally(self.num_chunks)

    @property
    def counts(self) -> TierCounts:
        """See `Tier`."""
        return self._tally.counts._replace(num_chunks=len(self._kept))

    async def start(self) -> None:
        """See `Tier`. Pages that were never written cost nothing."""
        num_bytes = self.num_chunks * self._format.chunk_bytes
        if not num_bytes:
            return
        try:
            self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise TierError(f"{num_bytes} bytes of host memory for KV cannot be allocated: {error}") from error
        self._memory = memoryview(self._map)

    # In place

    def take(self, keys: Iterable[int]) -> dict[int, memoryview]:
        """Take slots for missing chunks, as many as there is room for; a chunk cannot be found until it is kept."""
        wanted = list(dict.fromkeys(keys))[: self.num_chunks]
        protected = frozenset(wanted)
        self._touch(wanted)
        taken: dict[int, memoryview] = {}
        for key in wanted:
            if key in self._kept or key in self._being_written:
                continue
            if self._free or (self._num_used == self.num_chunks and self._evict(protected)):
                place = heapq.heappop(self._free)
            elif self._num_used < self.num_chunks:
                place, self._num_used = self._num_used, self._num_used + 1
            else:
                break
            self._being_written[key] = place
            taken[key] = self._slot(place)
            taken[key][: HEADER.size] = bytes(HEADER.size)
        return taken

    def keep(self, keys: Iterable[int]) -> None:
        """Make chunks that were written into their slots available."""
        for key in reversed(list(keys)):  # the beginning of a prompt is evicted last
            self._kept[key] = self._being_written.pop(key)

    def slot(self, key: int) -> memoryview | None:
        """Return a chunk's slot, if it is kept."""
        place = self._kept.get(key)
        return None if place is None else self._slot(place)

    def discard(self, keys: Iterable[int]) -> None:
        """Release slots, whatever is in them."""
        for key in keys:
            place = self._kept.pop(key, None)
            if place is None:
                place = self._being_written.pop(key, None)
            if place is not None:
                self._slot(place)[: HEADER.size] = bytes(HEADER.size)
                heapq.heappush(self._free, place)

    def loaded(self, num_good: int, num_asked: int) -> None:
        """Count chunks that were read in place, of which perhaps only the first ones are good."""
        self._tally.read(num_good, num_asked, self._format.chunk_bytes)
        self._tally.add(num_faults=int(num_good < num_asked))

    # As a tier

    async def look_up(self, keys: Sequence[int]) -> int:
        """See `Tier`."""
        return self._tally.found(self._num_leading(keys), len(keys))

    async def read(self, keys: Sequence[int], into: Sequence[memoryview]) -> int:
        """See `Tier`."""
        num_read, in_this_turn, is_whole = 0, 0, True
        for key, target in zip(keys, into, strict=True):
            is_whole = key in self._kept and not self._is_wrong(key) and is_whole
            if is_whole:
                target[:] = self._slot(self._kept[key])
                num_read += 1
            in_this_turn = await _pause(in_this_turn + len(target))
        self._touch(keys[:num_read])
        return self._tally.read(num_read, len(keys), self._format.chunk_bytes)

    async def write(self, keys: Sequence[int], chunks: Sequence[memoryview]) -> int:
        """See `Tier`."""
        slots = self.take(keys)
        in_this_turn = 0
        try:
            for key, chunk in zip(keys, chunks, strict=True):
                if key in slots:
                    slots[key][HEADER.size :] = chunk[HEADER.size :]
                    slots[key][: HEADER.size] = chunk[: HEADER.size]
                    in_this_turn = await _pause(in_this_turn + len(chunk))
        except BaseException:
            self.discard(slots)
            raise
        self.keep(slots)
        num_there = self._num_leading(keys)
        self._touch(keys[:num_there])
        num_refused = len({key for key in keys if key not in self._kept})
        self._tally.written(len(slots), num_refused, self._format.chunk_bytes)
        return num_there

    async def remove(self, keys: Sequence[int]) -> None:
        """See `Tier`."""
        self.discard(key for key in keys if key in self._kept)

    async def close(self) -> None:
        """See `Tier`. While there are views of slots, the memory stays until the last one is gone."""
        self._kept.clear()
        self._memory, self._map = memoryview(b""), None

    # How it is done

    def _num_leading(self, keys: Sequence[int]) -> int:
        return sum(1 for _ in takewhile(self._kept.__contains__, keys))

    def _touch(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)

    def _is_wrong(self, key: int) -> bool:
        if not self._format.find_fault(self._slot(self._kept[key]), key):
            return False
        self.discard([key])
        self._tally.add(num_faults=1)
        return True

    def _evict(self, protected: frozenset[int]) -> bool:
        victim = next((key for key in self._kept if key not in protected), None)
        if victim is None:
            return False
        self.discard([victim])
        self._tally.add(num_evicted=1)
        return True

    def _slot(self, place: int) -> memoryview:
        start = place * self._format.chunk_bytes
        return self._memory[start : start + self._format.chunk_bytes]


async def _pause(in_this_turn: int) -> int:
    """Give others a turn once enough bytes were moved in ours; return how many count towards the next one."""
    if in_this_turn < CHUNK_BYTES:
        return in_this_turn
    await asyncio.sleep(0)
    return 0
