"""Other routers of the same endpoint: each books in its core what the others send, so that all see one load.

A router sends each change of its requests as it happens, and every two seconds the numbers of all open requests, so
that a lost message does not leave a booking forever.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from serving.router import Prompt, PromptBlocks, Router
from serving.routing.placement import RankAddress
from serving.runtime.address import EndpointAddress
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.ports import Stop
from serving.worker.kv_events import MESSAGE_HASHES

log = logging.getLogger(__name__)

TOPIC = "router_sync"
OPEN_S = 2.0


class Booked(msgspec.Struct, array_like=True, tag=0):
    """A request was placed."""

    request: int
    instance_id: int
    rank: int
    num_tokens: int
    hashes: list[int]
    prefill_tokens: int


class Prefilled(msgspec.Struct, array_like=True, tag=1):
    """A request has its first token."""

    request: int


class Ended(msgspec.Struct, array_like=True, tag=2):
    """A request is over, whichever way it ended."""

    request: int


class Open(msgspec.Struct, array_like=True, tag=3):
    """These requests, and no others, are not over."""

    requests: list[int]


Booking = Booked | Prefilled | Ended | Open


class BookingMessage(msgspec.Struct, array_like=True):
    """What a router reports to the others of the same endpoint about its requests, in order."""

    router_id: int
    bookings: list[Booking]


class Peers:
    """Reports the bookings here to other routers, and books here what they report."""

    def __init__(
        self, runtime: DistributedRuntime, address: EndpointAddress, core: Router, slots: Mapping[RankAddress, int]
    ) -> None:
        """Prepare; `slots` are the numbers of ranks in the core."""
        self.ids: set[int] = set()
        """The other routers."""
        self._runtime = runtime
        self._subject = address.subject(TOPIC)
        self._prefix = "".join(f"{part}/" for part in ("v1/routers", *address))
        self._core = core
        self._slots = slots
        self._theirs: dict[int, set[int]] = {}  # router -> its requests that are booked here
        self._open: set[int] = set()  # our own requests that are not over
        self._outbox: list[Booking] = []
        self._bell = asyncio.Event()
        self._stops: list[Stop] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen to other routers, and announce this one to them."""
        runtime = self._runtime
        self._stops.append(await runtime.events.subscribe(self._subject, self._on_message))
        await runtime.events.announce(self._subject)
        self._stops.append(await runtime.discovery.watch(self._prefix, self._on_peer))
        await runtime.register(f"{self._prefix}{runtime.instance_id:x}", b"{}")
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._repeat())]

    def close(self) -> None:
        """Stop listening and reporting."""
        for stop in self._stops:
            stop()
        for task in self._tasks:
            task.cancel()

    def on_booked(
        self, request: int, rank: RankAddress, *, num_tokens: int, hashes: list[int], prefill_tokens: int
    ) -> None:
        """Report that a request was placed."""
        self._open.add(request)
        self._tell(Booked(request, *rank, num_tokens, hashes[:MESSAGE_HASHES], prefill_tokens))

    def on_first_token(self, request: int) -> None:
        """Report that a request's prompt is computed."""
        self._tell(Prefilled(request))

    def on_finish(self, request: int) -> None:
        """Report that a request is over."""
        self._open.discard(request)
        self._tell(Ended(request))

    def _tell(self, booking: Booking) -> None:
        if self.ids:
            self._outbox.append(booking)
            self._bell.set()

    async def _send(self) -> None:
        """Send pending changes; those that arrive while a message is being sent go with the next."""
        while True:
            await self._bell.wait()
            self._bell.clear()
            bookings, self._outbox = self._outbox, []
            for some in portions(bookings):
                message = BookingMessage(self._runtime.instance_id, some)
                await self._runtime.events.publish(self._subject, msgspec.msgpack.encode(message))

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(OPEN_S)
            self._tell(Open(list(self._open)))

    def _on_peer(self, key: str, value: bytes | None) -> None:
        try:
            router_id = int(key.removeprefix(self._prefix), 16)
        except ValueError:
            log.warning("%s in discovery is not a valid router and is ignored", key)
            return
        if router_id == self._runtime.instance_id:
            return
        if value is not None:
            self.ids.add(router_id)
            return
        self.ids.discard(router_id)
        for request in self._theirs.pop(router_id, ()):
            self._core.on_finish((router_id, request))

    def _on_message(self, data: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(data, type=BookingMessage)
        except ValueError as error:
            log.warning("bookings from another router were ignored: %s", error)
            return
        if message.router_id != self._runtime.instance_id:
            for booking in message.bookings:
                self._take(message.router_id, booking)

    def _take(self, router_id: int, booking: Booking) -> None:
        """Book what another router reports."""
        core, theirs = self._core, self._theirs.setdefault(router_id, set())
        match booking:
            case Booked(request, instance_id, dp_rank, num_tokens, hashes, prefill_tokens):
                slot = self._slots.get(RankAddress(instance_id, dp_rank))
                if slot is not None and request not in theirs:
                    theirs.add(request)
                    prompt = Prompt(num_tokens, PromptBlocks.of(hashes))
                    core.book((router_id, request), slot, prompt, prefill_tokens)
            case Prefilled(request):
                core.on_first_token((router_id, request))
            case Ended(request):
                theirs.discard(request)
                core.on_finish((router_id, request))
            case Open(requests):
                for request in theirs.difference(requests):
                    theirs.discard(request)
                    core.on_finish((router_id, request))


def portions(bookings: Sequence[Booking]) -> Iterator[list[Booking]]:
    """Cut bookings into messages that every event plane accepts."""
    portion: list[Booking] = []
    size = 0
    for booking in bookings:
        num_hashes = _num_hashes(booking)
        if portion and size + num_hashes > MESSAGE_HASHES:
            yield portion
            portion, size = [], 0
        portion.append(booking)
        size += 1 + num_hashes
    if portion:
        yield portion


def _num_hashes(booking: Booking) -> int:
    match booking:
        case Booked(hashes=hashes):
            return len(hashes)
        case Open(requests):
            return len(requests)
    return 0
