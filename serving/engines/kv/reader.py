"""The decode worker's side of transfers: it waits as long as KV takes to come, and the other worker keeps it.

    expect --> leases are renewed --> load --> modelled transfer, its ticket read at both ends and meanwhile --> arrived
       |                               |
       +---------- give_up ------------+  the owner is notified in either case

No KV moves: the blocks of a simulated engine have no contents. All transfers to a rank share its links, and those from one
worker share that worker's (`mocker.network`). What others read from it at the same time is not known here.

Destination first, the reader tells the owner that there are blocks, again and again until the owner says where the KV is.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec

from foundation.ordered_set import OrderedSet
from serving.engines.kv.exchange import KvExchange
from serving.engines.kv.leases import RENEWALS
from serving.engines.kv.notices import Begin, Left, Notice, Offered, Read, Renew, Wait
from serving.engines.kv.params import Meeting, RemoteKv
from serving.engines.kv.renewals import Renewals
from serving.engines.kv.tickets import MAX_TICKETS, NUM_LANDINGS, TICKET, digest_of, find_fault
from serving.runtime.world import world
from serving.transfer.agent import Piece, TransferError

log = logging.getLogger(__name__)

BEGIN_AGAIN_S = 5.0
"""How often we tell the owner that there are blocks, in case it missed that or we missed its answer; more often if we are
about to give up."""

LOOK_S = 1.0
"""How often the ticket of KV on its way is read: a worker that is gone is noticed that late."""

MAX_LOOKS = 8
"""How many tickets of one worker may be read at once, so that one that hangs does not hold up the others."""


class LoadError(Exception):
    """KV did not arrive; the message says why, and `kind` is that of a `CallError`."""

    def __init__(self, message: str, kind: str = "engine") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True, eq=False)
class Load:
    """The KV of one prompt on its way here; created in a running loop."""

    keys: Sequence[int]
    """Keys of its blocks."""
    num_tokens: int
    kv: RemoteKv | None
    """Where it is; destination first, or if its owner has to be asked, this is only known later."""
    meeting: Meeting | None
    is_over: bool = False
    """Whether nobody waits for it any more."""
    has_begun: bool = False
    moving: asyncio.Future[float] | None = None
    """Its transfer, once that has begun."""
    waits_until: float = 0.0
    """When we give it up if the owner, which knows that there are blocks, does not answer."""
    error: LoadError | None = None
    times: dict[str, float] = field(default_factory=dict)
    """Times by `World.now`."""
    num_bytes: int = 0
    num_cached_tokens: int | None = None
    """How many tokens of the prompt its owner had in its cache, if whoever sent the request said so."""
    is_directed: bool = False
    """Whether a client chose both workers: then nobody sends the request elsewhere if this fails."""
    offered: asyncio.Future[RemoteKv | LoadError] = field(init=False)

    def __post_init__(self) -> None:
        """Prepare for the owner's answer."""
        self.offered = asyncio.get_running_loop().create_future()

    def offer(self, what: RemoteKv | LoadError) -> None:
        """Record the owner's first answer."""
        if not self.offered.done():
            self.offered.set_result(what)


OnArrived = Callable[[int | None], object]


Spoil = Callable[[int], int | None]
"""Returns how many blocks of a prompt with so many can be read before one cannot; None if all can."""


OnUsed = Callable[[memoryview, bytes], object]
"""Is called with bytes that came with KV that is used from now on, and with what they should be."""


Move = Callable[[RemoteKv, int, int], Awaitable[float]]
"""Lets the last so many blocks of KV come to one of our ranks; returns how many bytes they have."""


class KvReader:
    """See the module."""

    def __init__(
        self,
        exchange: KvExchange,
        move: Move,
        *,
        block_bytes: float,
        read_timeout_s: float,
        meeting_timeout_s: float,
    ) -> None:
        """Read through a started exchange, whose workers have blocks of so many bytes."""
        self._exchange = exchange
        self._move = move
        self._block_bytes = block_bytes
        self._read_timeout_s = read_timeout_s
        self._meeting_timeout_s = meeting_timeout_s
        self._leases: Renewals[str] = Renewals(exchange.tell, Renew)
        self._meetings: Renewals[int] = Renewals(exchange.tell, Wait)
        self._landings = list(range(MAX_TICKETS, MAX_TICKETS + NUM_LANDINGS))
        self._landing = asyncio.Semaphore(NUM_LANDINGS)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # while tickets are read
        self._rooms: dict[int, Load] = {}
        self._loading: OrderedSet[asyncio.Task[None]] = OrderedSet()
        self._finding: OrderedSet[asyncio.Task[None]] = OrderedSet()
        self.spoil: Spoil | None = None
        """What makes KV unreadable on purpose, if anything does."""
        self.on_used: OnUsed | None = None
        """Who sees the tickets of KV that is used, if anybody does."""

    @property
    def num_waiting(self) -> int:
        """Requests that have blocks but whose KV is not computed yet."""
        return sum(load.has_begun and load.kv is None for load in self._rooms.values())

    @property
    def num_loading(self) -> int:
        """Requests whose KV is being transferred."""
        return len(self._loading) - self.num_waiting

    def expect(self, keys: Sequence[int], num_tokens: int, *, kv: RemoteKv | None, meeting: Meeting | None) -> Load:
        """Register KV that will be read when there are blocks for it.

        Raises:
            ValueError: it cannot be this prompt's, or another request meets there.
        """
        load = Load(keys, num_tokens, kv, meeting)
        if kv is not None:
            self._check(kv, load)
            self._leases.begin(kv.remote_agent, kv.remote_request_id, kv.remote_lease_s)
        if meeting is not None:
            if meeting.bootstrap_room in self._rooms:
                raise ValueError(f"another request is in bootstrap_room {meeting.bootstrap_room}")
            self._rooms[meeting.bootstrap_room] = load
            self._meetings.begin(meeting.bootstrap_agent, meeting.bootstrap_room, self._meeting_timeout_s)
        return load

    def find(self, load: Load, finding: Coroutine[None, None, RemoteKv]) -> None:
        """Ask where the KV of an expected load is, and renew its lease from then on: a request may wait long for blocks."""
        load.is_directed = True
        task = asyncio.create_task(self._find(load, finding))
        self._finding.add(task)
        task.add_done_callback(self._finding.discard)

    def begin(self, load: Load, num_cached_blocks: int, on_arrived: OnArrived, *, rank: int) -> None:
        """Read what is missing after the cached blocks; if it does not come, report how many blocks are good."""
        load.has_begun = True
        load.times["decode_blocks"] = world().now()
        self._stop_waiting(load)
        if load.is_over:
            on_arrived(num_cached_blocks)
            return
        task = asyncio.create_task(self._load(load, num_cached_blocks, on_arrived, rank))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    def give_up(self, load: Load) -> None:
        """Notify the owner that nobody waits for this any more."""
        if load.is_over:
            return
        load.is_over = True
        load.offer(LoadError("the request was given up"))
        if load.moving is not None:
            load.moving.cancel()
        if not load.has_begun:
            self._end(load)

    async def close(self) -> None:
        """End everything."""
        self._leases.close()
        self._meetings.close()
        tasks = [*self._loading, *self._finding]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, load: Load, num_valid: int, on_arrived: OnArrived, rank: int) -> None:
        times = load.times
        try:
            if load.is_directed:
                await self._until_found(load)
            elif load.kv is None:
                kv = load.kv = await self._meet(load)
                self._leases.begin(kv.remote_agent, kv.remote_request_id, kv.remote_lease_s)
            assert load.kv is not None
            times["transfer_start"] = world().now()
            num_blocks = len(load.keys)
            most = None if self.spoil is None else self.spoil(num_blocks)
            if most is not None and num_valid < num_blocks:
                num_valid = max(num_valid, most)
                raise LoadError(f"block {num_valid} of {num_blocks}: it was made unreadable, on purpose")
            if num_valid < num_blocks:
                load.num_bytes = round(await self._transfer(load, load.kv, num_blocks - num_valid, rank))
        except LoadError as error:
            load.error = error
        except Exception as error:  # the engine waits for the outcome, whatever it is
            log.exception("KV could not be read")
            load.error = LoadError(f"{type(error).__name__}: {error}")
        times["transfer_end"] = end = world().now()
        times.setdefault("transfer_start", end)
        self._end(load)
        if load.error is None:
            self._exchange.count(num_read=1, num_bytes=load.num_bytes, seconds=end - times["transfer_start"])
        elif not load.is_over:
            self._exchange.count(num_failed=1)
            log.warning("the KV of a prompt of %d tokens did not arrive: %s", load.num_tokens, load.error)
        on_arrived(None if load.error is None else num_valid)

    async def _find(self, load: Load, finding: Coroutine[None, None, RemoteKv]) -> None:
        """Ask where KV is, and keep its lease, or notify the owner if nobody waits for it any more."""
        try:
            kv = await finding
            self._check(kv, load)
        except TransferError as error:
            load.offer(LoadError(str(error), _kind(error)))
            return
        except ValueError as error:
            load.offer(LoadError(str(error)))
            return
        if load.is_over:
            self._exchange.tell(kv.remote_agent, Read(kv.remote_request_id))
            return
        load.kv = kv
        self._leases.begin(kv.remote_agent, kv.remote_request_id, kv.remote_lease_s)
        load.offer(kv)

    async def _until_found(self, load: Load) -> None:
        """Wait until it is known where the KV is.

        Raises:
            LoadError: it is nowhere, or is not this prompt's.
        """
        said = await load.offered
        if isinstance(said, LoadError):
            raise said

    async def _meet(self, load: Load) -> RemoteKv:
        """Tell the owner that there are blocks, and wait for its offer.

        Raises:
            LoadError: the offer does not come, or is not for this prompt.
        """
        assert load.meeting is not None
        begin = Begin(load.meeting.bootstrap_room, dict(self._exchange.agent.address))
        pause_s = min(self._meeting_timeout_s / RENEWALS, BEGIN_AGAIN_S)
        load.waits_until = world().now() + self._meeting_timeout_s
        try:
            while not load.offered.done():
                if world().now() >= load.waits_until:
                    raise LoadError(
                        f"no prefill worker offered it within --transfer-meeting-timeout-s {self._meeting_timeout_s:g}"
                    )
                with late_is_never():
                    await self._exchange.ask(load.meeting.bootstrap_agent, begin)
                await asyncio.wait([load.offered], timeout=min(pause_s, max(load.waits_until - world().now(), 0.0)))
        except TransferError as error:
            raise LoadError(f"the prefill worker cannot be asked to begin: {error}", _kind(error)) from error
        said = load.offered.result()
        if isinstance(said, LoadError):
            raise said
        try:
            self._check(said, load)
        except ValueError as error:
            raise LoadError(str(error)) from error
        return said

    async def _transfer(self, load: Load, kv: RemoteKv, num_blocks: int, rank: int) -> float:
        """Let the last blocks come, as long as their owner keeps them; return how many bytes they have.

        Raises:
            LoadError: it does not, or nobody waits for them any more.
        """
        await self._look(load, kv)
        moving = load.moving = asyncio.ensure_future(self._move(kv, num_blocks, rank))
        try:
            while not moving.done():
                await asyncio.wait([moving], timeout=LOOK_S)
                await self._look(load, kv)
            return moving.result()
        finally:
            moving.cancel()

    async def _look(self, load: Load, kv: RemoteKv) -> None:
        """Check that the owner still keeps KV.

        Raises:
            LoadError: it does not, or nobody waits for it any more.
        """
        if load.is_over:
            raise LoadError("the request was given up")
        wanted = TICKET.pack(kv.remote_ticket_number, digest_of(load.keys))
        turn = self._turns.setdefault(kv.remote_engine_id, asyncio.Semaphore(MAX_LOOKS))
        async with turn, self._landing:
            landing = self._landings.pop()
            try:
                fault = await self._fault(kv, landing, wanted) and await self._fault(kv, landing, wanted)
            except TransferError as error:
                raise LoadError(f"reading from the prefill worker failed: {error}", _kind(error)) from error
            finally:
                self._landings.append(landing)
        if fault:
            raise LoadError(f"its KV at the prefill worker: {fault}")

    async def _fault(self, kv: RemoteKv, landing: int, wanted: bytes) -> str:
        """Read a ticket to a landing, and return what is wrong with it; a bit may have flipped on its way.

        Raises:
            TransferError: it cannot be read.
        """
        agent = self._exchange.agent
        piece = Piece(kv.remote_block_ids[0] * TICKET.size, landing * TICKET.size, TICKET.size)
        await agent.read(kv.remote_agent, [piece], timeout_s=self._read_timeout_s)
        with agent.memory[piece.target : piece.target + TICKET.size] as found:
            fault = find_fault(found, *TICKET.unpack(wanted))
            if not fault and self.on_used is not None:
                self.on_used(found, wanted)
        return fault

    def _check(self, kv: RemoteKv, load: Load) -> None:
        """Check that this is the KV of a prompt."""
        kv.check(num_tokens=load.num_tokens, num_blocks=len(load.keys), block_bytes=self._block_bytes)

    def _end(self, load: Load) -> None:
        """Notify the owner that this was read, or never will be."""
        if (kv := load.kv) is not None:
            self._leases.end(kv.remote_agent, kv.remote_request_id, kv.remote_lease_s)
            self._exchange.tell(kv.remote_agent, Read(kv.remote_request_id))
        if load.meeting is not None:
            room = load.meeting.bootstrap_room
            self._rooms.pop(room, None)
            self._stop_waiting(load)
            if kv is None:
                self._exchange.tell(load.meeting.bootstrap_agent, Left(room, "the decode worker has given up"))

    def _stop_waiting(self, load: Load) -> None:
        """Stop reporting that it is not this one's turn."""
        if (meeting := load.meeting) is not None:
            self._meetings.end(meeting.bootstrap_agent, meeting.bootstrap_room, self._meeting_timeout_s)

    def on_notice(self, notice: Notice) -> None:
        """Act on a notice of an owner."""
        match notice:
            case Offered(room, kv) if (load := self._rooms.get(room)) is not None and load.meeting is not None:
                load.offer(msgspec.structs.replace(kv, remote_agent=load.meeting.bootstrap_agent))
            case Wait(rooms):
                for room in rooms:
                    if (load := self._rooms.get(room)) is not None:
                        load.waits_until = world().now() + self._meeting_timeout_s
            case Left(room, reason, kind) if (load := self._rooms.get(room)) is not None:
                load.offer(LoadError(reason or "the prefill worker has given up", kind))


@contextlib.contextmanager
def late_is_never() -> Iterator[None]:
    """Ignore that an owner did not answer in time: it may the next time."""
    try:
        yield
    except TransferError as error:
        if error.kind != "late":
            raise


def _kind(error: TransferError) -> str:
    """Return the kind of a call's error: what a dead or hanging owner held can be computed elsewhere."""
    return "engine" if error.kind == "refused" else "lost"
