"""The worker's side of KV events: numbered messages on the wire, and the snapshot that repairs what was lost."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from serving.router.events import (
    MAX_GROUP,
    BlocksCleared,
    BlocksEvent,
    BlocksRemoved,
    BlocksStored,
    LayerGroup,
    Medium,
    layer_group,
)
from serving.runtime.address import EndpointAddress
from serving.runtime.server import AnswerStream
from serving.runtime.world import world

if TYPE_CHECKING:
    from serving.runtime.distributed import DistributedRuntime

MAX_PENDING = 1 << 20
"""Hashes kept while the event plane accepts none; beyond this, a new epoch starts and routers ask for a snapshot."""

EVENT_HASHES = 4096
"""Maximum hashes in one event; longer events are sent in parts."""

MESSAGE_HASHES = 16_384
"""Maximum hashes in one message, not counting its last event: about 150 KB; a NATS server accepts 1 MiB by default."""

MEDIA: tuple[Medium, ...] = get_args(Medium)

TOPIC = "kv_events"


Event = list[int | list[int] | str | None]
"""An event as it travels."""


class KvEvents(msgspec.Struct, array_like=True):
    """One message: events of one rank of a worker.

    An event is [parent, hashes] (stored), [hashes] (removed) or [] (cleared everywhere). A medium at the end says where it
    happened; without one, stored and removed blocks are the GPU's. A group of layers that keep only a part is at the end,
    too: all its numbers where blocks are stored, the first of them where they are removed.
    """

    instance_id: int
    rank: int
    epoch: int
    number: int
    events: list[Event]


def encode_kv_event(event: BlocksEvent) -> Iterator[Event]:
    """Yield an event as it travels, in parts that are also events."""
    match event:
        case BlocksCleared(medium):
            yield [] if medium is None else [medium]
        case BlocksRemoved(hashes, medium, number):
            where = [number] if number is not None else [] if medium == "GPU" else [medium]
            for start in range(0, len(hashes), EVENT_HASHES):
                yield [hashes[start : start + EVENT_HASHES], *where]
        case BlocksStored(hashes, _, _, LayerGroup() as group):
            for start in range(0, max(len(hashes), 1), EVENT_HASHES):
                yield [None, hashes[start : start + EVENT_HASHES], list(group)]
        case BlocksStored(hashes, parent, medium):
            where = [] if medium == "GPU" else [medium]
            for start in range(0, len(hashes), EVENT_HASHES):
                part = hashes[start : start + EVENT_HASHES]
                yield [parent, part, *where]
                parent = part[-1] if medium == "GPU" else None


_decode = msgspec.msgpack.Decoder(KvEvents).decode


def read_kv_events(data: bytes) -> tuple[KvEvents, list[BlocksEvent]]:
    """Return a message and its events.

    Raises:
        ValueError: it is none.
    """
    message = _decode(data)
    return message, [decode_kv_event(event) for event in message.events]


def decode_kv_event(event: Event) -> BlocksEvent:
    """Return an event received from the wire.

    Raises:
        ValueError: this is not an event.
    """
    match event:
        case [int() | None as parent, list(hashes)]:
            return BlocksStored(hashes, parent)
        case [list(hashes)]:
            return BlocksRemoved(hashes)
        case []:
            return BlocksCleared()
        case [int() | None as parent, list(hashes), medium] if medium in MEDIA:
            return BlocksStored(hashes, parent, medium)
        case [None, list(hashes), list(group)]:
            return BlocksStored(hashes, None, group=layer_group(group))
        case [list(hashes), int() as number] if 0 <= number <= MAX_GROUP:
            return BlocksRemoved(hashes, group=number)
        case [list(hashes), medium] if medium in MEDIA:
            return BlocksRemoved(hashes, medium)
        case [medium] if medium in MEDIA:
            return BlocksCleared(medium)
    raise ValueError(f"not a KV event: {str(event)[:100]}")


class BlockLedger:
    """What a worker has reported so far, for snapshots to routers that missed some of it."""

    def __init__(self) -> None:
        self._parents: dict[int, int | None] = {}
        self._copies: dict[int, int] = {}  # beyond the first
        self._tiers: dict[Medium, dict[int, None]] = {medium: {} for medium in MEDIA if medium != "GPU"}
        self._groups: dict[int, tuple[LayerGroup, Counter[int]]] = {}  # by number: blocks and their copies

    def __len__(self) -> int:
        return len(self._parents)

    def apply(self, event: BlocksEvent) -> None:
        """Apply an event."""
        match event:
            case BlocksStored(hashes, _, _, LayerGroup() as group):
                self._groups.setdefault(group.number, (group, Counter()))[1].update(hashes)
            case BlocksRemoved(hashes, _, int() as number):
                self._remove_of_group(number, hashes)
            case BlocksStored(hashes, parent, "GPU"):
                self._store(hashes, parent)
            case BlocksStored(hashes, _, medium):
                self._tiers[medium].update(dict.fromkeys(hashes))
            case BlocksRemoved(hashes, "GPU"):
                self._remove(hashes)
            case BlocksRemoved(hashes, medium):
                for block in hashes:
                    self._tiers[medium].pop(block, None)
            case BlocksCleared(medium):
                self._clear(medium)

    def _clear(self, medium: Medium | None) -> None:
        if medium in (None, "GPU"):
            self._parents.clear()
            self._copies.clear()
            self._groups.clear()
        for name, blocks in self._tiers.items():
            if name != "SHARED" and medium in (None, name):
                blocks.clear()

    def _store(self, hashes: list[int], parent: int | None) -> None:
        for block in hashes:
            if block in self._parents:
                self._copies[block] = self._copies.get(block, 0) + 1
            else:
                self._parents[block] = parent
            parent = block

    def _remove(self, hashes: list[int]) -> None:
        for block in hashes:
            extra = self._copies.get(block, 0)
            if extra > 1:
                self._copies[block] = extra - 1
            elif extra:
                del self._copies[block]
            else:
                self._parents.pop(block, None)

    def _remove_of_group(self, number: int, hashes: list[int]) -> None:
        _, held = self._groups.get(number, (None, Counter[int]()))
        for block in hashes:
            if held[block] > 1:
                held[block] -= 1
            else:
                del held[block]

    def dump(self) -> list[BlocksStored]:
        """Return the blocks held, parents before children, without GPU blocks whose prefix is gone: they are useless."""
        chains: list[BlocksStored] = []
        told: set[int] = set()
        for block in self._parents:
            path = []
            at: int | None = block
            while at is not None and at not in told and at in self._parents:
                path.append(at)
                at = self._parents[at]
            if not path or (at is not None and at not in told):
                continue
            path.reverse()
            told.update(path)
            parent = self._parents[path[0]]
            if chains and chains[-1].hashes[-1] == parent:
                chains[-1].hashes.extend(path)
            else:
                chains.append(BlocksStored(path, parent))
        # Report extra copies again, so that a router counts as the worker does.
        for block, extra in self._copies.items():
            if block in told:
                chains += [BlocksStored([block], self._parents[block])] * extra
        chains += [BlocksStored(list(blocks), None, medium) for medium, blocks in self._tiers.items() if blocks]
        return chains + [
            BlocksStored(list(held.elements()), None, group=group) for group, held in self._groups.values()
        ]


class KvEventPublisher:
    """Publishes one rank's KV events: events that gather while a message is being sent go into the next one."""

    def __init__(self, runtime: "DistributedRuntime", address: EndpointAddress, rank: int = 0) -> None:
        self.ledger = BlockLedger()
        self.epoch = world().wall_ns()
        self.number = 0
        self._runtime = runtime
        self._subject = address.subject(TOPIC)
        self._rank = rank
        self._pending: list[list[Any]] = []
        self._sealed: deque[list[list[Any]]] = deque()  # the next messages: nothing is added to them
        self._num_waiting = 0
        self._bell = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def publish(self, events: Sequence[BlocksEvent]) -> None:
        """Send events soon; never waits."""
        for event in events:
            self.ledger.apply(event)
            for part in encode_kv_event(event):
                self._pending.append(part)
                self._num_waiting += _size(part)
        if self._num_waiting > MAX_PENDING:
            self._pending.clear()
            self._sealed.clear()
            self._num_waiting = 0
            self.epoch = max(self.epoch + 1, world().wall_ns())
            self.number = 1  # not 0: the next message must not look like a fresh start
        self._bell.set()

    def snapshot(self) -> tuple[int, int, list[BlocksStored]]:
        """Return (epoch, messages that it includes, blocks)."""
        # Events that wait to be sent are in the ledger already. Readers skip the messages that they will be sent in, so
        # later events need messages of their own.
        self._seal()
        return self.epoch, self.number + len(self._sealed), self.ledger.dump()

    async def close(self) -> None:
        """Stop publishing."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._bell.wait()
            self._bell.clear()
            while self._sealed or self._pending:
                if not self._sealed:
                    self._seal()
                events = self._sealed.popleft()
                self._num_waiting -= sum(map(_size, events))
                message = KvEvents(self._runtime.instance_id, self._rank, self.epoch, self.number, events)
                self.number += 1
                await self._runtime.events.publish(self._subject, msgspec.msgpack.encode(message), durable=True)

    def _seal(self) -> None:
        """Turn the pending events into messages."""
        size = MESSAGE_HASHES
        for event in self._pending:
            if size >= MESSAGE_HASHES:
                self._sealed.append([])
                size = 0
            self._sealed[-1].append(event)
            size += _size(event)
        self._pending.clear()


def _size(event: list[Any]) -> int:
    """Return the size of an event: its hashes, plus one."""
    return 1 + sum([len(part) for part in event if isinstance(part, list)])


async def serve_snapshots(
    runtime: "DistributedRuntime", address: EndpointAddress, publishers: Sequence[KvEventPublisher]
) -> None:
    """Announce the events of a worker's ranks, and serve snapshots of them next to its endpoint."""

    def serve(request: msgspec.Raw, stream: AnswerStream) -> None:
        rank = msgspec.msgpack.decode(request, type=int)
        if not 0 <= rank < len(publishers):
            stream.end(f"there is no rank {rank} with KV events", "invalid")
            return
        epoch, number, chains = publishers[rank].snapshot()
        stream.send([epoch, number])
        for stored in chains:
            for part in encode_kv_event(stored):
                stream.send(part)
        stream.end()

    await runtime.events.announce(address.subject(TOPIC))
    await runtime.serve(snapshots_address(address), serve, is_public=False)


def snapshots_address(address: EndpointAddress) -> EndpointAddress:
    """Return the endpoint that sends snapshots of what workers at an address have cached."""
    return address.beside("kv_snapshot")
