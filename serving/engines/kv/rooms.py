"""Rooms: where a prefill worker's calls meet the decode workers that have blocks for them (destination first).

    a call comes ------> it waits for its reader ---- `begin` ----+
                                                                  +--> both are there --> leave --> closed
    a reader begins ---> it waits for the call ------ `come` -----+
       each waits only so long after the other's last sign of life (`wait`): `expire` --> closed

A late-comer is told that its room is closed; the oldest closed rooms are forgotten.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from serving.runtime.messages import CallError

MAX_ROOMS = 4096
MAX_CLOSED = 4096

Call = TypeVar("Call")
Reader = dict[str, Any]


@dataclass(slots=True)
class Room(Generic[Call]):
    """A number that both workers of a request were given (SGLang's `bootstrap_room`), and which of them have come."""

    number: int
    expires_s: float
    call: Call | None = None
    reader: Reader | None = None


class Rooms(Generic[Call]):
    """The rooms of a prefill worker."""

    def __init__(self, timeout_s: float, *, max_rooms: int = MAX_ROOMS) -> None:
        self._timeout_s = timeout_s
        self._max_rooms = max_rooms
        self._rooms: dict[int, Room[Call]] = {}
        self._closed: dict[int, None] = {}  # in order

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def num_waiting(self) -> int:
        """Calls that are waiting for their reader."""
        return sum(room.call is not None and room.reader is None for room in self._rooms.values())

    def come(self, number: int, call: Call, now: float) -> bool:
        """Let a call in; return whether its reader is there.

        Raises:
            CallError: the room is closed or has a call, or there are too many rooms.
        """
        room = self._room(number, now)
        if room.call is not None:
            raise CallError(f"another request is in bootstrap_room {number}", "invalid")
        room.call = call
        return room.reader is not None

    def begin(self, number: int, reader: Reader, now: float) -> Call | None:
        """Let a reader in, perhaps again; return the call that waits, or waited, for it.

        Raises:
            CallError: the room is closed, or there are too many rooms.
        """
        room = self._room(number, now)
        room.reader = reader
        return room.call

    def reader(self, number: int) -> Reader | None:
        """Return who reads in a room, None if nobody does."""
        room = self._rooms.get(number)
        return None if room is None else room.reader

    def wait(self, number: int, now: float) -> None:
        """Note that the side that is not in the room yet will come."""
        if (room := self._rooms.get(number)) is not None:
            room.expires_s = now + self._timeout_s

    def leave(self, number: int) -> Room[Call] | None:
        """Close a room and return who was in it, None if there is none."""
        room = self._rooms.pop(number, None)
        self._closed[number] = None
        if len(self._closed) > MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        return room

    def expire(self, now: float) -> list[Room[Call]]:
        """Close the rooms in which somebody has waited too long, and return them."""
        over = [
            room
            for room in self._rooms.values()
            if room.expires_s <= now and (room.call is None or room.reader is None)
        ]
        for room in over:
            self.leave(room.number)
        return over

    def next_s(self) -> float | None:
        """Return when the next of them may have waited too long."""
        waiting = [room.expires_s for room in self._rooms.values() if room.call is None or room.reader is None]
        return min(waiting, default=None)

    def _room(self, number: int, now: float) -> Room[Call]:
        if number in self._closed:
            raise CallError(f"the other side has left bootstrap_room {number}", "lost")
        room = self._rooms.get(number)
        if room is None:
            if len(self._rooms) >= self._max_rooms:
                raise CallError(
                    f"all {self._max_rooms} rooms of this prefill worker are taken: add a prefill worker, or shorten "
                    "--transfer-meeting-timeout-s so that rooms in which nobody comes are closed sooner",
                    "overloaded",
                )
            room = self._rooms[number] = Room(number, now + self._timeout_s)
        return room
