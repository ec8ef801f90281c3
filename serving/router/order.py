"""The ranks of a router in the order of what they cost but for the prompt, so that a choice looks at a few of them.

Many modes add up the load of a rank and what the prompt costs there. The second part is the same for all ranks that have
nothing of the prompt, so the least loaded of those is the cheapest of them. The others are scored one by one.

    (1.0, 64, 0)  [2, 5, 9]        load, and the books that the cost reads: the places of the ranks where they are such
    (3.5, 96, 2)  [0]
"""

import random
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from typing import Final

from serving.router.books import RankBooks

Standing = tuple[float, ...]
"""The load of a rank, and all that a cost reads of its books. Ranks that have nothing of a prompt and stand alike cost the same."""

StandingOf = Callable[[RankBooks, int], Standing | None]
"""A mode's formula, given the books and the tokens in a block; None if it has none."""

PRECISION: Final = 1e-9
"""Loads that differ less, as a share of the cost, may be one cost after rounding: those are computed. It is far above the
error of a sum of floats."""


class Order:
    """The ranks of a board by their standing. The board reports each change."""

    __slots__ = ("_block_size", "_places", "_ranked", "_standing", "_standings")

    def __init__(self, standing: StandingOf, block_size: int, books: list[RankBooks]) -> None:
        self._standing = standing
        self._block_size = block_size
        self._standings = [standing(book, block_size) or () for book in books]
        self._places: dict[Standing, list[int]] = {}
        for place, each in enumerate(self._standings):
            self._places.setdefault(each, []).append(place)
        self._ranked = sorted(self._places)

    def note(self, place: int, book: RankBooks) -> None:
        """Note that the books of a rank have changed."""
        old, new = self._standings[place], self._standing(book, self._block_size) or ()
        if new == old:
            return
        self._standings[place] = new
        alike = self._places[old]
        if len(alike) == 1:
            del self._places[old]
            del self._ranked[bisect_left(self._ranked, old)]
        else:
            del alike[bisect_left(alike, place)]
        joined = self._places.get(new)
        if joined is None:
            self._places[new] = [place]
            insort(self._ranked, new)
        else:
            insort(joined, place)

    def cheapest(self, near: Mapping[int, float], cost: Callable[[int], float], rng: random.Random) -> int:
        """Return the place of the cheapest rank, with ties broken at random.

        Args:
            near: the cost of each rank that has something of the prompt, by place.
            cost: the cost of another, by place.
            rng: draws as from a list of all that are cheapest, in order of place.
        """
        least = min(near.values(), default=float("inf"))
        groups: list[tuple[float, list[int]]] = []
        load: float | None = None  # of the least loaded rank that is not near
        for standing in self._ranked:
            if load is not None and standing[0] > load + PRECISION * (1 + abs(least)):
                break
            places = self._places[standing]
            other = next((place for place in places if place not in near), None)
            if other is not None:
                if load is None:
                    load = standing[0]
                least = min(least, found := cost(other))
                groups.append((found, places))
        ties = sorted(place for place, found in near.items() if found == least)
        alike = [places for found, places in groups if found == least]
        if not ties and len(alike) == 1:
            return _one_of(alike[0], sorted(set(near).intersection(alike[0])) if near else [], rng)
        for places in alike:
            ties += [place for place in places if place not in near]
        ties.sort()
        return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]


def _one_of(places: list[int], without: list[int], rng: random.Random) -> int:
    """Draw one of some places, in ascending order, that is not left out."""
    count = len(places) - len(without)
    index = rng.randrange(count) if count > 1 else 0
    for place in without:
        if bisect_left(places, place) <= index:
            index += 1
    return places[index]
