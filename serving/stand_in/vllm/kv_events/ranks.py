"""The KV events of all ranks of a stand-in."""

import contextlib
from collections.abc import AsyncIterator

from serving.stand_in.config import StandInConfig
from serving.stand_in.faults.events import FaultyWire
from serving.stand_in.faults.state import Faults
from serving.stand_in.vllm.kv_events.hashes import BlockHasher
from serving.stand_in.vllm.kv_events.publisher import Publisher
from serving.stand_in.vllm.kv_events.sink import VllmSink


@contextlib.asynccontextmanager
async def sinks_of(config: StandInConfig, faults: Faults | None = None) -> AsyncIterator[list[VllmSink]]:
    """Publish the events of every rank that runs here, if they are wanted; yield a sink for each.

    Raises:
        PublisherError: an address cannot be used.
    """
    events, engine, sinks = config.kv_events, config.engine, []
    async with contextlib.AsyncExitStack() as closing:
        if events is not None and config.publishes_events:
            for rank in range(config.ranks.first, config.ranks.first + engine.dp_size):
                publisher = Publisher(events, rank)
                closing.push_async_callback(publisher.close)
                if faults is not None:
                    publisher.wire = wire = FaultyWire(publisher.wire, faults, rank)
                    closing.callback(wire.close)
                # Ranks are processes of vLLM's: where the seed is drawn, each draws its own.
                hasher = BlockHasher(events)
                sinks.append(
                    VllmSink(
                        publisher.send,
                        hasher,
                        rank=rank,
                        block_size=engine.block_size,
                        describes_chunks=events.describes_chunks,
                    )
                )
        yield sinks
