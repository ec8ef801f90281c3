"""Which LoRA adapters ranks have, as far as their router knows: the last ones for which it sent them requests.

A request's adapter is         at the ranks to choose from
on the GPU                     among the last N that were sent to the rank
loaded without loss            fewer than N were sent to it
loaded in another's place      all others

The first kind that has a rank with fewer than 1.25 times the mean of requests in flight is chosen from: an adapter that is
asked for more than one rank can serve is soon at several.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Final

from serving.router.books import RankBooks
from serving.router.policies.policy import within_bound

MOST_LOAD: Final = 1.25
"""The load of a rank, relative to the mean, from which on it is not preferred for its adapters."""


class KnownAdapters:
    """The adapters of the ranks of one router."""

    def __init__(self, num_slots: int) -> None:
        """Begin with none; a rank is taken to have the last `num_slots`, and 0 means that nobody asks."""
        self.num_slots = num_slots
        self._of: dict[int, OrderedDict[str, None]] = {}

    def sent(self, slot: int, adapter: str) -> None:
        """Note that a request was sent to a rank."""
        if not (self.num_slots and adapter):
            return
        known = self._of.setdefault(slot, OrderedDict())
        known[adapter] = None
        known.move_to_end(adapter)
        if len(known) > self.num_slots:
            known.popitem(last=False)

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self._of.pop(slot, None)

    def preferred(self, slots: list[int], adapter: str, books: Mapping[int, RankBooks]) -> list[int]:
        """Return those of the ranks that are best placed for an adapter; all, if it is the model itself."""
        if not (self.num_slots and adapter):
            return slots
        roomy = list(compress(slots, within_bound([books[slot].num_requests for slot in slots], MOST_LOAD)))
        for wanted in (self._having(roomy, adapter), self._with_room(roomy)):
            if wanted:
                return wanted
        return roomy

    def _having(self, slots: Sequence[int], adapter: str) -> list[int]:
        return [slot for slot in slots if adapter in self._of.get(slot, ())]

    def _with_room(self, slots: Sequence[int]) -> list[int]:
        return [slot for slot in slots if len(self._of.get(slot, ())) < self.num_slots]
