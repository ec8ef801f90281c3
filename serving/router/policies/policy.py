"""A router mode: a small class that scores candidates. The lowest cost wins."""

import math
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from serving.router.books import RankBooks
from serving.router.candidates import Books, Cached, Candidates, Cost
from serving.router.config import RouterConfig
from serving.router.order import Standing
from serving.router.tiers import EVERYTHING, PerTier

TrueWork = tuple[int, int, int]
"""One request at a rank: prompt tokens to compute, output tokens left, context tokens."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Policy:
    """A router mode: a built-in one, or a user's in a file."""

    description: ClassVar[str]
    """One line for the list of modes, with the formula (compiled code keeps no docstrings)."""
    needs_load: ClassVar[bool] = True
    """Whether `costs` reads more of the books than the number of requests."""
    needs_overlap: bool = True
    """Whether it reads who has which prefix; otherwise the router need not follow caches."""
    tier_weights: PerTier = EVERYTHING
    """The weight in m of a block beyond the GPU; one on it counts as 1."""
    needs_state: ClassVar[bool] = False
    """Whether it reads the ranks' load reports."""
    shares_in_flight: ClassVar[bool] = False
    """Whether m counts what engines share: also the blocks of requests in flight, computed or not, but never a prompt's
    last token."""
    herds: ClassVar[bool] = False
    """Whether most of a burst behind one cached prefix goes to the few ranks that have it (`+bound(1.25)` spreads it)."""
    needs_truth: ClassVar[bool] = False
    """Whether the driver calls `on_truth` before each decision: only a simulation can."""
    needs_rollout: ClassVar[bool] = False
    """Whether the driver chooses, by trying each rank in a copy of the simulation."""

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score each candidate; one that must not be chosen costs infinity. By default, each by its `cost`."""
        return candidates.each(self.cost)

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score one rank by its books and what it has of the prompt.

        Also called with columns, for many ranks at once: arithmetic, comparisons and `at_least` work on both.
        """
        raise NotImplementedError

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """Return the load of a rank, then the books that `cost` reads; None if its cost is not a sum.

        The cost of a rank that has nothing of the prompt must be its load plus what is the same for all such ranks.
        """
        return None

    def known(self, candidates: Candidates) -> int | None:
        """Return the index of the choice, if it is clear without the cost of each; asked for many ranks."""
        return candidates.cheapest(self.cost, self._rng)

    def routed(self, candidates: Candidates, place: int) -> None:
        """Record the choice."""

    def on_truth(self, work: list[list[TrueWork]], output_length: int) -> None:
        """Record what each rank's requests really need, and how long the answer to this request will be."""


def within_bound(requests: Sequence[int], bound: float) -> list[bool]:
    """Return which ranks have fewer requests than `bound` (at least 1) times the mean, this one included."""
    limit = math.ceil(bound * (sum(requests) + 1) / len(requests))
    return [n < limit for n in requests]


def at_least(number: Any, least: float) -> Any:
    """Return the larger of two numbers, or a column of them."""
    return max(number, least) if isinstance(number, (int, float)) else number.clip(least)


def choose(costs: Sequence[float], temperature: float, rng: random.Random, tolerance: float = 0.0) -> int:
    """Return the index of the lowest cost, with ties broken at random.

    With a temperature, draw from a softmax of the range-normalised costs; with a tolerance, any cost within that
    share of the range counts as lowest. Infinite costs are never chosen.
    """
    if hasattr(costs, "nonzero"):  # a column
        if temperature <= 0 and tolerance <= 0:
            return one_of(_places_of_least(costs), rng)
        costs = list(map(float, costs))
    least = min(costs)
    if temperature > 0 or tolerance > 0:
        span = max(cost for cost in costs if cost < math.inf) - least
        if temperature > 0 and span > 0:
            weights = [math.exp(-(cost - least) / span / temperature) for cost in costs]
            return rng.choices(range(len(costs)), weights)[0]
        return one_of([place for place, cost in enumerate(costs) if cost <= least + tolerance * span], rng)
    return one_of([place for place, cost in enumerate(costs) if cost == least], rng)


def _places_of_least(column: Any) -> list[int]:
    places: list[int] = (column == column.min()).nonzero()[0].tolist()
    return places


def one_of(places: Sequence[int], rng: random.Random) -> int:
    """Draw one, if there are several."""
    return places[0] if len(places) == 1 else places[rng.randrange(len(places))]
