"""What readers of vLLM's KV events insist on, from their sources.

llm-d-router (pkg/kvevents: zmq_subscriber.go, engineadapter/vllm_msgpack.go, common.go) reads with Go's msgpack into fixed
types: another type is an error, and the whole batch is lost. llm-d-kv-cache is the same code at an earlier time.
vLLM production-stack's router asks LMCache's controller and reads no events.
"""

import asyncio
import struct

import msgspec
import pytest

from serving.stand_in.vllm.kv_events.publisher import END
from serving.worker.protocol import CacheScope
from tests.stand_in.test_kv_events import events, world  # noqa: F401 (a fixture)

TYPES = {
    "block_hashes": list,
    "parent_block_hash": int | bytes | None,
    "token_ids": list,
    "block_size": int,
    "lora_id": int | None,
    "medium": str | None,
    "lora_name": str | None,
    "extra_keys": list | None,
    "group_idx": int | None,
    "kv_cache_spec_kind": str | None,
    "kv_cache_spec_sliding_window": int | None,
    "locality": str | None,
    "ownership": str | None,
    "session_id": str | None,
}
REQUIRED = {
    "BlockStored": {"block_hashes", "token_ids", "block_size"},
    "BlockRemoved": {"block_hashes"},
    "AllBlocksCleared": set(),
}
KINDS = {"full_attention", "mla_attention", "sliding_window", "mamba", "chunked_local_attention"}


def read(frames):
    """Read one message as llm-d-router does; return its pod, model and events."""
    topic, number, payload = frames
    assert len(number) == 8
    _, pod, model = topic.decode().split("@")  # else the whole topic counts as the pod, and there is no model
    assert payload[0] == 0x93  # an array of three
    assert payload[1] == 0xCB  # a time is a float of 64 bits, never an integer
    _, batch, rank = msgspec.msgpack.decode(payload)
    assert isinstance(rank, int)
    for event in batch:
        check(event)
    return pod, model, batch


def check(event):
    assert next(iter(event)) == "type"  # or the reader has to keep what comes before
    fields = {name: value for name, value in event.items() if name != "type"}
    assert fields.keys() >= REQUIRED[event["type"]]
    for name, value in fields.items():
        assert isinstance(value, TYPES[name]), (name, value)
    for name in fields.get("block_hashes", ()):
        # The last 64 bits count; names of more than 64 bytes are refused.
        assert 0 <= name < 1 << 64 if isinstance(name, int) else 8 <= len(name) <= 64
    assert all(0 <= token < 1 << 32 for token in fields.get("token_ids", ()))
    assert all(keys is None or isinstance(keys, list) for keys in fields.get("extra_keys") or ())
    assert fields.get("group_idx", 0) >= 0
    assert fields.get("kv_cache_spec_kind", "full_attention") in KINDS
    if event["type"] == "BlockStored":
        assert len(fields["token_ids"]) == len(fields["block_hashes"]) * fields["block_size"]


class Index:
    """Knows what is cached, as llm-d's index: by the engine's names, each below a known parent."""

    def __init__(self):
        self.blocks = {}

    def digest(self, event):
        match event:
            case {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent}:
                assert parent is None or parent in self.blocks
                for name in names:
                    self.blocks[name] = self.blocks.get(name, 0) + 1
            case {"type": "BlockRemoved", "block_hashes": names}:
                for name in names:
                    self.blocks[name] -= 1
                    if not self.blocks[name]:
                        del self.blocks[name]
            case _:
                self.blocks.clear()


async def replayed(subscriber, first):
    """Ask as llm-d's dealer does: an empty frame and a number; return the messages up to the end."""
    found = []
    await subscriber._replay.send_multipart([b"", struct.pack(">Q", first)])
    while True:
        empty, *frames = await asyncio.wait_for(subscriber._replay.recv_multipart(), 20)
        assert empty == b""
        if not frames[2]:
            assert frames[1] == END
            return found
        found.append(frames)


@pytest.mark.parametrize("is_short", [True, False])
def test_llm_ds_router_reads_every_message_and_its_index_is_what_is_cached(events, is_short):  # noqa: F811
    async def talk():
        async with world(events | {"use_int_block_hashes": is_short}) as w:
            for start in (0, 100, 200, 300, 0):  # more than fits
                await w.ask(list(range(start, start + 41)), max_tokens=6)
            await w.ask(
                list(range(9)), cache_scope=CacheScope(salt="mine", lora_name="sql", lora_id=1, lora_path="/sql")
            )
            num_cached = w.engine.engine._core.pool.num_evictable  # nobody holds any of them
            before = await replayed(w.subscriber, 0)
            await w.engine.control.reset_prefix_cache()
            await w.ask(list(range(5)))
            return before, num_cached, await replayed(w.subscriber, len(before))

    before, num_cached, after = asyncio.run(talk())
    index = Index()
    for place, frames in enumerate(before):
        assert int.from_bytes(frames[1], "big") == place  # a gap would make it forget the pod
        pod, model, batch = read(frames)
        assert (pod, model) == ("pod", "tiny")
        for event in batch:
            index.digest(event)
    assert len(index.blocks) == num_cached
    for frames in after:
        for event in read(frames)[2]:
            index.digest(event)
    assert len(index.blocks) == 1
