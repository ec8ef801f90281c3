"""Who hears of a simulated engine's KV events: by default our routers, in the form that they read."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mocker import AllBlocksCleared, BlockChain, BlockRemoved, BlockStored
from mocker.events import GroupRemoved, GroupStored, KvEvent, TierRemoved, TierStored, for_routers, shared_keys
from serving.engines.mock.layer_groups import layer_group
from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import PreprocessedRequest

__all__ = [
    "AllBlocksCleared",
    "BlockChain",
    "BlockRemoved",
    "BlockStored",
    "EventSink",
    "GroupRemoved",
    "GroupStored",
    "KvEvent",
    "RouterSink",
    "TierRemoved",
    "TierStored",
    "router_events",
]


class EventSink(Protocol):
    """Hears of one rank's KV events."""

    def content(self, request: PreprocessedRequest, tokens: npt.NDArray[np.uint32], output: list[int]) -> object:
        """Return what the chain of a request with this answer carries as its payload, for its events."""
        ...

    def publish(self, events: list[KvEvent], beyond: Sequence[BlocksEvent] = ()) -> None:
        """Publish what has happened up to the end of a step, here and in tiers beyond host memory; never waits."""
        ...


class RouterSink:
    """Publishes events to our routers."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self._publisher = publisher

    def content(self, request: PreprocessedRequest, tokens: npt.NDArray[np.uint32], output: list[int]) -> None:
        """Return nothing: the blocks of a live chain have the names that routers use."""

    def publish(self, events: list[KvEvent], beyond: Sequence[BlocksEvent] = ()) -> None:
        """See `EventSink`."""
        self._publisher.publish([*router_events(events), *beyond])


def router_events(events: Iterable[KvEvent]) -> Iterable[BlocksEvent]:
    """Turn the engine's events into the router's: sequence hashes, each with its parent; a chunk becomes all its blocks."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.chain.ids[event.start - 1] if event.start else None
            assert parent is None or isinstance(parent, int)
            yield BlocksStored(_hashes(event.keys()), parent)
        elif isinstance(event, (GroupStored, GroupRemoved)) and not event.group.keeps_all:
            yield _of_part(event)
        elif isinstance(event, (GroupStored, GroupRemoved)):
            start, stop = for_routers(event)
            kind = BlockStored if isinstance(event, GroupStored) else BlockRemoved
            yield from router_events([kind(event.chain, start, stop)] if start < stop else [])
        elif isinstance(event, AllBlocksCleared):
            yield BlocksCleared("GPU")
        elif isinstance(event, BlockRemoved):
            yield BlocksRemoved(_hashes(event.keys()))
        else:
            size = event.blocks_per_chunk
            hashes = _hashes(map(event.chain.key, range(event.start * size, event.stop * size)))
            if isinstance(event, TierStored):
                yield BlocksStored(hashes, None, event.medium)
            else:
                yield BlocksRemoved(hashes, event.medium)


def _of_part(event: GroupStored | GroupRemoved) -> BlocksEvent:
    """Turn an event about layers that keep only a part into the router's."""
    hashes = _hashes(shared_keys(event))
    if isinstance(event, GroupRemoved):
        return BlocksRemoved(hashes, group=event.group.number)
    return BlocksStored(hashes, None, group=layer_group(event.group))


def _hashes(keys: Iterable[Hashable]) -> list[int]:
    return [key for key in keys if isinstance(key, int)]
