"""Which blocks prompts reuse, and the most hits that a cache of some size could have.

A link is a run of blocks that a request has and that a later request is the next to have:

    request    0       1       2       3
    blocks   a b c   a b d   e f     a b c       links: 0 -> 1: a b,  1 -> 3: a b,  0 -> 3: c
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from workloads.request import Workload

Tokens = npt.NDArray[np.int64]
"""Tokens of each request, shape (requests,)."""


class ReuseLink(NamedTuple):
    """Blocks that one request has, and that a later one is the next to have."""

    begin: int
    end: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """The links of a workload, ordered by their end, then by their place in the prompt."""

    block_size: int
    num_blocks: list[int]
    """Full blocks of each prompt."""
    links: list[ReuseLink]

    def endless_hits(self) -> Tokens:
        """Count the prompt tokens that one unlimited cache would have held, in order of arrival."""
        return self._hits([link.num_blocks for link in self.links])

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
        links, kept, num_over = self.links, 0, 0
        waiting: list[int] = []  # numbers of links, negated so that the one that ends last comes first
        held = [link.num_blocks if counted is None or counted[link.end] else 0 for link in links]
        beginning: list[list[int]] = [[] for _ in self.num_blocks]
        ending = [0] * len(self.num_blocks)
        for number, link in enumerate(links):
            beginning[link.begin].append(number)
            ending[link.end] += 1

        def let_go(most: int) -> None:
            nonlocal kept
            while kept > most:  # of those that end together, the deepest has the highest number
                number = -waiting[0]
                count = min(held[number], kept - most)
                held[number] -= count
                kept -= count
                if not held[number]:
                    heappop(waiting)

        for request, own in enumerate(self.num_blocks):
            for number in range(num_over, num_over + ending[request]):
                kept -= held[number]
            num_over += ending[request]
            let_go(max(capacity - own, 0))
            for number in beginning[request]:
                kept += held[number]
                heappush(waiting, -number)
            let_go(capacity)
        return self._hits(held)

    def _hits(self, held: list[int]) -> Tokens:
        """Add up the blocks found in each link, as tokens of each request."""
        ends = np.array([link.end for link in self.links], np.int64)
        return np.bincount(ends, held, len(self.num_blocks)).astype(np.int64) * self.block_size


def reuse_of(workload: Workload, block_size: int | None = None) -> Reuse:
    """Find the links of a workload in blocks of a cache (default: its own); one size divides the other."""
    size = block_size or workload.block_size
    split, join = max(workload.block_size // size, 1), max(size // workload.block_size, 1)
    latest: dict[int, int] = {}  # id -> the last request that has it
    partial: dict[int, int] = {}  # id -> its blocks that any prompt has filled, if none has filled all
    counts: list[int] = []
    links: list[ReuseLink] = []
    for number, request in enumerate(workload):
        count = request.input_length // size
        ids = request.hash_ids[join - 1 :: join][: -(-count // split)]
        counts.append(count)
        if not ids:
            continue
        place = stop = 0
        for begin, run in groupby(map(latest.get, ids)):
            if begin is None:
                break
            start, place = stop, place + len(list(run))
            stop = min(place * split, count)
            if place == len(ids) or ids[place] not in latest:
                stop = min(stop, (place - 1) * split + partial.get(ids[place - 1], split))
            links.append(ReuseLink(begin, number, stop - start))
        _fill(partial, ids, place, count - (len(ids) - 1) * split, split)
        latest.update(dict.fromkeys(ids, number))
    return Reuse(size, counts, links)


def _fill(partial: dict[int, int], ids: tuple[int, ...], num_known: int, num_last: int, split: int) -> None:
    """Note that a prompt fills all blocks of its ids, but only this many of the last one."""
    before = 0
    if num_known == len(ids):
        before = partial.get(ids[-1], split)
    elif num_known:
        partial.pop(ids[num_known - 1], None)
    if max(before, num_last) < split:
        partial[ids[-1]] = max(before, num_last)
    else:
        partial.pop(ids[-1], None)
