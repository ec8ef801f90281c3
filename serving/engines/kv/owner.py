"""The prefill worker's side of transfers: it offers KV and keeps it until it is read or its lease expires.

    offered, under a lease --- read, expired or withdrawn --> over

A prompt's KV is offered when the prompt is computed, with a ticket that says so (`tickets.py`). From then on the engine's
blocks are held until the offer is over. Destination first, the prompt is computed only when its reader has begun.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from serving.engines.kv.exchange import KvExchange, OnSent, ignore
from serving.engines.kv.leases import Leases
from serving.engines.kv.notices import Begin, Left, Notice, Offered, Read, Renew, Wait
from serving.engines.kv.params import RemoteKv
from serving.engines.kv.rooms import Room, Rooms
from serving.engines.kv.tickets import MAX_TICKETS, Ticket, Tickets
from serving.life.lease import LeaseConfig
from serving.runtime.messages import CallError
from serving.runtime.world import world
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
    ticket: Ticket
    room: int | None
    rank: int
    num_blocks: int
    num_tokens: int
    num_cached_tokens: int
    on_offered: Callable[[RemoteKv], object]
    """Called once, unless the offer is over before."""
    on_over: Callable[[], object]
    """Called once."""
    is_over: bool = False
    is_said: bool = False


class KvOwner:
    """See the module."""

    def __init__(
        self,
        exchange: KvExchange,
        lease: LeaseConfig,
        *,
        block_bytes: float,
        num_gpus: int,
        meeting_timeout_s: float,
    ) -> None:
        """Own what a started exchange offers, whose blocks have so many bytes and are sent by so many GPUs."""
        self._exchange = exchange
        self._lease = lease
        self._block_bytes, self._num_gpus = block_bytes, num_gpus
        self._tickets = Tickets(exchange.agent.memory)
        self._offers: dict[str, Offer] = {}
        self._leases: Leases[str] = Leases(lease.kv_lease_duration_s)
        self._rooms: Rooms[RoomCall] = Rooms(meeting_timeout_s)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0  # when the timer ends: uvloop's handle does not say so for a timer that is due at once

    @property
    def num_held(self) -> int:
        """Offers that are not over yet."""
        return len(self._offers)

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for their reader to have blocks."""
        return self._rooms.num_waiting

    @property
    def is_full(self) -> bool:
        """Whether there may be no tickets for the prompts that are in progress here."""
        return self._tickets.num_free < MAX_TICKETS // 2

    @property
    def address(self) -> dict[str, Any]:
        """The address at which readers reach us."""
        return dict(self._exchange.agent.address)

    def find(self, id: str) -> RemoteKv | None:
        """Return where the KV of an offer is, None if it is not offered any more."""
        offer = self._offers.get(id)
        return None if offer is None else self._describe(offer)

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

    def offer(
        self,
        keys: Sequence[int],
        *,
        room: int | None,
        rank: int,
        num_tokens: int,
        num_cached_tokens: int,
        on_offered: Callable[[RemoteKv], object],
        on_over: Callable[[], object],
    ) -> Offer:
        """Offer the KV of a prompt, which has been computed.

        Args:
            keys: keys of its blocks.
            room: the room in which its reader waits.
            rank: which of our ranks has computed it.
            num_tokens: how many tokens the prompt has.
            num_cached_tokens: how many of them were found in the cache.
            on_offered: called when the KV can be read, and its reader, if it waits in a room, knows.
            on_over: called when nobody will read it any more.
        """
        id, now = world().token_hex(8), self._loop.time()
        offer = Offer(
            id, self._tickets.issue(keys), room, rank, len(keys), num_tokens, num_cached_tokens, on_offered, on_over
        )
        self._offers[id] = offer
        self._leases.grant(id, now)
        self._arm(now + self._lease.kv_lease_duration_s)
        self._exchange.count(num_offered=1)
        if room is not None and (reader := self._rooms.reader(room)) is not None:
            self._tell_reader(offer, reader, on_sent=partial(self._on_told, offer))
        else:
            self._say(offer)
        return offer

    def withdraw(self, offer: Offer) -> None:
        """End an offer, unless it is over."""
        if not offer.is_over:
            if offer.room is not None:
                self.leave(offer.room, "its KV is no longer offered")
            self._end(offer)

    def close(self) -> None:
        """Withdraw everything."""
        for offer in list(self._offers.values()):
            self.withdraw(offer)
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, offer: Offer) -> None:
        offer.is_over = True
        del self._offers[offer.id]
        self._leases.end(offer.id)
        self._tickets.wipe(offer.ticket)
        offer.on_over()

    def _on_told(self, offer: Offer, error: TransferError | None) -> None:
        """End the prompt's call: its reader knows where the KV is, or cannot be reached."""
        assert offer.room is not None
        if offer.is_over:
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
        lease = self._lease
        return RemoteKv(
            remote_engine_id=f"{self._exchange.id}-{offer.rank}",
            remote_request_id=offer.id,
            remote_block_ids=[offer.ticket.place],
            remote_ticket_number=offer.ticket.number,
            remote_num_tokens=offer.num_tokens,
            remote_num_blocks=offer.num_blocks,
            remote_prefill_cached_tokens=offer.num_cached_tokens,
            remote_block_bytes=self._block_bytes,
            remote_num_gpus=self._num_gpus,
            remote_lease_s=lease.kv_lease_duration_s if lease.kv_lease_renewal else None,
            remote_agent=self.address,
        )

    # Notices and timers

    def on_notice(self, notice: Notice) -> None:
        """Act on a notice of a reader."""
        match notice:
            case Renew(requests):
                now = self._loop.time()
                for id in requests if self._lease.kv_lease_renewal else ():
                    self._leases.renew(id, now)
            case Read(id):
                if (offer := self._offers.get(id)) is not None:
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
        if offer is not None:
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
        kv = msgspec.structs.replace(self._describe(offer), remote_agent={})
        self._exchange.tell(reader, Offered(offer.room, kv), on_sent=on_sent)

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
