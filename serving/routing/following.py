"""Following a live system: which instances serve an endpoint, what each has cached, and its load.

The news goes into the router core, which knows each rank of an instance by a small number, its slot. KV events are
numbered: `KvFollower` notices a loss, and a snapshot from the worker repairs it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from foundation.ordered_set import OrderedSet
from serving.model.card import Bootstrap, ModelCard
from serving.router import Router
from serving.router.events import BlocksStored
from serving.router.follower import KvFollower
from serving.router.index import PrefixIndex
from serving.routing.placement import RankAddress
from serving.runtime.address import EndpointAddress, Instance
from serving.runtime.client import Client
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError
from serving.runtime.ports import Stop
from serving.runtime.world import world
from serving.worker import kv_events, load_reports
from serving.worker.kv_events import Event, decode_kv_event, read_kv_events, snapshots_address
from serving.worker.load_reports import LoadReport

log = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 10.0
MAX_SNAPSHOTS = 4
"""Snapshots fetched at once: workers that join together do not send everything together."""


class WorkerTraits(NamedTuple):
    """What must be known of an instance before it gets requests; its model card contains it."""

    num_ranks: int = 1
    has_kv_events: bool = False
    bootstrap: Bootstrap | None = None


def traits_of(cards: Mapping[str, ModelCard], instance_id: int) -> WorkerTraits | None:
    """Return an instance's data from the cards; None while its card is missing."""
    for card in cards.values():
        if card.instance_id == instance_id:
            return WorkerTraits(card.num_ranks, card.has_kv_events, card.bootstrap)
    return None


class Following:
    """Keeps a router core up to date about the ranks of an endpoint."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        address: EndpointAddress,
        core: Router,
        traits: Callable[[int], WorkerTraits | None],
    ) -> None:
        self.ranks: dict[int, RankAddress] = {}
        """The ranks to route to by slot, the small number by which the core knows them."""
        self.slots: dict[RankAddress, int] = {}
        self.loads: dict[RankAddress, LoadReport] = {}
        """The last report of each."""
        self._runtime = runtime
        self._address = address
        self._core = core
        self._traits = traits
        self._cardless: set[int] = set()
        self._client: Client | None = None
        self._follower = KvFollower(core.index) if isinstance(core.index, PrefixIndex) else None
        self._snapshots = asyncio.Semaphore(MAX_SNAPSHOTS)
        self._tasks: OrderedSet[asyncio.Task[None]] = OrderedSet()
        self._stops: list[Stop] = []

    async def start(self) -> None:
        """Follow events, then discovery."""
        events, address = self._runtime.events, self._address
        if self._follower is not None:
            subject = address.subject(kv_events.TOPIC)
            self._stops.append(await events.subscribe(subject, self._on_kv_events, durable=True))
        self._stops.append(await events.subscribe(address.subject(load_reports.TOPIC), self._on_load))
        self._client = await self._runtime.client(address, self._on_join, self._on_leave)

    @property
    def client(self) -> Client:
        """The client that calls the instances, once started."""
        assert self._client is not None
        return self._client

    async def close(self) -> None:
        """Stop following, and hang up on all instances."""
        for stop in self._stops:
            stop()
        for task in self._tasks:
            task.cancel()
        if self._client is not None:
            await self._client.close()

    def on_card(self, instance_id: int) -> None:
        """Record that an instance's model card has arrived, perhaps after the instance itself."""
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
        for dp_rank in range(traits.num_ranks):
            rank = RankAddress(instance_id, dp_rank)
            slot = next(free for free in range(len(self.ranks) + 1) if free not in self.ranks)
            self.slots[rank] = slot
            self.ranks[slot] = rank
            self._core.add_rank(slot, has_events=traits.has_kv_events)
            if self._follower is not None and traits.has_kv_events:
                self._mend(rank, slot)

    def _on_leave(self, instance_id: int) -> None:
        self._cardless.discard(instance_id)
        for rank in [rank for rank in self.slots if rank.instance_id == instance_id]:
            slot = self.slots.pop(rank)
            del self.ranks[slot]
            self._core.remove_rank(slot)
            self.loads.pop(rank, None)
            if self._follower is not None:
                self._follower.drop(slot)

    def _on_kv_events(self, data: bytes) -> None:
        assert self._follower is not None
        try:
            message, events = read_kv_events(data)
        except ValueError as error:
            log.warning("a KV event message was ignored: %s", error)
            return
        rank = RankAddress(message.instance_id, message.rank)
        slot = self.slots.get(rank)
        if slot is not None and self._follower.on_events(slot, message.epoch, message.number, events):
            self._mend(rank, slot)

    def _on_load(self, data: bytes) -> None:
        try:
            report = msgspec.msgpack.decode(data, type=LoadReport)
        except ValueError as error:
            log.warning("a load report was ignored: %s", error)
            return
        rank = RankAddress(report.instance_id, report.rank)
        slot = self.slots.get(rank)
        if slot is None:
            return
        self.loads[rank] = report
        self._core.on_load(
            slot,
            report.kv_active_blocks / max(report.kv_total_blocks, 1),
            report.num_waiting,
            num_running=report.num_running,
            max_num_seqs=report.max_num_seqs,
            now=asyncio.get_running_loop().time(),
        )
        follower = self._follower
        if follower is not None and report.epoch and follower.on_heartbeat(slot, report.epoch, report.number):
            self._mend(rank, slot)

    def _mend(self, rank: RankAddress, slot: int) -> None:
        """Fetch a snapshot of what a rank has cached."""
        task = asyncio.create_task(self._fetch_snapshot(rank, slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch_snapshot(self, rank: RankAddress, slot: int) -> None:
        assert self._follower is not None
        address = snapshots_address(self._address)
        try:
            async with self._snapshots, asyncio.timeout(world().patience(SNAPSHOT_TIMEOUT_S)):
                stream = self.client.side_call(rank.instance_id, address, rank.dp_rank)
                start, *chains = msgspec.convert([item async for item in stream], list[Event])
                epoch, num_messages = msgspec.convert(start, tuple[int, int])
                stored = [event for event in map(decode_kv_event, chains) if isinstance(event, BlocksStored)]
        except (CallError, TimeoutError, ValueError) as error:
            log.warning("no KV snapshot of instance %x: %s", rank.instance_id, error)
            self._follower.on_no_snapshot(slot)
            return
        if self.slots.get(rank) != slot:
            return
        log.debug("KV snapshot of instance %x: %d chains", rank.instance_id, len(stored))
        if self._follower.on_snapshot(slot, epoch, num_messages, stored):
            self._mend(rank, slot)
