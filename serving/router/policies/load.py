"""Router modes that look at load alone, or at nothing."""

import math
import random
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.candidates import Candidates
from serving.router.config import RouterConfig
from serving.router.policies.policy import Policy


@mypyc_attr(allow_interpreted_subclasses=True)
class Random(Policy):
    """Any rank."""

    description: ClassVar[str] = "Any worker, all alike."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """All cost the same; the tie is broken at random."""
        return [0.0] * len(candidates)


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

    def routed(self, candidates: Candidates, place: int) -> None:
        """Pass the turn to the next rank."""
        self._turn += 1


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastLoaded(Policy):
    """Fewest requests."""

    description: ClassVar[str] = "The worker with the fewest requests in flight: n (also called least-requests)."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the number of requests in flight."""
        return candidates.num_requests


@mypyc_attr(allow_interpreted_subclasses=True)
class PowerOfTwo(Policy):
    """The better of two drawn at random."""

    description: ClassVar[str] = "Of two workers drawn at random, the one with fewer requests in flight."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is n for two of them, infinity for the others."""
        return power_of_two(candidates, self._rng)


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastTokens(Policy):
    """Fewest tokens."""

    description: ClassVar[str] = "The worker with the fewest tokens to compute or read: Q + C."
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is Q + C."""
        return [book.prefill_tokens + book.context_tokens for book in candidates.books]


def power_of_two(candidates: Candidates, rng: random.Random) -> list[float]:
    """Return n for two ranks drawn at random and infinity for the others."""
    costs = [math.inf] * len(candidates)
    for place in rng.sample(range(len(costs)), min(2, len(costs))):
        costs[place] = float(candidates.books[place].num_requests)
    return costs
