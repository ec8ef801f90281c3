"""Follows the KV events of ranks into an index: in order, each once, and repaired from a snapshot when some are lost.

A rank numbers its messages from 0 within an epoch (one start of its worker; a later start has a larger epoch). A snapshot
replaces all messages before its number. So whatever is lost, repeated or reordered, the index is right again once a
snapshot arrives that was taken after the loss.

A rank is followed or awaits a snapshot. `at` is the (epoch, number) of the message that comes next:

    state       what comes                          what happens                                       next state
    followed    message at `at`                     apply it                                           followed
    followed    message at `at`, parent unknown     apply it, ask for a snapshot                       awaiting
    followed    message 0 of a later epoch          forget the rank, then apply it                     followed
    followed    any other later message             keep it, ask for a snapshot                        awaiting
    followed    heartbeat after `at`                note it                                            followed
    followed    heartbeat after the same `at`       the last messages are lost: ask for a snapshot     awaiting
    awaiting    later message                       keep it                                            awaiting
    awaiting    snapshot at or after `at`           replace the rank, then take the kept messages      followed
    awaiting    snapshot before `at`                ignore it, unless a parent is unknown              followed
    awaiting    no snapshot                         the next gap asks again                            followed
    either      message before `at`                 ignore it as a repetition                          unchanged
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored
from serving.router.index import PrefixIndex

MAX_WAITING = 10_000
"""Messages kept for a rank while it awaits its snapshot. More drop the oldest, which a second snapshot repairs."""


@dataclass(slots=True)
class _Place:
    """The state in which a rank is followed."""

    epoch: int = -1
    next: int = 0
    is_awaiting: bool = False
    waiting: dict[tuple[int, int], Sequence[BlocksEvent]] = field(default_factory=dict)
    behind: tuple[int, int] = (-1, -1)


class KvFollower:
    """See the module. If a method returns True, get a snapshot of that rank and pass it to `on_snapshot`."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._places: dict[int, _Place] = {}

    def on_events(self, slot: int, epoch: int, number: int, events: Sequence[BlocksEvent]) -> bool:
        """Process a message from a rank; return whether to ask for a snapshot."""
        place = self._places.setdefault(slot, _Place())
        if epoch < place.epoch or (epoch == place.epoch and number < place.next):
            return False
        if not place.is_awaiting and epoch > place.epoch and number == 0:
            self._index.drop(slot)  # the worker has restarted
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
        """Compare with the number of messages that a rank has sent; the same lag twice means that the last ones are lost."""
        place = self._places.setdefault(slot, _Place())
        if (epoch, number) <= (place.epoch, place.next):
            return False
        if place.behind != (place.epoch, place.next):
            place.behind = (place.epoch, place.next)
            return False
        return self._want(place)

    def on_snapshot(self, slot: int, epoch: int, number: int, stored: Sequence[BlocksStored]) -> bool:
        """Replace the blocks of a rank by a snapshot, taken when it had sent `number` messages."""
        place = self._places.setdefault(slot, _Place())
        place.is_awaiting = False
        if (epoch, number) < (place.epoch, place.next) and slot not in self._index.resync:
            return False  # later messages have been applied
        self._index.drop(slot)
        place.epoch, place.next = epoch, number
        self._apply(slot, stored)
        waiting, place.waiting = place.waiting, {}
        wants = False
        for (its_epoch, its_number), events in sorted(waiting.items()):
            wants |= self.on_events(slot, its_epoch, its_number, events)
        return wants

    def on_no_snapshot(self, slot: int) -> None:
        """Give up on a snapshot that did not arrive, so that the next gap asks again."""
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
        index, tiers, groups = self._index, self._index.tiers, self._index.layer_groups
        for event in events:
            match event:
                case BlocksStored():
                    hashes, parent, medium, group = event
                    if group is not None:
                        groups.store(slot, group, hashes)
                    elif medium == "GPU":
                        index.store(slot, hashes, parent)
                    else:
                        tiers.store(slot, medium, hashes, 0, len(hashes), 1)
                case BlocksRemoved():
                    hashes, medium, number = event
                    if number is not None:
                        groups.remove(slot, number, hashes)
                    elif medium == "GPU":
                        index.evict(slot, hashes)
                    else:
                        tiers.remove(slot, medium, hashes, 0, len(hashes), 1)
                case BlocksCleared(None):
                    index.drop(slot)
                case BlocksCleared("GPU"):
                    index.clear(slot)
                case BlocksCleared(medium):
                    tiers.drop(slot, medium)
