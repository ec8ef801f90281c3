"""Which chunks leave a tier first: the least recently used, or those that ARC gives up.

Recency is a rank: the lowest goes first. The ranks of a segment's chunks are consecutive. They rise from its head, in
the order in which chunks were stored, or, once a request that used them has ended, from its tail, so that the start of
a prompt stays longest. A segment keeps its ranks while it is written or read; otherwise it is in the heap.

vLLM 0.33's LRU lets the tail go first from the start: a request draws a range of ranks when it first uses a chunk, and each
chunk that it stores or finds has its place in that range, the first chunk the highest.

    drawn by request 1       |  ... 2 1 0 |            chunks of any number of offers
    drawn by request 2                     |  ... 2 1 0 |
    request 1 has ended                                  | tail ... head |     what it used is the most recent

Semantics: LRUCachePolicy and ARCCachePolicy of vLLM 0.32 and 0.33.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from heapq import heapify, heappop, heappush
from typing import Final

from mocker.chain import BlockChain
from mocker.tiers.segments import Segment

MAX_CHUNKS: Final = 1 << 24
"""More chunks are in no request: the ranks in a range that one draws."""


class Heap:
    """The segments that may be evicted, the least recently used one first; outdated entries are skipped."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Segment]] = []
        self._num_pushed = 0
        self._most = 64  # entries, before outdated ones are dropped
        self._skipped: list[Segment] = []

    def push(self, segment: Segment) -> None:
        """Add a segment, or its new rank."""
        heappush(self._entries, (segment.rank, self._num_pushed, segment))
        self._num_pushed += 1
        if len(self._entries) > self._most:
            self._entries = list({e[0]: e for e in self._entries if _is_current(e)}.values())
            heapify(self._entries)
            self._most = max(64, 2 * len(self._entries))

    def pop(self, place: int) -> Segment | None:
        """Remove and return the first that is in one of the policy's lists and not protected, if any."""
        while self._entries:
            entry = heappop(self._entries)
            segment = entry[2]
            if not _is_current(entry) or segment.place != place:
                continue
            if not segment.is_protected:
                return segment
            self._skipped.append(segment)
        return None

    def restore(self) -> None:
        """Put back those that were skipped because they are protected."""
        for segment in self._skipped:
            self.push(segment)
        self._skipped.clear()


def _is_current(entry: tuple[int, int, Segment]) -> bool:
    rank, _, segment = entry
    return segment.rank == rank and segment.is_evictable and segment.start < segment.stop


class Lru:
    """The least recently used goes first."""

    def __init__(self) -> None:
        self._heap = Heap()
        self._next_rank = 0

    def insert(self, segment: Segment) -> None:
        """Add chunks that are about to be written."""
        self._renew(segment, is_tail_first=False)

    def draw(self) -> int:
        """Return the rank of the first chunk of a request that begins to use chunks; those of the others are below it."""
        self._next_rank += MAX_CHUNKS
        return self._next_rank - 1

    def insert_at(self, segment: Segment, drawn: int) -> None:
        """Add chunks that are about to be written, at their places in the range that their request has drawn."""
        segment.rank, segment.is_tail_first = drawn - segment.stop + 1, True

    def raise_to(self, segment: Segment, drawn: int) -> None:
        """Give chunks their places in the range that a request has drawn, unless they are more recent."""
        rank = drawn - segment.stop + 1
        if rank > segment.rank:
            segment.rank = rank
            if segment.is_evictable:
                self._heap.push(segment)

    def free(self, segment: Segment) -> None:
        """Allow the eviction of a segment from now on, or again."""
        self._heap.push(segment)

    def use(self, segments: list[Segment]) -> None:
        """Make segments, from the head of a chain to its tail, the most recently used, the head most of all."""
        for segment in reversed(segments):
            self._renew(segment, is_tail_first=True)
            if segment.is_evictable:
                self._heap.push(segment)

    def victim(self) -> tuple[Segment, int]:
        """Return the segment to evict next, and the most chunks to take; the caller knows that there is one."""
        segment = self._heap.pop(0)
        assert segment is not None, "nothing can be evicted"
        return segment, segment.num_chunks

    def end_eviction(self) -> None:
        """Account for an eviction that is complete."""
        self._heap.restore()

    def _renew(self, segment: Segment, *, is_tail_first: bool) -> None:
        segment.rank, segment.is_tail_first = self._next_rank, is_tail_first
        self._next_rank += segment.num_chunks


class Arc:
    """Adaptive replacement: a list of chunks stored and not used since, one of those found again; their sizes adapt."""

    def __init__(self, num_chunks: int, name: Callable[[BlockChain, int], Hashable]) -> None:
        """Start empty; `name` returns the name of a chunk, by which it is remembered once it is gone."""
        self._capacity = num_chunks
        self._name = name
        self._heaps = (Heap(), Heap())
        self._sizes = [0, 0]  # chunks stored (T1) and found again (T2)
        self._ghosts: tuple[OrderedDict[Hashable, None], OrderedDict[Hashable, None]] = (OrderedDict(), OrderedDict())
        self._target = 0.0  # of T1's size
        self._next_rank = 0

    def insert(self, segment: Segment) -> None:
        """Add chunks that are about to be written."""
        segment.place = 0
        self._sizes[0] += segment.num_chunks
        self._renew(segment, is_tail_first=False)
        for chunk in range(segment.start, segment.stop):
            name = self._name(segment.chain, chunk)
            for ghosts in self._ghosts:
                ghosts.pop(name, None)

    def miss(self, names: list[Hashable]) -> None:
        """Learn from chunks to store that were here before: the list that evicted them should be larger."""
        stored, found = self._ghosts
        for name in names:
            if name in stored:
                more = max(1, len(found) / len(stored))
                self._target = min(self._target + more, self._capacity)
                stored.move_to_end(name)
            elif name in found:
                less = max(1, len(stored) / len(found))
                self._target = max(self._target - less, 0)
                found.move_to_end(name)

    def free(self, segment: Segment) -> None:
        """Allow the eviction of a segment from now on, or again."""
        self._heaps[segment.place].push(segment)

    def use(self, segments: list[Segment], *, is_found: bool) -> None:
        """Make segments, from head to tail, the most recently used; those found again have a separate list."""
        for segment in reversed(segments):
            if is_found and segment.place == 0:
                self._sizes[0] -= segment.num_chunks
                self._sizes[1] += segment.num_chunks
                segment.place = 1
            self._renew(segment, is_tail_first=True)
            if segment.is_evictable:
                self._heaps[segment.place].push(segment)

    def victim(self) -> tuple[Segment, int]:
        """Return the segment to evict next, and the most chunks to take; the caller knows that there is one."""
        surplus = self._sizes[0] - int(self._target) + 1
        segment = self._heaps[0].pop(0) if surplus > 0 else None
        if segment is not None:
            count = min(segment.num_chunks, surplus)
        else:
            segment = self._heaps[1].pop(1)
            segment = self._heaps[0].pop(0) if segment is None else segment
            assert segment is not None, "nothing can be evicted"
            count = segment.num_chunks
        return segment, count

    def remember(self, place: int, names: list[Hashable]) -> None:
        """Record which chunks were evicted from one of the lists."""
        self._sizes[place] -= len(names)
        self._ghosts[place].update(dict.fromkeys(names))

    def lose(self, segment: Segment) -> None:
        """Remove chunks that were never written."""
        self._sizes[segment.place] -= segment.num_chunks

    def end_eviction(self) -> None:
        """Account for an eviction that is complete."""
        for heap, ghosts in zip(self._heaps, self._ghosts, strict=True):
            heap.restore()
            for _ in range(len(ghosts) - self._capacity):
                ghosts.popitem(last=False)

    def _renew(self, segment: Segment, *, is_tail_first: bool) -> None:
        segment.rank, segment.is_tail_first = self._next_rank, is_tail_first
        self._next_rank += segment.num_chunks
