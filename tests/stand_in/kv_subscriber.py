"""A subscriber of vLLM's KV events, written after vLLM's own example and the fields of 0.32; and a world that publishes some."""

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(EventBatch).decode


class Subscriber:
    """Listens to a publisher, and asks for what it missed."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        context = zmq.asyncio.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.subscribe(topic)
        self._live.connect(endpoint)
        self._replay = context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)

    async def next(self) -> tuple[str, int, EventBatch]:
        """Return the topic, the number and the batch of the next message."""
        topic, number, payload = await asyncio.wait_for(self._live.recv_multipart(), 20)
        return topic.decode(), int.from_bytes(number, "big"), decode(payload)

    async def missed(self, first: int) -> list[tuple[str, int, EventBatch]]:
        """Return what the publisher still has, from a number on."""
        return [(topic.decode(), number, decode(payload)) for topic, number, payload in await self.frames(first)]

    async def frames(self, first: int) -> list[tuple[bytes, int, bytes]]:
        """Return the same as it comes."""
        await self._replay.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            empty, topic, number, payload = await asyncio.wait_for(self._replay.recv_multipart(), 20)
            assert empty == b""
            if not payload:
                assert (topic, number) == (b"", b"\xff" * 8)
                return found
            found.append((topic, int.from_bytes(number, "big"), payload))

    async def events(self) -> list[Any]:
        """Return all events so far."""
        return [event for _, _, batch in await self.missed(0) for event in batch.events]

    def close(self) -> None:
        self._live.close(0)
        self._replay.close(0)
