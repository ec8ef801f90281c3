"""The router as a service: the router core, kept up to date by discovery, KV events, load reports and other routers."""

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from serving.router import Decision, Prompt, PromptBlocks, Router, RouterConfig
from serving.router.events import BlocksStored
from serving.router.follower import KvFollower
from serving.router.index import PrefixIndex
from serving.router.router import NoWorkersError
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.client import Client, ReplyStream
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError
from serving.runtime.ports import Stop
from serving.worker.kv_events import MESSAGE_HASHES, KvEvents, LoadReport, beside, decode, subject

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0
TELL_OPEN_S = 2.0
MAX_SNAPSHOTS = 4
"""Snapshots fetched at once: a fleet that joins does not send everything together."""


class WorkerTraits(NamedTuple):
    """What the router must know of an instance; its model card tells."""

    num_ranks: int = 1
    has_kv_events: bool = False


class Worker(NamedTuple):
    """One rank of an instance: what the router core calls a worker."""

    instance_id: int
    rank: int


class Placement(NamedTuple):
    """Where a request goes, and under which number it is booked."""

    request: int
    worker: Worker
    slot: int
    overlap_blocks: int
    decision: Decision
    queue_depth: int
    """Requests in flight there when it was placed, this one not included."""


class BookingMessage(msgspec.Struct, array_like=True):
    """What a router tells other routers of the same endpoint about a request of its own."""

    router_id: int
    request: int
    kind: int
    """0: booked, 1: its prompt is computed, 2: over; 3: `hashes` are the numbers of all that are not over."""
    instance_id: int = 0
    rank: int = 0
    num_tokens: int = 0
    hashes: list[int] = []
    prefill_tokens: int = 0


class Routing:
    """Routes to the instances of one endpoint."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        address: EndpointAddress,
        *,
        mode: str,
        config: RouterConfig,
        block_size: int,
        seed: int,
        traits: Callable[[int], WorkerTraits | None],
    ) -> None:
        self.core = Router(mode, config, block_size=block_size, rng=random.Random(f"router {seed}"))
        self.address = address
        self.loads: dict[Worker, LoadReport] = {}
        self._runtime = runtime
        self._block_size = block_size
        self._traits = traits
        self._slots: dict[Worker, int] = {}
        self._cardless: set[int] = set()
        self._requests = itertools.count()
        self._workers: dict[int, Worker] = {}
        self._client: Client | None = None
        index = self.core.index
        self._follower = KvFollower(index) if isinstance(index, PrefixIndex) else None
        self._snapshots = asyncio.Semaphore(MAX_SNAPSHOTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stops: list[Stop] = []
        self._peers: set[int] = set()
        self._foreign: dict[int, set[int]] = {}
        self._open: set[int] = set()
        self._outbox: list[BookingMessage] = []
        self._will_tell = False

    async def start(self) -> None:
        """Follow discovery, events and other routers."""
        runtime, address = self._runtime, self.address
        if self._follower is not None:
            name = subject(address, "kv_events")
            self._stops.append(await runtime.events.subscribe(name, self._on_kv_events, durable=True))
        self._stops.append(await runtime.events.subscribe(subject(address, "load_metrics"), self._on_load))
        self._stops.append(await runtime.events.subscribe(subject(address, "router_sync"), self._on_bookings))
        await runtime.events.announce(subject(address, "router_sync"))
        prefix = f"v1/routers/{address.namespace}/{address.component}/{address.endpoint}/"
        self._stops.append(await runtime.discovery.watch(prefix, self._on_peer))
        await runtime.register(f"{prefix}{runtime.instance_id:x}", b"{}")
        self._client = await runtime.client(address, self._on_join, self._on_leave)
        self._tasks.add(asyncio.create_task(self._tell_open()))

    async def close(self) -> None:
        """Follow no more."""
        for stop in self._stops:
            stop()
        for task in self._tasks:
            task.cancel()
        if self._client is not None:
            await self._client.close()

    @property
    def num_workers(self) -> int:
        """Workers that can be routed to."""
        return len(self._slots)

    def workers(self) -> list[Worker]:
        """Return the workers that can be routed to, in order of their slots."""
        return [self._workers[slot] for slot in sorted(self._workers)]

    def worker(self, slot: int) -> Worker:
        """Return the worker that the router core knows by this number."""
        return self._workers[slot]

    async def wait_for_workers(self) -> None:
        """Wait until there is one."""
        assert self._client is not None
        await self._client.wait_for_instances()

    def pick(
        self,
        num_tokens: int,
        hashes: list[int],
        instance_id: int | None = None,
        rank: int | None = None,
        *,
        avoid: Collection[int] = (),
        session: str | None = None,
        is_refusable: bool = True,
    ) -> Placement:
        """Choose a worker, or take the one asked for, and book the request there; instances to avoid come last.

        Raises:
            NoWorkersError: there is none, or not the one asked for.
            AllBusyError: all are busy.
            AllFullError: all are full, and the request is refusable.
        """
        if not self._slots:
            raise NoWorkersError(f"no instance of {self.address} is there")
        only = None
        if instance_id is not None:
            only = self._slots.get(Worker(instance_id, rank or 0))
            if only is None:
                raise NoWorkersError(f"{self.address} has no instance {instance_id:x} (rank {rank or 0})")
        prompt = Prompt(num_tokens, PromptBlocks.of(hashes), session)
        request = next(self._requests)
        avoided = (
            frozenset(slot for worker, slot in self._slots.items() if worker.instance_id in avoid)
            if avoid
            else frozenset()
        )
        now = asyncio.get_running_loop().time()
        decision = self.core.pick(request, prompt, now, only, avoided, is_refusable)
        worker = self._workers[decision.worker]
        self._open.add(request)
        if self._peers:
            prefill_tokens = num_tokens - decision.overlap_blocks * self._block_size
            self._tell(
                BookingMessage(
                    self._runtime.instance_id, request, 0, *worker, num_tokens, hashes[:MESSAGE_HASHES], prefill_tokens
                )
            )
        depth = self.core.load(decision.worker).num_requests - 1
        return Placement(request, worker, decision.worker, decision.overlap_blocks, decision, depth)

    def call_any(self, address: EndpointAddress, request: Any) -> ReplyStream:
        """Call another endpoint of any instance's process.

        Raises:
            CallError: there is no instance.
        """
        assert self._client is not None
        ids = self._client.instance_ids()
        if not ids:
            raise CallError(f"no instance of {self.address} is known", "lost")
        return self._client.side_call(ids[0], address, request)

    def send(self, placement: Placement, request: Any) -> ReplyStream:
        """Send a request where it was placed.

        Raises:
            CallError: the instance is gone.
        """
        assert self._client is not None
        return self._client.direct(request, placement.worker.instance_id)

    def on_first_token(self, placement: Placement) -> None:
        """Its prompt is computed."""
        request = placement.request
        self.core.on_first_token(request)
        if self._peers:
            self._tell(BookingMessage(self._runtime.instance_id, request, 1))

    def on_finish(self, placement: Placement) -> None:
        """It is over, in whichever way."""
        request = placement.request
        self.core.on_finish(request)
        self._open.discard(request)
        if self._peers:
            self._tell(BookingMessage(self._runtime.instance_id, request, 2))

    def on_card(self, instance_id: int) -> None:
        """An instance's model card has come, perhaps after the instance itself."""
        if instance_id in self._cardless:
            self._cardless.discard(instance_id)
            self._add(instance_id)

    def _on_join(self, instance: Instance) -> None:
        self._add(instance.instance_id)

    def _add(self, instance_id: int) -> None:
        traits = self._traits(instance_id)
        if traits is None:
            self._cardless.add(instance_id)
            return
        for rank in range(traits.num_ranks):
            worker = Worker(instance_id, rank)
            slot = next(number for number in range(len(self._workers) + 1) if number not in self._workers)
            self._slots[worker] = slot
            self._workers[slot] = worker
            self.core.add_worker(slot, has_events=traits.has_kv_events)
            if self._follower is not None and traits.has_kv_events:
                self._mend(worker, slot)

    def _on_leave(self, instance_id: int) -> None:
        self._cardless.discard(instance_id)
        for worker in [worker for worker in self._slots if worker.instance_id == instance_id]:
            slot = self._slots.pop(worker)
            del self._workers[slot]
            self.core.remove_worker(slot)
            self.loads.pop(worker, None)
            if self._follower is not None:
                self._follower.drop(slot)

    def _on_kv_events(self, data: bytes) -> None:
        assert self._follower is not None
        try:
            message = msgspec.msgpack.decode(data, type=KvEvents)
            events = [decode(event) for event in message.events]
        except ValueError as error:
            log.warning("a KV event message was ignored: %s", error)
            return
        worker = Worker(message.instance_id, message.rank)
        slot = self._slots.get(worker)
        if slot is not None and self._follower.on_events(slot, message.epoch, message.number, events):
            self._mend(worker, slot)

    def _on_load(self, data: bytes) -> None:
        try:
            report = msgspec.msgpack.decode(data, type=LoadReport)
        except ValueError as error:
            log.warning("a load report was ignored: %s", error)
            return
        worker = Worker(report.instance_id, report.rank)
        slot = self._slots.get(worker)
        if slot is None:
            return
        self.loads[worker] = report
        self.core.on_load(
            slot,
            report.kv_active_blocks / max(report.kv_total_blocks, 1),
            report.num_waiting,
            num_running=report.num_running,
            max_num_seqs=report.max_num_seqs,
            now=asyncio.get_running_loop().time(),
        )
        follower = self._follower
        if follower is not None and report.epoch and follower.on_heartbeat(slot, report.epoch, report.number):
            self._mend(worker, slot)

    def _mend(self, worker: Worker, slot: int) -> None:
        """Fetch a snapshot of what a worker has cached."""
        task = asyncio.create_task(self._fetch_snapshot(worker, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch_snapshot(self, worker: Worker, slot: int) -> None:
        assert self._client is not None
        assert self._follower is not None
        try:
            async with self._snapshots, asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                stream = self._client.side_call(worker.instance_id, beside(self.address, "kv_snapshot"), worker.rank)
                items = [item async for item in stream]
        except (CallError, TimeoutError) as error:
            log.warning("no KV snapshot of instance %x: %s", worker.instance_id, error)
            self._follower.on_no_snapshot(slot)
            return
        if self._slots.get(worker) != slot:
            return
        (epoch, number), *chains = items
        stored = [BlocksStored(hashes, parent) for parent, hashes in chains]
        log.debug("KV snapshot of instance %x: %d chains", worker.instance_id, len(stored))
        if self._follower.on_snapshot(slot, epoch, number, stored):
            self._mend(worker, slot)

    def _on_peer(self, key: str, value: bytes | None) -> None:
        try:
            router_id = int(key.rpartition("/")[2], 16)
        except ValueError:
            log.warning("%s in discovery is no router and is ignored", key)
            return
        if router_id == self._runtime.instance_id:
            return
        if value is not None:
            self._peers.add(router_id)
            return
        self._peers.discard(router_id)
        for request in self._foreign.pop(router_id, ()):
            self.core.on_finish((router_id, request))

    def _tell(self, message: BookingMessage) -> None:
        self._outbox.append(message)
        if not self._will_tell:
            self._will_tell = True
            task = asyncio.create_task(self._tell_all())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _tell_all(self) -> None:
        self._will_tell = False
        messages, self._outbox = self._outbox, []
        for some in _portions(messages):
            await self._runtime.events.publish(subject(self.address, "router_sync"), msgspec.msgpack.encode(some))

    async def _tell_open(self) -> None:
        """Now and then tell which requests are not over, so that a message that got lost books nothing for ever."""
        while True:
            await asyncio.sleep(TELL_OPEN_S)
            if self._peers:
                self._tell(BookingMessage(self._runtime.instance_id, 0, 3, hashes=list(self._open)))

    def _on_bookings(self, data: bytes) -> None:
        try:
            messages = msgspec.msgpack.decode(data, type=list[BookingMessage])
        except ValueError as error:
            log.warning("bookings of another router were ignored: %s", error)
            return
        for message in messages:
            router_id, request = message.router_id, message.request
            if router_id == self._runtime.instance_id:
                continue
            known = self._foreign.setdefault(router_id, set())
            key = (router_id, request)
            if message.kind == 0:
                slot = self._slots.get(Worker(message.instance_id, message.rank))
                if slot is not None and request not in known:
                    known.add(request)
                    prompt = Prompt(message.num_tokens, PromptBlocks.of(message.hashes))
                    self.core.book(key, slot, prompt, message.prefill_tokens)
            elif message.kind == 1:
                self.core.on_first_token(key)
            elif message.kind == 3:
                for gone in known - set(message.hashes):
                    known.discard(gone)
                    self.core.on_finish((router_id, gone))
            else:
                known.discard(request)
                self.core.on_finish(key)


def _portions(messages: list[BookingMessage]) -> Iterator[list[BookingMessage]]:
    """Cut what is told to other routers into messages that every event plane takes."""
    portion: list[BookingMessage] = []
    size = 0
    for message in messages:
        if portion and size + len(message.hashes) > MESSAGE_HASHES:
            yield portion
            portion, size = [], 0
        portion.append(message)
        size += 1 + len(message.hashes)
    yield portion
