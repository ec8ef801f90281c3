"""Follows the KV events of ranks into an index: in order, once, and mended from a snapshot where some were lost.

A rank numbers its messages from 0 within an epoch (a start of its worker; later ones are larger). What a snapshot
says stands for all messages before its number. So whatever is lost, repeated or reordered, the index is right again
once a snapshot taken after the loss has come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored
from serving.router.index import PrefixIndex

MAX_WAITING = 10_000
"""Messages kept for a rank while its snapshot is awaited; the oldest go first, and a second snapshot mends that."""


@dataclass(slots=True)
class _Place:
    """Where we are in a rank's messages."""

    epoch: int = -1
    next: int = 0
    is_awaiting: bool = False
    waiting: dict[tuple[int, int], Sequence[BlocksEvent]] = field(default_factory=dict)
    behind: tuple[int, int] = (-1, -1)


class KvFollower:
    """See the module. A method that returns True wants a snapshot of that rank: call `on_snapshot` with it."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._places: dict[int, _Place] = {}

    def on_events(self, slot: int, epoch: int, number: int, events: Sequence[BlocksEvent]) -> bool:
        """Take in a message of a rank; return whether a snapshot is needed (and none is awaited yet)."""
        place = self._places.setdefault(slot, _Place())
        if epoch < place.epoch or (epoch == place.epoch and number < place.next):
            return False
        if not place.is_awaiting and epoch > place.epoch and number == 0:
            self._index.drop(slot)  # it has started again
            place.epoch, place.next = epoch, 0
        if not place.is_awaiting and epoch == place.epoch and number == place.next:
            place.next += 1
            self._apply(slot, events)
            return slot in self._index.resync and self._want(place)
        place.waiting[epoch, number] = events
        if len(place.waiting) > MAX_WAITING:
            del place.waiting[min(place.waiting)]
        return self._want(place)

    def on_heartbeat(self, slot: int, epoch: int, number: int) -> bool:
        """Compare with how many messages a rank says it has sent; the same lag twice means that the last were lost."""
        place = self._places.setdefault(slot, _Place())
        if (epoch, number) <= (place.epoch, place.next):
            return False
        if place.behind != (place.epoch, place.next):
            place.behind = (place.epoch, place.next)
            return False
        return self._want(place)

    def on_snapshot(self, slot: int, epoch: int, number: int, stored: Sequence[BlocksStored]) -> bool:
        """Replace what is known of a rank by a snapshot, taken when it had sent `number` messages."""
        place = self._places.setdefault(slot, _Place())
        place.is_awaiting = False
        if (epoch, number) < (place.epoch, place.next) and slot not in self._index.resync:
            return False  # we know more by now
        self._index.drop(slot)
        place.epoch, place.next = epoch, number
        self._apply(slot, stored)
        waiting, place.waiting = place.waiting, {}
        wants = False
        for (its_epoch, its_number), events in sorted(waiting.items()):
            wants |= self.on_events(slot, its_epoch, its_number, events)
        return wants

    def on_no_snapshot(self, slot: int) -> None:
        """The snapshot did not come: the next gap asks again."""
        if slot in self._places:
            self._places[slot].is_awaiting = False

    def drop(self, slot: int) -> None:
        """Forget a rank."""
        self._places.pop(slot, None)

    def _want(self, place: _Place) -> bool:
        if place.is_awaiting:
            return False
        place.is_awaiting = True
        return True

    def _apply(self, slot: int, events: Sequence[BlocksEvent]) -> None:
        index = self._index
        for event in events:
            match event:
                case BlocksStored(hashes, parent, "GPU"):
                    index.store(slot, hashes, parent)
                case BlocksStored(hashes, _, medium):
                    index.tiers.store(slot, medium, hashes, 0, len(hashes), 1)
                case BlocksRemoved(hashes, "GPU"):
                    for block in hashes:
                        index.remove(slot, [block])
                case BlocksRemoved(hashes, medium):
                    index.tiers.remove(slot, medium, hashes, 0, len(hashes), 1)
                case BlocksCleared(None):
                    index.drop(slot)
                case BlocksCleared("GPU"):
                    index.clear(slot)
                case BlocksCleared(medium):
                    index.tiers.drop(slot, medium)
