"""The prefill worker's side of transfers: it offers KV and keeps it until it is read or its lease expires.

    prepare --> waits for room on the shelf --> is written --> offered, under a lease --- read, expired or withdrawn --> over
                         |                          |
                         +------- withdrawn --------+---------------------------------------------------------------> over

An engine writes KV while it computes: an offer is prepared when the last step of its prompt begins, and made (`offer`) when
that step ends. From then on the engine's blocks are held until the offer is over. Destination first, the prompt is computed
only when its reader has begun.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from serving.engines.kv.exchange import INLINE_BYTES, KvExchange, OnSent, ignore
from serving.engines.kv.leases import Leases
from serving.engines.kv.notices import Begin, Left, Notice, Read, Renew, Wait, parts
from serving.engines.kv.params import RemoteKv
from serving.engines.kv.rooms import Room, Rooms
from serving.engines.mock.kv.shelf import Placement, Shelf
from serving.life.lease import LeaseConfig
from serving.runtime.messages import CallError
from serving.transfer.agent import TransferError

log = logging.getLogger(__name__)


class RoomCall(NamedTuple):
    """A request that waits in a room for its reader."""

    on_begin: Callable[[], object]
    on_left: Callable[[str], object]


@dataclass(slots=True, eq=False)
class Offer:
    """The KV of one prompt."""

    id: str
    keys: Sequence[int]
    room: int | None
    on_offered: Callable[[RemoteKv], object]
    """Called once, unless the offer is over before."""
    on_over: Callable[[], object]
    """Called once, if the prompt was computed."""
    state: Literal["waiting", "being written", "written", "offered", "over"] = "waiting"
    placement: Placement | None = None
    is_computed: bool = False
    is_said: bool = False
    num_tokens: int = 0
    num_cached_tokens: int = 0


class KvOwner:
    """See the module."""

    def __init__(self, exchange: KvExchange, lease: LeaseConfig, *, meeting_timeout_s: float) -> None:
        """Own what a started exchange offers."""
        self._exchange = exchange
        self._lease = lease
        self._shelf = Shelf(exchange.agent.memory, exchange.layout)
        self._offers: dict[str, Offer] = {}
        self._waiting: deque[Offer] = deque()
        self._num_writing = 0
        self._leases: Leases[str] = Leases(lease.kv_lease_duration_s)
        self._rooms: Rooms[RoomCall] = Rooms(meeting_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0  # when the timer ends: uvloop's handle does not say so for a timer that is due at once
        exchange.on_notice = self.on_notice

    @property
    def num_held(self) -> int:
        """Offers of computed prompts that are not over yet."""
        return sum(offer.is_computed for offer in self._offers.values())

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for memory for their KV, or for their reader to have blocks."""
        return len(self._waiting) + self._rooms.num_waiting

    @property
    def max_blocks(self) -> int:
        """Most blocks that a prompt may have."""
        return self._shelf.num_slots

    @property
    def address(self) -> dict[str, Any]:
        """The address at which readers reach us."""
        return dict(self._exchange.agent.address)

    def find(self, id: str) -> RemoteKv | None:
        """Return where the KV of an offer is, None if it is not offered any more, or not yet."""
        offer = self._offers.get(id)
        return self._describe(offer) if offer is not None and offer.state == "offered" else None

    def come(self, room: int, call: RoomCall) -> bool:
        """Let a request into a room; return whether its reader has begun (if not, its call reports that later).

        Raises:
            CallError: the room cannot be used.
        """
        is_reader_there = self._rooms.come(room, call, self._loop.time())
        self._arm(self._rooms.next_s())
        return is_reader_there

    def leave(self, room: int, reason: str) -> None:
        """Close a room from our side."""
        left = self._rooms.leave(room)
        if left is not None and left.reader is not None:
            self._exchange.tell(left.reader, Left(room, reason))

    def prepare(
        self,
        keys: Sequence[int],
        *,
        room: int | None,
        on_offered: Callable[[RemoteKv], object],
        on_over: Callable[[], object],
    ) -> Offer:
        """Write the KV of a prompt that is being computed, as soon as there is memory for it.

        Args:
            keys: keys of its blocks.
            room: the room in which its reader waits.
            on_offered: called when the KV can be read.
            on_over: called when nobody will read it any more.
        """
        id = secrets.token_hex(8)
        offer = self._offers[id] = Offer(id, keys, room, on_offered, on_over)
        self._waiting.append(offer)
        self._place()
        return offer

    def offer(self, offer: Offer, *, num_tokens: int, num_cached_tokens: int) -> None:
        """Offer what was prepared, once it is written: its prompt has been computed, except for the cached tokens."""
        offer.is_computed, offer.num_tokens, offer.num_cached_tokens = True, num_tokens, num_cached_tokens
        if offer.state == "written":
            self._make(offer)

    def withdraw(self, offer: Offer) -> None:
        """End an offer, unless it is over."""
        if offer.state != "over":
            if offer.room is not None:
                self.leave(offer.room, "its KV is no longer offered")
            self._end(offer)

    def drop(self, offer: Offer) -> None:
        """Discard what was prepared for a prompt that is not computed after all."""
        if offer.state != "over":
            self._end(offer)

    def close(self) -> None:
        """Withdraw everything."""
        for offer in list(self._offers.values()):
            self.withdraw(offer)
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, offer: Offer) -> None:
        was, offer.state = offer.state, "over"
        del self._offers[offer.id]
        self._leases.end(offer.id)
        if was == "waiting":
            self._waiting.remove(offer)
        elif was != "being written":  # an offer that is being written is released afterwards
            self._release(offer)
        if offer.is_computed:
            offer.on_over()
        self._place()

    def _place(self) -> None:
        """Write waiting offers, in order, as long as there is memory."""
        while self._waiting and (placement := self._shelf.place(self._waiting[0].keys)) is not None:
            offer = self._waiting.popleft()
            offer.state, offer.placement = "being written", placement
            num_bytes = len(placement.fresh) * self._exchange.layout.slot_bytes
            # Blocks that it shares may still be in the middle of being written; then it is ready after them.
            if num_bytes <= INLINE_BYTES and not self._num_writing:
                self._shelf.fill(placement)
                self._on_written(offer)
            else:
                self._num_writing += 1
                writing = self._exchange.in_thread(partial(self._shelf.fill, placement))
                writing.add_done_callback(partial(self._on_written_elsewhere, offer))

    def _on_written_elsewhere(self, offer: Offer, done: asyncio.Future[None]) -> None:
        self._num_writing -= 1
        if not done.cancelled():
            done.result()
            self._on_written(offer)

    def _on_written(self, offer: Offer) -> None:
        if offer.state == "over":
            self._release(offer)
            self._place()
            return
        offer.state = "written"
        if offer.is_computed:
            self._make(offer)

    def _make(self, offer: Offer) -> None:
        """Announce that it can be read."""
        offer.state = "offered"
        now = self._loop.time()
        self._leases.grant(offer.id, now)
        self._arm(now + self._lease.kv_lease_duration_s)
        self._exchange.count(num_offered=1)
        if offer.room is not None and (reader := self._rooms.reader(offer.room)) is not None:
            self._tell_reader(offer, reader, on_sent=partial(self._on_told, offer))
        else:
            self._say(offer)

    def _on_told(self, offer: Offer, error: TransferError | None) -> None:
        """End the prompt's call: its reader knows where the KV is, or cannot be reached."""
        assert offer.room is not None
        if offer.state == "over":
            return
        if error is None:
            self._say(offer)
        elif (left := self._rooms.leave(offer.room)) is not None and left.call is not None:
            left.call.on_left(f"the decode worker cannot be notified of the KV: {error}")

    def _say(self, offer: Offer) -> None:
        if not offer.is_said:
            offer.is_said = True
            offer.on_offered(self._describe(offer))

    def _describe(self, offer: Offer) -> RemoteKv:
        assert offer.placement is not None
        lease, slots = self._lease, offer.placement.slots
        return RemoteKv(
            remote_engine_id=self._exchange.id,
            remote_request_id=offer.id,
            remote_block_ids=[slot.number for slot in slots],
            remote_generations=[slot.generation for slot in slots],
            remote_num_tokens=offer.num_tokens,
            remote_prefill_cached_tokens=offer.num_cached_tokens,
            remote_slot_bytes=self._exchange.layout.slot_bytes,
            remote_lease_s=lease.kv_lease_duration_s if lease.kv_lease_renewal else None,
            remote_agent=self.address,
        )

    def _release(self, offer: Offer) -> None:
        assert offer.placement is not None
        self._shelf.release(offer.placement)

    # Notices and timers

    def on_notice(self, notice: Notice) -> None:
        """Act on a notice of a reader."""
        match notice:
            case Renew(requests):
                now = self._loop.time()
                for id in requests if self._lease.kv_lease_renewal else ():
                    self._leases.renew(id, now)
            case Read(id):
                if (offer := self._offers.get(id)) is not None and offer.state == "offered":
                    if offer.room is not None:
                        self._rooms.leave(offer.room)
                    self._say(offer)
                    self._end(offer)
            case Begin(room, reader):
                self._on_begin(room, reader)
            case Wait(rooms):
                for room in rooms:
                    self._rooms.wait(room, self._loop.time())
            case Left(room, reason):
                left = self._rooms.leave(room)
                if left is not None and left.call is not None:
                    left.call.on_left(reason or "the decode worker has given up")

    def _on_begin(self, room: int, reader: dict[str, Any]) -> None:
        """Compute the prompt of a room, or repeat where its KV is."""
        now = self._loop.time()
        is_first = self._rooms.reader(room) is None
        try:
            call = self._rooms.begin(room, reader, now)
        except CallError as error:
            self._exchange.tell(reader, Left(room, str(error), error.kind))
            return
        offer = next((offer for offer in self._offers.values() if offer.room == room), None)
        if offer is not None and offer.state == "offered":
            self._leases.renew(offer.id, now)
            self._tell_reader(offer, reader)
        elif call is None:
            self._arm(self._rooms.next_s())
        elif is_first:
            call.on_begin()
        else:
            self._exchange.tell(reader, Wait([room]))

    def _tell_reader(self, offer: Offer, reader: dict[str, Any], *, on_sent: OnSent = ignore) -> None:
        assert offer.room is not None
        self._exchange.tell(reader, *parts(offer.room, self._describe(offer)), on_sent=on_sent)

    def _arm(self, when: float | None) -> None:
        """Set the timer for leases and rooms to a time, unless it is set earlier."""
        if when is None or (self._timer is not None and self._due_s <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = when, self._loop.call_at(when, self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        for id in self._leases.expire(now):
            self._exchange.count(num_expired=1)
            log.warning("KV offered as %s was not read before its lease expired", id)
            self._on_expired(self._offers[id])
        for room in self._rooms.expire(now):
            self._on_vain(room)
        ends = (self._leases.next_s(), self._rooms.next_s())
        self._arm(min((end for end in ends if end is not None), default=None))

    def _on_expired(self, offer: Offer) -> None:
        """End an offer; if its reader was not notified in time, also end its call."""
        left = self._rooms.leave(offer.room) if offer.room is not None and not offer.is_said else None
        if left is not None and left.reader is not None:
            self._exchange.tell(left.reader, Left(left.number, "its lease expired"))
        if left is not None and left.call is not None:
            left.call.on_left("its lease expired before the decode worker was notified of the KV")
        self.withdraw(offer)

    def _on_vain(self, room: Room[RoomCall]) -> None:
        if room.reader is not None:
            self._exchange.tell(
                room.reader, Left(room.number, "no prefill call came for it within --transfer-meeting-timeout-s")
            )
        if room.call is not None:
            room.call.on_left("no decode worker came for it within --transfer-meeting-timeout-s")
