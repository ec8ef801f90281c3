"""The KV events of a simulated engine, in the form that the router reads."""

from collections.abc import Hashable, Iterable

from mocker import AllBlocksCleared, BlockRemoved, BlockStored
from mocker.events import KvEvent, TierStored
from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored


def router_events(events: Iterable[KvEvent]) -> Iterable[BlocksEvent]:
    """Turn the engine's events into the router's: sequence hashes, each with its parent; a chunk becomes all its blocks."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.chain.ids[event.start - 1] if event.start else None
            assert parent is None or isinstance(parent, int)
            yield BlocksStored(_hashes(event.keys()), parent)
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


def _hashes(keys: Iterable[Hashable]) -> list[int]:
    return [key for key in keys if isinstance(key, int)]
