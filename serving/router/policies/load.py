"""Router modes that look at load alone, or at nothing."""

import math
import random
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.books import RankBooks
from serving.router.candidates import Books, Cached, Candidates, Cost
from serving.router.config import RouterConfig
from serving.router.order import Standing
from serving.router.policies.policy import Policy, one_of


@mypyc_attr(allow_interpreted_subclasses=True)
class Random(Policy):
    """Any rank."""

    description: ClassVar[str] = "Any worker, all alike."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """All cost the same; the tie is broken at random."""
        return [0.0] * len(candidates)

    def known(self, candidates: Candidates) -> int | None:
        """Draw one."""
        return one_of(range(len(candidates)), self._rng)


@mypyc_attr(allow_interpreted_subclasses=True)
class RoundRobin(Policy):
    """One rank after the other."""

    description: ClassVar[str] = "One worker after the other, in order of worker id."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._turn = 0

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the distance from the rank whose turn it is."""
        count = len(candidates)
        turn = self._turn % count
        return [float((place - turn) % count) for place in range(count)]

    def known(self, candidates: Candidates) -> int | None:
        """It is the turn of one."""
        return self._turn % len(candidates)

    def routed(self, candidates: Candidates, place: int) -> None:
        """Pass the turn to the next rank."""
        self._turn += 1


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoaded(Policy):
    """Fewest requests."""

    description: ClassVar[str] = "The worker with the fewest requests in flight: n (also called least-requests)."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Cost is the number of requests in flight."""
        return books.num_requests

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """The load is all."""
        return (books.num_requests,)


@mypyc_attr(allow_interpreted_subclasses=True)
class PowerOfTwo(Policy):
    """The better of two drawn at random."""

    description: ClassVar[str] = "Of two workers drawn at random, the one with fewer requests in flight."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is n for two of them, infinity for the others."""
        return power_of_two(candidates, self._rng)

    def known(self, candidates: Candidates) -> int | None:
        """Compare two."""
        books, drawn = candidates.books, sorted(two_of(candidates, self._rng))
        least = min(books[place].num_requests for place in drawn)
        return one_of([place for place in drawn if books[place].num_requests == least], self._rng)


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastTokens(Policy):
    """Fewest tokens."""

    description: ClassVar[str] = "The worker with the fewest tokens to compute or read: Q + C."
    needs_overlap: bool = False

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Cost is Q + C."""
        return books.prefill_tokens + books.context_tokens

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """The load is all."""
        return (books.prefill_tokens + books.context_tokens,)


def power_of_two(candidates: Candidates, rng: random.Random) -> list[float]:
    """Return n for two ranks drawn at random and infinity for the others."""
    costs = [math.inf] * len(candidates)
    for place in two_of(candidates, rng):
        costs[place] = float(candidates.books[place].num_requests)
    return costs


def two_of(candidates: Candidates, rng: random.Random) -> list[int]:
    """Draw the indices of two ranks, or of the only one."""
    return rng.sample(range(len(candidates)), min(2, len(candidates)))
