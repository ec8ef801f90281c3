"""KV events of host memory are those of vLLM's OffloadingConnector, with tokens or without."""

import numpy as np
import pytest

from mocker import AllBlocksCleared, BlockChain, BlockRemoved, BlockStored
from mocker.events import TierRemoved, TierStored
from serving.runtime.messages import pack_u32
from serving.stand_in.config import KvEventsConfig
from serving.stand_in.vllm.kv_events import messages
from serving.stand_in.vllm.kv_events.hashes import BlockHasher
from serving.stand_in.vllm.kv_events.sink import VllmSink
from serving.worker.protocol import CacheScope, PreprocessedRequest, StopConditions

SIZE, CHUNK = 2, 2
TOKENS = list(range(50, 58))


class World:
    """A sink, and a prompt of four blocks that are two chunks."""

    def __init__(self, **settings):
        self.sent = []
        self.hasher = BlockHasher(KvEventsConfig())
        self.num_hashed = 0
        self.sink = VllmSink(self.sent.append, self, rank=0, block_size=SIZE, **settings)
        self.chain = self.chain_of(["a", "b", "c", "d"])
        name, self.names = None, []
        for start in range(0, 8, SIZE):
            name = self.hasher.name(name, TOKENS[start : start + SIZE], None)
            self.names.append(self.hasher.external(name))

    def chain_of(self, ids, tokens=TOKENS, **more):
        prompt = np.array(tokens, np.uint32)
        request = PreprocessedRequest(token_ids=pack_u32(prompt), stop_conditions=StopConditions(max_tokens=1), **more)
        chain = BlockChain(ids)
        chain.payload = self.sink.content(request, prompt, [])
        return chain

    def publish(self, *events):
        self.sink.publish(list(events))
        return self.sent[-1].events

    # As a hasher that counts

    def name(self, *of):
        self.num_hashed += 1
        return self.hasher.name(*of)

    def external(self, name):
        return self.hasher.external(name)


def test_a_chunk_is_named_by_its_last_block_and_says_nothing_else():
    w = World()
    stored = w.publish(TierStored("CPU", w.chain, 0, 2, CHUNK))
    assert stored == [
        messages.BlockStored([w.names[last]], None, [], 0, None, "CPU", None, group_idx=0) for last in (1, 3)
    ]
    removed = w.publish(TierRemoved("CPU", w.chain, 0, 2, CHUNK, False))
    assert removed == [messages.BlockRemoved([w.names[1], w.names[3]], "CPU", 0)]


def test_a_chunk_that_describes_itself_has_each_block_and_the_tokens():
    w = World(describes_chunks=True)
    first, second = w.publish(TierStored("CPU", w.chain, 0, 2, CHUNK))
    kind = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    assert first == messages.BlockStored(w.names[:2], None, TOKENS[:4], SIZE, None, "CPU", None, **kind)
    assert second == messages.BlockStored(w.names[2:], w.names[1], TOKENS[4:], SIZE, None, "CPU", None, **kind)
    removed = w.publish(TierRemoved("CPU", w.chain, 0, 2, CHUNK, True))
    assert removed == [messages.BlockRemoved([*w.names[2:], *w.names[:2]], "CPU", 0)]


def test_what_is_cached_is_hashed_once_and_what_is_not_is_forgotten():
    w = World()
    again = w.chain_of(["a", "b", "c", "d"])
    w.publish(BlockStored(w.chain, 0, 3))
    assert w.num_hashed == 3
    w.publish(BlockStored(again, 0, 3), BlockStored(w.chain, 3, 4), TierStored("CPU", w.chain, 0, 2, CHUNK))
    assert w.num_hashed == 4
    w.publish(BlockRemoved(again, 0, 3), BlockRemoved(w.chain, 3, 4))
    w.publish(AllBlocksCleared(), TierRemoved("CPU", w.chain, 0, 2, CHUNK, False))
    assert w.num_hashed == 4
    assert [event.block_hashes for event in w.publish(BlockStored(w.chain, 1, 2))] == [[w.names[1]]]
    assert w.num_hashed == 6  # its parent has to be hashed, too


def test_copies_of_a_block_are_announced_and_removed_each():
    w = World()
    again = w.chain_of(["a", "b", "c", "d"])
    w.publish(BlockStored(w.chain, 0, 2), BlockStored(again, 0, 2))
    first, second, third, fourth = w.publish(BlockRemoved(w.chain, 0, 2), BlockRemoved(again, 0, 2))
    assert [first.block_hashes[0], second.block_hashes[0]] == [w.names[1], w.names[0]]
    assert (third, fourth) == (first, second)


def test_a_chunk_of_an_adapter_is_the_adapters():
    w = World(describes_chunks=True)
    scope = CacheScope(lora_name="sql", lora_id=2, lora_path="/sql")
    chain = w.chain_of(["e", "f"], TOKENS[:4], cache_scope=scope, session_id="s")
    [gpu] = w.publish(BlockStored(chain, 0, 2))
    [host] = w.publish(TierStored("CPU", chain, 0, 1, CHUNK))
    assert (host.lora_id, host.lora_name, host.extra_keys, host.session_id) == (2, "sql", None, None)
    assert (gpu.extra_keys, gpu.session_id) == ([("sql",), ("sql",)], "s")
    assert host.block_hashes == gpu.block_hashes


def test_a_step_without_events_is_not_sent():
    w = World()
    w.sink.publish([])
    assert w.sent == []


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention"])
def test_the_kind_of_layers_is_in_the_events(kind):
    w = World(spec_kind=kind)
    [stored] = w.publish(BlockStored(w.chain, 0, 1))
    assert stored.kv_cache_spec_kind == kind
