"""Router modes: each a small class that scores candidates. The lowest cost wins."""

import math
import random
from collections.abc import Sequence
from typing import ClassVar

from serving.router.candidates import Candidates
from serving.router.config import RouterConfig


class Policy:
    """A router mode."""

    description: ClassVar[str]
    """One line for the list of modes, with the formula (compiled code keeps no docstrings)."""
    needs_load: ClassVar[bool] = True
    """Whether `costs` reads more of the books than the number of requests."""
    needs_overlap: bool = True
    """Whether it reads who has which prefix; otherwise the router need not follow it."""
    needs_state: ClassVar[bool] = False
    """Whether it reads what workers report of themselves."""

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score each candidate; one that must not be chosen costs infinity."""
        raise NotImplementedError

    def routed(self, candidates: Candidates, place: int) -> None:
        """Take note of what was chosen."""


class Random(Policy):
    """See `description`."""

    description: ClassVar[str] = "Any worker, all alike."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """All cost the same; the tie is broken at random."""
        return [0.0] * len(candidates)


class RoundRobin(Policy):
    """See `description`."""

    description: ClassVar[str] = "One worker after the other, in order of worker id."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._turn = 0

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the distance from the worker whose turn it is."""
        count = len(candidates)
        turn = self._turn % count
        self._turn += 1
        return [float((place - turn) % count) for place in range(count)]


class LeastLoaded(Policy):
    """See `description`."""

    description: ClassVar[str] = "The worker with the fewest requests in flight: n (also called least-requests)."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the number of requests in flight."""
        return candidates.num_requests


class PowerOfTwo(Policy):
    """See `description`."""

    description: ClassVar[str] = "Of two workers drawn at random, the one with fewer requests in flight."
    needs_load: ClassVar[bool] = False
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is n for two of them, infinity for the others."""
        return power_of_two(candidates, self._rng)


class LeastTokens(Policy):
    """See `description`."""

    description: ClassVar[str] = "The worker with the fewest tokens to compute or read: Q + C."
    needs_overlap: bool = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is Q + C."""
        return [book.prefill_tokens + book.context_tokens for book in candidates.books]


def power_of_two(candidates: Candidates, rng: random.Random) -> list[float]:
    """Return n for two workers drawn at random and infinity for the others."""
    costs = [math.inf] * len(candidates)
    for place in rng.sample(range(len(costs)), min(2, len(costs))):
        costs[place] = float(candidates.books[place].num_requests)
    return costs


def choose(costs: Sequence[float], temperature: float, rng: random.Random, tolerance: float = 0.0) -> int:
    """Return the place of the lowest cost, ties broken at random.

    With a temperature, draw from a softmax of the range-normalised costs; with a tolerance, any cost within that
    share of the range counts as lowest. Infinite costs are never chosen.
    """
    least = min(costs)
    if temperature > 0 or tolerance > 0:
        span = max(cost for cost in costs if cost < math.inf) - least
        if temperature > 0 and span > 0:
            weights = [math.exp(-(cost - least) / span / temperature) for cost in costs]
            return rng.choices(range(len(costs)), weights)[0]
        ties = [place for place, cost in enumerate(costs) if cost <= least + tolerance * span]
    else:
        ties = [place for place, cost in enumerate(costs) if cost == least]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]
