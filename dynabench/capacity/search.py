"""Which layout meets the limits at the least cost. A core: it says what to simulate next and takes the results.

A layout is a way to run the model; the number of workers is searched for. More workers of one layout are assumed to be
better, unless they miss other limits than fewer do: then some number between the two may meet all of them. Layouts are
tried in the order of their lowest possible cost:

    no layout is known to meet the limits    the workers of the most promising one are raised by half, later doubled, until
                                             it does, or until that is far more than expected
    more workers miss other limits           the numbers between are tried
    one is known                             each other layout must be cheaper: it is tried with as many workers as that
                                             allows, or not at all
    none can be cheaper                      those that cost the same are tried, to see which of them is best
"""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynabench.experiment.search import skipped
from reports.figures.outcomes import Outcome, State

RUNAWAY = 4
"""A layout is tried up to this multiple of its expected cost before others get a turn."""


FEW = 8
"""From this many workers on, they are doubled."""


class Question(NamedTuple):
    """A layout with a number of workers that is to be simulated."""

    layout: int
    workers: int


@dataclass
class Layout:
    """A way to run the model, and how many workers it was found to need."""

    name: str
    gpus_per_worker: int
    fixed_gpus: int = 0
    """GPUs of the workers whose number is part of the layout."""
    price: float = 1.0
    """Price of a GPU."""
    floor: int = 1
    """Fewer workers cannot do the work."""
    rank: float = 0.0
    """Among layouts that could cost the same, the one with the smallest value is tried first."""
    impossible: str = ""
    """Why it cannot meet the limits with any number of workers, or is impossible."""
    states: dict[int, State] = field(default_factory=dict)
    """The results by the number of workers."""
    missed: dict[int, frozenset[str]] = field(default_factory=dict)
    """The limits that each number of workers misses, if any."""
    fixed_price: float | None = None
    """Price of a GPU of the workers whose number is part of the layout, if it differs."""
    expected: int = 1
    """Workers that it may need; only the order in which layouts are tried depends on this."""

    def gpus(self, workers: int) -> int:
        """Return the GPUs of this many workers."""
        return self.fixed_gpus + workers * self.gpus_per_worker

    def cost(self, workers: int) -> float:
        """Return the cost of this many workers."""
        return self.fixed_cost + workers * self.gpus_per_worker * self.price

    @property
    def fixed_cost(self) -> float:
        """The cost of the workers whose number is part of the layout."""
        return self.fixed_gpus * (self.price if self.fixed_price is None else self.fixed_price)

    @property
    def met(self) -> int | None:
        """The fewest workers that are known to meet the limits."""
        return min((workers for workers, state in self.states.items() if state == "met"), default=None)

    @property
    def between(self) -> int | None:
        """A skipped number of workers that may meet the limits although fewer and more do not."""
        return skipped(self.missed) if self.met is None else None

    @property
    def low(self) -> int:
        """The fewest workers that could meet the limits."""
        end = self.met or self.between or math.inf
        return max([self.floor, *(workers + 1 for workers in self.missed if workers < end)])

    def low_at(self, times: float) -> int:
        """Return the fewest workers that could meet the limits at this many times the load, if this one's search is over.

        No fewer than at this load. One that missed the limits misses them, too, with as much load for each worker or more.
        """
        missed = max(self.missed, default=0) if self.met is None else 0
        return max(self.low, math.floor(missed * times + 1e-9) + 1)

    def most(self, cost: float, *, is_below: bool) -> int:
        """Return the most workers that cost at most this, or less than this."""
        count = math.floor((cost - self.fixed_cost) / self.price / self.gpus_per_worker + 1e-9)
        return count - 1 if is_below and self.cost(count) >= cost * (1 - 1e-9) else count


class Search:
    """What is known about each layout, and what to find out next."""

    def __init__(self, layouts: Sequence[Layout], *, max_gpus: int, breaks_ties: bool = True) -> None:
        """Start a search with at most `max_gpus`; `breaks_ties`: also try what costs as much as the cheapest."""
        self.layouts = list(layouts)
        self._max_gpus, self._breaks_ties = max_gpus, breaks_ties

    @property
    def best(self) -> Question | None:
        """The cheapest that is known to meet the limits."""
        known = [
            (layout.cost(layout.met), layout.gpus(layout.met), layout.rank, place)
            for place, layout in enumerate(self.layouts)
            if layout.met is not None
        ]
        if not known:
            return None
        place = min(known)[-1]
        return Question(place, self.layouts[place].met or 0)

    @property
    def cost(self) -> float:
        """The cost of the best."""
        best = self.best
        return math.inf if best is None else self.layouts[best.layout].cost(best.workers)

    @property
    def num_open(self) -> int:
        """How many layouts may still be cheaper than the best, or cost as much, and have not been found to meet the limits."""
        return sum(
            not layout.impossible
            and layout.met is None
            and layout.cost(layout.low) <= self.cost * (1 + 1e-9)
            and layout.gpus(layout.low) <= self._max_gpus
            for layout in self.layouts
        )

    def learn(self, question: Question, state: State, outcomes: Iterable[Outcome] = ()) -> None:
        """Note the result of a simulation; an unknown result counts as not met."""
        layout = self.layouts[question.layout]
        layout.states[question.workers] = state
        if state != "met":
            layout.missed[question.workers] = frozenset(one.limit for one in outcomes if one.state != "met")

    def next(self) -> Question | None:
        """Return the question to simulate next; None if the search is finished."""
        found = [
            (*self._turn(place, workers), Question(place, workers))
            for place in range(len(self.layouts))
            if (workers := self._next(place)) is not None
        ]
        return min(found)[-1] if found else next(iter(self._ties()), None)

    def ahead(self, count: int) -> list[Question]:
        """Return up to this many questions: the next, and those that follow if all of them miss the limits, as most do.

        They may be simulated at once, as long as results are learnt in the order of `next`: what is found does not depend
        on their number.
        """
        search, found = copy.deepcopy(self), list[Question]()
        while len(found) < count and (question := search.next()) is not None:
            found.append(question)
            search.learn(question, "missed")
        return found

    def _turn(self, place: int, workers: int) -> tuple[bool, float, float]:
        """Return a layout's place in the queue, smallest first; until one meets the limits, a started one continues."""
        layout = self.layouts[place]
        hoped = layout.cost(max(layout.floor, layout.expected))
        goes_on = self.best is None and layout.states and layout.cost(workers) <= RUNAWAY * hoped
        return not goes_on, layout.cost(max(layout.low, layout.expected)), layout.rank

    def _next(self, place: int) -> int | None:
        """Return the number of workers with which to try a layout, if it may be cheaper than the best."""
        layout, cost = self.layouts[place], self.cost
        if layout.impossible:
            return None
        most = (self._max_gpus - layout.fixed_gpus) // layout.gpus_per_worker
        low = layout.low
        if cost < math.inf:
            most = min(most, layout.most(cost, is_below=True))
        if low > most:
            return None
        if layout.met is not None:
            return (low + min(most, layout.met - 1)) // 2 if low < layout.met else None
        if layout.between is not None:
            return min(layout.between, most)
        if cost < math.inf:
            return most
        return min(low if not layout.states else max(_more(low - 1), low), most)

    def _ties(self) -> list[Question]:
        """Return the untried ones that cost as much as the best."""
        best = self.best
        if best is None or not self._breaks_ties:
            return []
        found = []
        for place, layout in enumerate(self.layouts):
            workers = layout.most(self.cost, is_below=False)
            is_same = not layout.impossible and abs(layout.cost(workers) - self.cost) < 1e-9 * self.cost
            is_possible = layout.low <= workers and layout.gpus(workers) <= self._max_gpus
            if is_same and is_possible and workers not in layout.states:
                found.append((layout.rank, Question(place, workers)))
        return [question for _, question in sorted(found)]


def _more(workers: int) -> int:
    """Return how many workers to try after some that miss the limits: 1, 2, 3, 5, 8, 16, 32.

    Small steps, because a few workers too many take longer to simulate than too few, which soon fail.
    """
    return -(-3 * workers // 2) if workers < FEW else 2 * workers
