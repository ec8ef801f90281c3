"""Which blocks prompts reuse, and the most hits that a cache of some size could have.

A link is a run of blocks that a request has and that a later request is the next to have:

    request    0       1       2       3
    blocks   a b c   a b d   e f     a b c       links: 0 -> 1: a b,  1 -> 3: a b,  0 -> 3: c
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workloads.columns import Numbers, numbered
from workloads.workload import Workload

Tokens = npt.NDArray[np.int64]
"""Tokens of each request, shape (requests,)."""
CHUNK = 1 << 15
"""Requests whose blocks are looked up at a time, so that memory does not grow with their number."""


class ReuseLinks(NamedTuple):
    """Blocks that one request has, and that a later one is the next to have: a row each, shape (links,)."""

    begin: Numbers
    end: Numbers
    num_blocks: Numbers


NO_LINKS = ReuseLinks(*[np.empty(0, np.int32)] * 3)


@dataclass(frozen=True, slots=True)
class Reuse:
    """The links of a workload, ordered by their end, then by their place in the prompt."""

    block_size: int
    num_blocks: Numbers
    """Full blocks of each prompt."""
    links: ReuseLinks

    def endless_hits(self) -> Tokens:
        """Count the prompt tokens that one unlimited cache would have held, in order of arrival."""
        return self._hits(self.links.num_blocks)

    def best_hits(self, capacity: int, counted: npt.NDArray[np.bool_] | None = None) -> Tokens:
        """Count the prompt tokens found in a cache of this many blocks that knows the future, in order of arrival.

        This is Belady's rule: when the cache is too full, evict the blocks that are needed again last. No cache of this size has
        more hits in total, and neither do workers with caches of this total size, however requests are spread over them:

        - Blocks are found if they stayed from the beginning of their link to its end. At each request in between, all that
          stays and the request's own blocks must fit. If there are too many, the block that is needed again last takes
          room at every later request at which another would, so it is the best one to evict.
        - A prefix is needed again no later than what follows it. So it is evicted last, and what is kept is always whole
          prefixes: the rule is optimal for a prefix cache, too, and not only a bound for it.
        - For several workers, take the blocks that any of them has: they fit into all caches together, and include what the
          next request finds at its worker. It does not matter how far one worker is behind another.

        Each worker is assumed to compute one prompt after the other, in order of arrival. Requests that overtake others can
        find more, and so can those after a prompt that is recomputed after a preemption, or workers that share a store and
        are not equally far.

        Args:
            capacity: blocks in the cache.
            counted: the requests whose hits count and are maximised (default: all).
        """
        links, capacity = self.links, min(capacity, np.iinfo(np.int32).max)
        held = links.num_blocks if counted is None else np.where(counted[links.end], links.num_blocks, 0)
        return self._hits(held if self._fit(held, capacity) else self._kept(held.tolist(), capacity))

    def _fit(self, held: Numbers, capacity: int) -> bool:
        """Return whether a cache never has to evict what these links hold."""
        count = len(self.num_blocks)
        begun, ended = (np.bincount(numbers, held, count) for numbers in self.links[:2])
        kept = np.cumsum(begun - ended)  # after each request
        return bool((kept <= capacity).all() and (kept - begun <= np.maximum(capacity - self.num_blocks, 0)).all())

    def _kept(self, held: list[int], capacity: int) -> list[int]:
        """Return how many of the blocks of each link stay until it ends."""
        kept, num_over = 0, 0
        waiting: list[int] = []  # numbers of links, negated so that the one that ends last comes first
        order = np.argsort(self.links.begin, kind="stable")
        beginning = np.split(order, np.cumsum(np.bincount(self.links.begin, minlength=len(self.num_blocks)))[:-1])
        ending = np.bincount(self.links.end, minlength=len(self.num_blocks)).tolist()

        def let_go(most: int) -> None:
            nonlocal kept
            while kept > most:  # of those that end together, the deepest has the highest number
                number = -waiting[0]
                count = min(held[number], kept - most)
                held[number] -= count
                kept -= count
                if not held[number]:
                    heappop(waiting)

        for own, num_ending, begun in zip(self.num_blocks.tolist(), ending, beginning, strict=True):
            kept -= sum(held[num_over : num_over + num_ending])
            num_over += num_ending
            let_go(max(capacity - own, 0))
            for number in begun.tolist():
                kept += held[number]
                heappush(waiting, -number)
            let_go(capacity)
        return held

    def _hits(self, held: "Numbers | list[int]") -> Tokens:
        """Add up the blocks found in each link, as tokens of each request."""
        return np.bincount(self.links.end, held, len(self.num_blocks)).astype(np.int64) * self.block_size


def reuse_of(workload: Workload, block_size: int | None = None) -> Reuse:
    """Find the links of a workload in blocks of a cache (default: its own); one size divides the other."""
    size = block_size or workload.block_size
    split, join = max(workload.block_size // size, 1), max(size // workload.block_size, 1)
    counts = workload.columns.input_length // size
    ids, num_ids = numbered(workload.columns.kv_ids)
    past = _Past(num_ids, split)
    parts = [past.links(named, counts) for named in _named(workload, ids, counts, split, join)]
    return Reuse(size, counts, ReuseLinks(*map(np.concatenate, zip(*parts, strict=True))) if parts else NO_LINKS)


class _Named(NamedTuple):
    """The ids that name the full blocks of some requests, one request after the other."""

    ids: Numbers
    row: Numbers
    """The request of each."""
    place: Numbers
    """Its place among those of its request."""


def _named(workload: Workload, ids: Numbers, counts: Numbers, split: int, join: int) -> Iterator[_Named]:
    """Yield the ids of full blocks, those of a chunk of requests at a time."""
    starts = workload.columns.starts
    for first in range(0, len(workload), CHUNK):
        edges = starts[first : first + CHUNK + 1]
        row = np.repeat(np.arange(first, first + len(edges) - 1, dtype=np.int32), np.diff(edges))
        place = np.arange(edges[0], edges[-1], dtype=np.int32 if edges[-1] < 1 << 31 else np.int64) - starts[row]
        kept = place // join < -(-counts[row] // split)
        if join > 1:  # ids are chained, so the last of a group identifies the whole group
            kept &= place % join == join - 1
        if kept.any():
            yield _Named(ids[edges[0] : edges[-1]][kept], row[kept], place[kept] // join)


class _Past:
    """What the requests so far had: by id, the last of them, and the most of its blocks that any has filled."""

    def __init__(self, num_ids: int, split: int) -> None:
        self._latest = np.full(num_ids, -1, np.int32)
        self._filled = np.zeros(num_ids if split > 1 else 0, np.int32)
        self._split = split

    def links(self, named: _Named, counts: Numbers) -> ReuseLinks:
        """Return the links that end at the next requests, whose ids these are."""
        (_, row, place), split = named, self._split
        is_first = place == 0
        firsts, begin, filled = is_first.nonzero()[0], *self._before(named, counts)
        unknown = np.minimum.reduceat(np.where(begin < 0, place, np.iinfo(np.int32).max), firsts)
        is_known = place < np.repeat(unknown, np.diff(firsts, append=len(place)))
        is_start = is_known & (is_first | (begin != np.roll(begin, 1)))
        goes_on = np.append(is_known[1:] & ~is_start[1:], False)
        ends_there = np.append(is_known[1:] & ~is_first[1:], False)  # another link of the same request follows
        stops = np.minimum((place + 1) * split, counts[row])
        stops = np.where(ends_there, stops, np.minimum(stops, place * split + filled))
        lengths = stops[is_known & ~goes_on] - place[is_start] * split
        return ReuseLinks(begin[is_start], row[is_start], lengths)

    def _before(self, named: _Named, counts: Numbers) -> tuple[Numbers, Numbers]:
        """Note the ids of the next requests; return the last request that had each before, and its most blocks."""
        ids, row, place = named
        order = np.argsort(ids, kind="stable")
        is_again = ids[order[1:]] == ids[order[:-1]]
        begin = self._latest[ids]
        begin[order[1:][is_again]] = row[order[:-1][is_again]]
        self._latest[ids] = row
        if self._split == 1:
            return begin, np.ones(1, np.int32)
        return begin, self._fill(
            ids[order], order, is_again, np.minimum(counts[row] - place * self._split, self._split)
        )

    def _fill(self, ids: Numbers, order: Numbers, is_again: Numbers, blocks: Numbers) -> Numbers:
        """Note how many blocks of ids, which are sorted, requests have filled; return the most before each."""
        is_first = np.append(True, ~is_again)
        floor = np.cumsum(is_first) * (self._split + 1)  # so that the maximum begins again with each id
        most = np.maximum(blocks[order], np.where(is_first, self._filled[ids], 0))
        most = np.maximum.accumulate(most + floor) - floor
        before = np.empty(len(ids), np.int32)
        before[order] = np.where(is_first, self._filled[ids], np.roll(most, 1))
        self._filled[ids] = most
        return before
