"""Segments: chunks of a chain that are treated alike, and an index that finds them by content."""

from collections.abc import Hashable, Iterator

from mocker.chain import BlockChain
from mocker.tiers.ranges import Range


class Segment:
    """Chunks `start` to `stop` of a chain that are in a tier and are treated alike."""

    __slots__ = (
        "chain",
        "is_protected",
        "is_tail_first",
        "is_written",
        "num_loads",
        "num_readers",
        "place",
        "rank",
        "start",
        "stop",
    )

    def __init__(self, chain: BlockChain, start: int, stop: int) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop
        self.is_written = False
        self.num_readers = 0
        self.num_loads = 0
        """The readers that are requests; others copy it to another tier."""
        self.is_protected = False
        """Whether it is part of the offer for which others make room."""
        self.place = 0  # which of the policy's lists it is in
        self.rank = 0  # of the chunk that goes first
        self.is_tail_first = False

    @property
    def num_chunks(self) -> int:
        """Count the chunks."""
        return self.stop - self.start

    @property
    def is_evictable(self) -> bool:
        """Whether nothing writes or reads it."""
        return self.is_written and not self.num_readers

    def split(self, chunk: int) -> "Segment":
        """Become the larger of the parts before and after a chunk, and return the other."""
        is_front = chunk - self.start <= self.stop - chunk
        other = Segment(self.chain, self.start if is_front else chunk, chunk if is_front else self.stop)
        other.is_written, other.num_readers, other.num_loads = self.is_written, self.num_readers, self.num_loads
        other.is_tail_first, other.place, other.rank = self.is_tail_first, self.place, self.rank
        later = other if is_front is self.is_tail_first else self  # of the two, the one that goes later
        later.rank += self.stop - chunk if self.is_tail_first else chunk - self.start
        if is_front:
            self.start = chunk
        else:
            self.stop = chunk
        return other

    def cut(self, count: int) -> tuple[int, int]:
        """Lose this many chunks, the first to go, and return their start and end."""
        self.rank += count
        if self.is_tail_first:
            self.stop -= count
            return self.stop, self.stop + count
        self.start += count
        return self.start - count, self.start


class SegmentIndex:
    """An index from chunks to segments: by the ids of a chain, at a cost by id rather than by chunk.

    An id has one segment if that holds all its chunks; otherwise it has a row, with a place for each chunk from the first on
    whose name it covers.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._size = blocks_per_chunk
        self._rows: dict[Hashable, Segment | list[Segment | None]] = {}

    def pieces(self, chain: BlockChain, start: int, stop: int) -> Iterator[tuple[Segment | None, int, int]]:
        """Yield the segments of the chunks in a range, None for absent ones, piece by piece."""
        chunk = start
        while chunk < stop:
            segment, begin = self.at(chain, chunk), chunk
            if segment is None:
                chunk = self._next_present(chain, chunk, stop)
            else:
                chunk = min(_common_stop(segment, chain, chunk, self._size), stop)
            yield segment, begin, chunk

    def enter(self, segment: Segment, chain: BlockChain, start: int, stop: int) -> None:
        """Enter chunks of a chain in a segment."""
        ids, head, tail = self._whole_ids(chain, start, stop)
        self._rows.update(dict.fromkeys(ids, segment))
        for first, last in (head, tail):
            if first < last:
                self._set(chain, first, last, segment)

    def remove(self, chain: BlockChain, start: int, stop: int) -> None:
        """Remove chunks of a chain."""
        ids, head, tail = self._whole_ids(chain, start, stop)
        for id in ids:
            del self._rows[id]
        for first, last in (head, tail):
            if first < last:
                self._set(chain, first, last, None)

    def at(self, chain: BlockChain, chunk: int) -> Segment | None:
        """Return the segment that holds a chunk."""
        index = chain.index_of((chunk + 1) * self._size - 1)
        row = self._rows.get(chain.ids[index])
        if row is None or isinstance(row, Segment):
            return row
        place = chunk - chain.first_block(index) // self._size
        return row[place] if place < len(row) else None

    def _next_present(self, chain: BlockChain, chunk: int, stop: int) -> int:
        """Return the first present chunk of a range that starts with an absent one, or the end of the range."""
        rows, ids, size, per_id, num_named = self._rows, chain.ids, self._size, chain.blocks_per_id, chain.num_named
        while chunk < stop:
            block = (chunk + 1) * size - 1
            index = block // per_id if block < num_named else len(ids) - 1
            if ids[index] not in rows:
                if size <= per_id and block < num_named:  # then each of the next ids names a chunk
                    last = (min(stop * size, num_named) - 1) // per_id
                    while index < last and ids[index + 1] not in rows:
                        index += 1
                end = min((index + 1) * per_id, num_named) if block < num_named else stop * size
                chunk = max(end // size, chunk + 1)
            elif self.at(chain, chunk) is not None:
                return chunk
            else:
                chunk += 1
        return min(chunk, stop)

    def _whole_ids(self, chain: BlockChain, start: int, stop: int) -> tuple[tuple[Hashable, ...], Range, Range]:
        """Return the ids all of whose chunks are in a range, and the chunks before and after those."""
        size, per_id = self._size, chain.blocks_per_id
        first = -(-start * size // per_id)
        last = min(((stop + 1) * size - 1) // per_id, chain.num_named // per_id)
        if first >= last or size > per_id:  # with larger chunks, some ids name none
            return (), (start, stop), (stop, stop)
        return chain.ids[first:last], (start, first * per_id // size), (last * per_id // size, stop)

    def _set(self, chain: BlockChain, start: int, stop: int, segment: Segment | None) -> None:
        """Record the segment of chunks, id by id: the ids also have other chunks."""
        rows, size = self._rows, self._size
        while start < stop:
            index = chain.index_of((start + 1) * size - 1)
            id, first = chain.ids[index], chain.first_block(index) // size
            if index + 1 == len(chain.ids):
                last, num_places = stop, stop - first
            else:
                last = min(chain.first_block(index + 1) // size, stop)
                num_places = (index + 1) * chain.blocks_per_id // size - first
            row = rows.get(id)
            if not isinstance(row, list):
                row = rows[id] = [row] * num_places
            elif len(row) < num_places:
                row += [None] * (num_places - len(row))
            row[start - first : last - first] = [segment] * (last - start)
            if segment is None and not any(row):
                del rows[id]
            start = last


def _common_stop(segment: Segment, chain: BlockChain, chunk: int, size: int) -> int:
    """Return where a segment that holds a chunk of a chain ends, or its content starts to differ."""
    if segment.chain is chain:
        return segment.stop
    ids, theirs, per_id = chain.ids, segment.chain.ids, chain.blocks_per_id
    # Ids are chained, so common ones come first; the last id of a prompt is its own.
    low, high = ((chunk + 1) * size - 1) // per_id, min(len(ids), len(theirs)) - 1
    while low + 1 < high:
        middle = (low + high) // 2
        if ids[middle] == theirs[middle]:
            low = middle
        else:
            high = middle
    num_common = min((low + 1) * per_id, chain.num_named, segment.chain.num_named)
    return min(segment.stop, max(num_common // size, chunk + 1))
