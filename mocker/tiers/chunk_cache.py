"""The content of one tier (host memory, a disk, a store): chunks of KV blocks, pinned while copied, evicted by policy.

A chunk is `blocks_per_chunk` consecutive blocks and is named by its last one: chunk c of a chain contains the blocks
from c * blocks_per_chunk on. Chunks that were stored together are treated alike, so a chain is kept as segments:

    absent -- `offer` --> being written -- `complete_store` --> ready <-- `pin`, `unpin` --> being read
                                                                  |
                                                                  +-- an offer needs the room --> absent

A disk or a store accepts a chunk at once, so it is never being written there.
Semantics: CPUOffloadingManager of vLLM 0.32 and 0.33.
"""

from collections import OrderedDict
from collections.abc import Hashable
from itertools import groupby

from mocker.chain import BlockChain
from mocker.events import Medium, TierEvent, TierRemoved, TierStored
from mocker.tiers.eviction import Arc, Lru
from mocker.tiers.ranges import Range, joined
from mocker.tiers.segments import Segment, SegmentIndex

MAX_COUNTED = 64_000
"""Chunks whose offers are counted, if only those offered often are stored."""


class Uses:
    """A request's use of the chunks of its chain, a byte of 0 or 1 for each."""

    __slots__ = ("drawn", "found", "inserted", "missed", "seen")

    def __init__(self) -> None:
        self.drawn = -1
        """The rank of its first chunk, if such ranks are drawn by request; -1 until it uses a chunk."""
        self.seen = bytearray()
        """Chunks that it stored or wanted to store, and those it found: they become the most recent when it ends."""
        self.inserted = bytearray()
        self.found = bytearray()
        """Chunks that it found and had not stored itself; with ranks by request, all that it has used."""
        self.missed = bytearray()

    def grow(self, num_chunks: int) -> None:
        """Make room for this many chunks."""
        more = bytes(max(num_chunks - len(self.seen), 0))
        if more:
            for marks in (self.seen, self.inserted, self.found, self.missed):
                marks += more


class ChunkCache:
    """The chunks of one tier, at a cost by segment rather than by chunk."""

    def __init__(
        self,
        num_chunks: int,
        *,
        blocks_per_chunk: int,
        eviction_policy: str,
        store_threshold: int,
        ranks_by_request: bool = False,
        medium: Medium = "CPU",
    ) -> None:
        """Create an empty tier.

        Args:
            num_chunks: the most chunks that it holds.
            blocks_per_chunk: GPU blocks in a chunk.
            eviction_policy: `lru` or `arc`.
            store_threshold: number of the offer at which a chunk is stored (below 2: the first).
            ranks_by_request: with `lru`, the last chunk that a request uses goes first from the start: see `eviction.py`.
            medium: its name in events.
        """
        self.num_chunks = num_chunks
        self.num_used = 0
        self.num_evictable = 0
        self.num_evicted = 0
        """Chunks, since the start."""
        self.has_listener = True
        """Whether `events` is kept."""
        self.events: list[TierEvent] = []
        self.evicted: list[tuple[BlockChain, int, int]] | None = None
        """Evicted chunks, for a caller to write elsewhere and clear; None if no caller does."""
        self._medium: Medium = medium
        self._size = blocks_per_chunk
        self._index = SegmentIndex(blocks_per_chunk)
        self._lru: Lru | None = None
        self._arc: Arc | None = None
        if eviction_policy == "arc":
            self._arc = Arc(num_chunks, self.name)
        else:
            self._lru = Lru()
        self._ranks_by_request = ranks_by_request and self._lru is not None
        self._threshold = store_threshold
        self._num_offers: OrderedDict[Hashable, int] = OrderedDict()

    def name(self, chain: BlockChain, chunk: int) -> Hashable:
        """Return the name of a chunk."""
        return chain.key((chunk + 1) * self._size - 1)

    # What a request asks

    def find(self, chain: BlockChain, start: int, stop: int) -> tuple[int, bool]:
        """Return the first absent chunk from `start` on, at most `stop`, and whether all before it are ready."""
        is_ready = True
        for segment, first, _ in self._index.pieces(chain, start, stop):
            if segment is None:
                return first, is_ready
            is_ready = is_ready and segment.is_written
        return stop, is_ready

    def absent(self, chain: BlockChain, start: int, stop: int) -> list[Range]:
        """Return those of the chunks that are absent."""
        return joined(
            [(first, last) for segment, first, last in self._index.pieces(chain, start, stop) if segment is None]
        )

    def is_being_read(self, chain: BlockChain, start: int, stop: int) -> bool:
        """Return whether any of these chunks is being loaded for a request."""
        return any(
            segment is not None and segment.num_loads > 0 for segment, _, _ in self._index.pieces(chain, start, stop)
        )

    def pin(
        self, chain: BlockChain, start: int, stop: int, uses: Uses | None = None, *, delays_others: bool = True
    ) -> None:
        """Keep ready chunks until `unpin`, for a request that found them or for another tier.

        Other requests must wait for the load of a request if it `delays_others`.
        """
        for segment in self._isolate(chain, start, stop):
            if not segment.num_readers:
                self.num_evictable -= segment.num_chunks
            segment.num_readers += 1
            segment.num_loads += uses is not None and delays_others
        if uses is not None:
            self._note_found(chain, uses, start, stop)

    def unpin(self, chain: BlockChain, start: int, stop: int, *, is_load: bool = True) -> None:
        """Release chunks that were pinned for a load that delays others, or for another tier or load."""
        for segment in self._isolate(chain, start, stop):
            segment.num_readers -= 1
            segment.num_loads -= is_load
            if not segment.num_readers:
                self._free(segment)

    def room(self, chain: BlockChain, start: int, stop: int) -> int:
        """Return how many chunks there is room for if none of these is evicted."""
        kept = {
            segment: None
            for segment, _, _ in self._index.pieces(chain, start, stop)
            if segment and segment.is_evictable
        }
        return self.num_chunks - self.num_used + self.num_evictable - sum([segment.num_chunks for segment in kept])

    def offer(
        self, chain: BlockChain, start: int, stop: int, uses: Uses, *, head: int | None = None
    ) -> list[Range] | None:
        """Make room for the chunks that should be stored, and return them; None if there is no room.

        They are being written until `complete_store`. Neither they nor the chunks from `head` on are evicted for them.
        """
        uses.grow(stop)
        missing: list[Range] = []
        present: list[Range] = []
        for segment, first, last in self._index.pieces(chain, start, stop):
            if segment is None:
                missing.append((first, last))
            elif segment.is_written:
                present.append((first, last))
        if self._threshold > 1:
            missing = self._offered_often(chain, start, stop, missing)
        if self._arc is not None:
            self._learn(self._arc, chain, missing, uses)
        for first, last in missing:
            uses.seen[first:last] = b"\1" * (last - first)
        for first, last in present:
            self._note_found(chain, uses, first, last)
        num_lacking = sum([last - first for first, last in missing]) - (self.num_chunks - self.num_used)
        if head is not None:
            present += [
                (first, last) for segment, first, last in self._index.pieces(chain, head, start) if segment is not None
            ]
        if missing and num_lacking > 0 and not self._make_room(chain, num_lacking, present):
            return None
        missing = joined(missing)
        for first, last in missing:
            segment = Segment(chain, first, last)
            self._index.enter(segment, chain, first, last)
            if self._lru is not None and self._ranks_by_request:
                self._lru.insert_at(segment, self._drawn(self._lru, uses))
                uses.found[first:last] = b"\1" * (last - first)
            else:
                self._policy.insert(segment)
            self.num_used += last - first
            if self._arc is not None:
                uses.inserted[first:last] = b"\1" * (last - first)
        return missing

    def complete_store(self, chain: BlockChain, ranges: list[Range]) -> None:
        """Mark chunks as written: from now on they are found, and can be evicted."""
        for start, stop in ranges:
            for segment in self._isolate(chain, start, stop):
                segment.is_written = True
                self._free(segment)
            if self.has_listener:
                self.events.append(TierStored(self._medium, chain, start, stop, self._size))

    def abandon(self, chain: BlockChain, ranges: list[Range]) -> None:
        """Give up chunks that are being written, so that they are absent."""
        for start, stop in ranges:
            for segment in self._isolate(chain, start, stop):
                self._lose(segment)

    def finish(self, chain: BlockChain, uses: Uses) -> None:
        """End a request: its chunks become the most recent, and the start of its prompt the most recent of all."""
        if self._lru is not None:
            stop = len(uses.seen)
            while (stop := uses.seen.rfind(1, 0, stop) + 1) > 0:
                start = uses.seen.rfind(0, 0, stop) + 1
                self._lru.use(self._merge(chain, self._isolate(chain, start, stop)))
                stop = start
        elif self._arc is not None:
            kinds = [2 if found else inserted for found, inserted in zip(uses.found, uses.inserted, strict=True)]
            stop = len(kinds)
            for kind, group in groupby(reversed(kinds)):
                start = stop - len(list(group))
                if kind:
                    self._arc.use(self._isolate(chain, start, stop), is_found=kind == 2)
                stop = start

    # The steps of these

    @property
    def _policy(self) -> Lru | Arc:
        policy = self._lru or self._arc
        assert policy is not None
        return policy

    def _note_found(self, chain: BlockChain, uses: Uses, start: int, stop: int) -> None:
        uses.grow(stop)
        uses.seen[start:stop] = b"\1" * (stop - start)
        if self._lru is not None and self._ranks_by_request:
            self._raise(self._lru, chain, uses, start, stop)
        if self._arc is not None:
            for chunk in range(start, stop):
                uses.found[chunk] |= not uses.inserted[chunk]

    def _raise(self, lru: Lru, chain: BlockChain, uses: Uses, start: int, stop: int) -> None:
        """Give those of the chunks that a request uses for the first time the ranks that it has drawn."""
        while (first := uses.found.find(0, start, stop)) >= 0:
            last = uses.found.find(1, first, stop)
            start = stop if last < 0 else last
            for segment in self._isolate(chain, first, start):
                lru.raise_to(segment, self._drawn(lru, uses))
            uses.found[first:start] = b"\1" * (start - first)

    def _drawn(self, lru: Lru, uses: Uses) -> int:
        if uses.drawn < 0:
            uses.drawn = lru.draw()
        return uses.drawn

    def _offered_often(self, chain: BlockChain, start: int, stop: int, missing: list[Range]) -> list[Range]:
        """Count an offer, and return the missing chunks that have been offered often enough to be stored."""
        counts = self._num_offers
        names = [self.name(chain, chunk) for chunk in range(start, stop)]
        known = [name for name in names if name in counts]
        for name in known:
            counts.move_to_end(name)
            counts[name] += 1
        num_others = len(counts) - len(known)
        for name in names:
            if name in counts:
                continue
            if len(counts) >= MAX_COUNTED:
                if not num_others:
                    continue
                counts.popitem(last=False)
                num_others -= 1
            counts[name] = 1
        return [
            (chunk, chunk + 1)
            for first, last in missing
            for chunk in range(first, last)
            if counts.get(names[chunk - start], 0) >= self._threshold
        ]

    def _learn(self, arc: Arc, chain: BlockChain, missing: list[Range], uses: Uses) -> None:
        """Report to ARC, once a request, which chunks will be stored, the last ones first."""
        chunks = [chunk for first, last in missing for chunk in range(first, last) if not uses.missed[chunk]]
        for chunk in chunks:
            uses.missed[chunk] = 1
        arc.miss([self.name(chain, chunk) for chunk in reversed(chunks)])

    def _make_room(self, chain: BlockChain, count: int, present: list[Range]) -> bool:
        """Evict this many chunks, but none of those offered; if that is impossible, evict none and return False."""
        offered = [segment for first, last in present for segment in self._isolate(chain, first, last)]
        if count > self.num_evictable - sum([segment.num_chunks for segment in offered if segment.is_evictable]):
            return False
        for segment in offered:
            segment.is_protected = True
        while count:
            segment, most = self._policy.victim()
            most = min(most, count)
            self._forget(segment, most)
            if segment.num_chunks:
                self._policy.free(segment)
            count -= most
        self._policy.end_eviction()
        for segment in offered:
            segment.is_protected = False
        return True

    def _free(self, segment: Segment) -> None:
        """Allow the eviction of a segment that nothing writes or reads any more."""
        self.num_evictable += segment.num_chunks
        self._policy.free(segment)

    def _lose(self, segment: Segment) -> Range:
        """Remove a segment that is not evicted, and return its chunks."""
        if self._arc is not None:
            self._arc.lose(segment)
        return self._leave(segment, segment.num_chunks)

    # Segments

    def _isolate(self, chain: BlockChain, start: int, stop: int) -> list[Segment]:
        """Return the segments that hold the chunks of a range, if any, cut so that they hold no others."""
        whole = self._index.at(chain, start)
        if whole is not None and whole.chain is chain and whole.start == start and whole.stop == stop:
            return [whole]
        bounds: dict[Segment, Range] = {}
        for segment, first, last in self._index.pieces(chain, start, stop):
            if segment is not None:
                bounds[segment] = (bounds[segment][0] if segment in bounds else first, last)
        found = []
        for segment, (first, last) in bounds.items():
            if segment.start < first:
                _, segment = self._split(segment, first)
            if segment.stop > last:
                segment, _ = self._split(segment, last)
            found.append(segment)
        return found

    def _split(self, segment: Segment, chunk: int) -> tuple[Segment, Segment]:
        """Cut a segment in two at a chunk."""
        other = segment.split(chunk)
        self._index.enter(other, other.chain, other.start, other.stop)
        if other.is_evictable:
            self._policy.free(other)
            self._policy.free(segment)
        return (other, segment) if other.start < segment.start else (segment, other)

    def _merge(self, chain: BlockChain, segments: list[Segment]) -> list[Segment]:
        """Merge neighbours that may be evicted; the larger absorbs the smaller."""
        merged: list[Segment] = []
        for segment in segments:
            before = merged[-1] if merged else None
            if before is None or before.stop != segment.start or not (before.is_evictable and segment.is_evictable):
                merged.append(segment)
                continue
            start, middle, stop = before.start, segment.start, segment.stop
            if middle - start >= stop - middle:
                self._index.enter(before, chain, middle, stop)
                before.chain, before.stop, segment.stop = chain, stop, middle
            else:
                self._index.enter(segment, chain, start, middle)
                segment.chain, segment.start, before.stop = chain, start, start
                merged[-1] = segment
        return merged

    def _forget(self, segment: Segment, count: int) -> None:
        """Evict this many chunks of a segment, the first to go."""
        chain, place, is_tail_first = segment.chain, segment.place, segment.is_tail_first
        start, stop = self._leave(segment, count)
        self.num_evictable -= count
        self.num_evicted += count
        if self._arc is not None:
            chunks = range(start, stop)
            self._arc.remember(place, [self.name(chain, c) for c in (reversed(chunks) if is_tail_first else chunks)])
        if self.evicted is not None:
            self.evicted.append((chain, start, stop))
        if self.has_listener:
            self.events.append(TierRemoved(self._medium, chain, start, stop, self._size, is_tail_first))

    def _leave(self, segment: Segment, count: int) -> Range:
        """Remove this many chunks of a segment, the first to go, and return them."""
        chain = segment.chain
        start, stop = segment.cut(count)
        self._index.remove(chain, start, stop)
        self.num_used -= count
        return start, stop
