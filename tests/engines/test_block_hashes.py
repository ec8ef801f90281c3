"""Blocks under an engine's names and under ours."""

import struct

import msgspec
import numpy as np
import pytest
import uvloop
import zmq
from hypothesis import given
from hypothesis import strategies as st

from serving.engines.block_hashes import HashTranslator
from serving.engines.event_readers import EventReaders
from serving.engines.vllm.adapters import LoraModule
from serving.frontend.prepared import PreparedPrompt
from serving.router.events import BlocksCleared, BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.worker.kv_events import BlockLedger
from serving.worker.protocol import CacheScope
from tests.support.waiting import until_async

SIZE = 2


def ours(tokens):
    return sequence_hashes(block_hashes(np.array(tokens, np.uint32), SIZE))


def translated(translator, event):
    """Return what becomes of one event."""
    found = translator.translate([event])
    return found[0] if found else None


def stored(theirs, parent, tokens, **more):
    return {
        "type": "BlockStored",
        "block_hashes": theirs,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
    } | more


def test_a_chain_is_hashed_anew_whatever_the_engine_calls_it():
    translator = HashTranslator(SIZE)
    first = translated(translator, stored([b"a", b"b"], None, [1, 2, 3, 4]))
    second = translated(translator, stored([77], b"b", [5, 6]))
    assert first == BlocksStored(ours([1, 2, 3, 4]), None)
    assert second == BlocksStored(ours([1, 2, 3, 4, 5, 6])[2:], ours([1, 2, 3, 4])[1])
    assert translated(translator, {"type": "BlockRemoved", "block_hashes": [77], "medium": "GPU"}) == BlocksRemoved(
        second.hashes
    )
    assert translated(translator, {"type": "AllBlocksCleared"}) == BlocksCleared()
    assert translated(translator, stored(["c"], b"b", [5, 6])) is None  # its parent was forgotten with the rest


def test_the_blocks_of_an_adapter_are_named_as_the_frontend_names_them():
    poems = LoraModule("poems", 1, "somewhere")
    translator = HashTranslator(SIZE, {"poems": poems.root})
    named = {"lora_name": "poems", "lora_id": 1}
    prompt = PreparedPrompt(np.array([1, 2, 3, 4, 5, 6], np.uint32), SIZE)
    expected = prompt.within(CacheScope(lora_name="poems", lora_id=1)).hashes
    first = translated(translator, stored([b"a", b"b"], None, [1, 2, 3, 4], **named))
    second = translated(translator, stored([b"c"], b"b", [5, 6], **named))
    assert first == BlocksStored(expected[:2], None)
    assert second == BlocksStored(expected[2:], expected[1])
    assert translated(translator, stored([b"d"], None, [1, 2])) == BlocksStored(ours([1, 2]), None)
    removed = {"type": "BlockRemoved", "block_hashes": [b"c"], "medium": "GPU"}
    assert translated(translator, removed) == BlocksRemoved(expected[2:])
    assert translated(translator, stored([b"e"], None, [1, 2], lora_name="prose", lora_id=2)) is None


def test_events_of_older_vllm_are_arrays():
    translator = HashTranslator(SIZE)
    event = ["BlockStored", [1, 2], None, [1, 2, 3, 4], SIZE, None]
    assert translated(translator, event) == BlocksStored(ours([1, 2, 3, 4]), None)
    assert translated(translator, ["BlockRemoved", [2]]) == BlocksRemoved(ours([1, 2, 3, 4])[1:])
    assert translated(translator, ["AllBlocksCleared"]) == BlocksCleared()


@pytest.mark.parametrize(
    "event",
    [
        stored([1], None, [1, 2], medium="TAPE"),
        stored([1], None, [], block_size=0, medium="CPU"),
        stored([1], None, [1, 2], lora_name="other"),
        stored([1], None, [1, 2], lora_id=3),
        stored([1], None, [1]),
        stored([1], 99, [1, 2]),
        {"type": "BlockRemoved", "block_hashes": [5], "medium": None},
    ],
)
def test_what_is_of_no_use_to_a_router_is_left_out(event):
    assert translated(HashTranslator(SIZE), event) is None


CPU, STORAGE = {"medium": "CPU"}, {"medium": "STORAGE"}


def removed(theirs, **more):
    return {"type": "BlockRemoved", "block_hashes": theirs, "medium": "GPU"} | more


def test_a_block_in_host_memory_is_not_taken_for_one_of_the_gpu():
    translator, chain = HashTranslator(SIZE), ours([1, 2, 3, 4])
    assert translated(translator, stored(["a", "b"], None, [1, 2, 3, 4])) == BlocksStored(chain, None)
    assert translated(translator, stored(["b"], "a", [3, 4]) | CPU) == BlocksStored(chain[1:], chain[0], "CPU")
    assert translated(translator, removed(["b", "a"])) == BlocksRemoved([chain[1], chain[0]], "GPU")
    assert translated(translator, removed(["a"]) | CPU) is None  # it never was there
    assert translated(translator, removed(["b"]) | CPU) == BlocksRemoved(chain[1:], "CPU")
    assert translated(translator, removed(["b"]) | CPU) is None


def test_a_block_keeps_its_name_while_it_is_anywhere():
    translator, chain = HashTranslator(SIZE), ours([1, 2, 3, 4])
    translated(translator, stored(["a"], None, [1, 2]))
    translated(translator, stored(["a"], None, [1, 2]) | CPU)
    translated(translator, removed(["a"]))
    below = stored(["b"], "a", [3, 4])
    assert translated(translator, below) == BlocksStored(chain[1:], chain[0])  # its parent is in host memory
    translated(translator, removed(["a"]) | CPU)
    assert translated(translator, below) is None


@pytest.mark.parametrize(
    ("theirs", "medium"),
    [
        ("CPU", "CPU"),
        ("STORAGE", "STORAGE"),
        ("CPU_PINNED", "CPU"),
        ("DISK", "STORAGE"),
        ("EXTERNAL", "SHARED"),
        ("cpu", "CPU"),
    ],
)
def test_every_engines_words_for_media_are_known(theirs, medium):
    """Those of vLLM's offloading, of SGLang's hierarchical cache, and of LMCache in vLLM's process."""
    translator = HashTranslator(SIZE)
    assert translated(translator, stored([1], None, [1, 2], medium=theirs)).medium == medium
    assert translated(translator, removed([1], medium=theirs)).medium == medium


@pytest.mark.parametrize(("locality", "medium"), [(None, "STORAGE"), ("LOCAL", "STORAGE"), ("REMOTE", "SHARED")])
def test_storage_that_is_not_the_workers_own_is_shared(locality, medium):
    event = stored([1], None, [1, 2], medium="STORAGE", locality=locality)
    assert translated(HashTranslator(SIZE), event).medium == medium


def test_a_chunk_of_vllm_names_its_blocks_as_the_gpu_does():
    translator, chain = HashTranslator(SIZE), ours([1, 2, 3, 4, 5, 6, 7, 8])
    translated(translator, stored(["a", "b", "c", "d"], None, [1, 2, 3, 4, 5, 6, 7, 8]))
    # A chunk is said with all its blocks, and again where chunks overlap: then it is gone with the second removal.
    for _ in range(2):
        assert translated(translator, stored(["c", "d"], "b", [5, 6, 7, 8]) | CPU) == BlocksStored(
            chain[2:], chain[1], "CPU"
        )
    assert translated(translator, removed(["c", "d"]) | CPU) is None
    assert translated(translator, removed(["c", "d"]) | CPU) == BlocksRemoved(chain[2:], "CPU")
    assert translated(translator, removed(["c", "d"]) | CPU) is None


def test_placeholders_of_vllm_change_nothing():
    """Without `self_describing_kv_events` an event of a chunk has its last block's name, and no tokens."""
    translator, chain = HashTranslator(SIZE), ours([1, 2, 3, 4])
    translated(translator, stored(["a", "b"], None, [1, 2, 3, 4]))
    assert translated(translator, stored(["b"], None, [], block_size=0) | CPU) is None
    assert translated(translator, removed(["b"]) | CPU) is None
    assert translated(translator, removed(["b"])) == BlocksRemoved(chain[1:])


def test_a_chunk_of_lmcache_is_several_blocks_under_one_name():
    translator, chain = HashTranslator(SIZE), ours([1, 2, 3, 4, 5, 6, 7, 8])
    assert translated(translator, stored([901], None, [1, 2, 3, 4], block_size=4) | CPU) == BlocksStored(
        chain[:2], None, "CPU"
    )
    assert translated(translator, stored([902], 901, [5, 6, 7, 8], block_size=4) | CPU) == BlocksStored(
        chain[2:], chain[1], "CPU"
    )
    assert translated(translator, removed([902, 901]) | CPU) == BlocksRemoved(chain[::-1], "CPU")


def test_a_block_that_moves_is_stored_there_before_it_is_removed_here():
    translator, chain = HashTranslator(SIZE), ours([1, 2, 3, 4])
    translator.stored([7, 8], None, [1, 2, 3, 4])
    assert translator.moved(8, "GPU", "CPU") == [
        BlocksStored(chain[1:], chain[0], "CPU"),
        BlocksRemoved(chain[1:], "GPU"),
    ]
    assert translator.moved(8, "GPU", "CPU") == []
    assert translator.removed([8]) is None


@pytest.mark.parametrize("event", [{}, [], 7, {"type": "Other"}, ["Other", []]])
def test_what_is_no_event_is_an_error(event):
    with pytest.raises(ValueError, match="KV event"):
        translated(HashTranslator(SIZE), event)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), max_size=40))
def test_what_was_stored_and_not_removed_is_what_routers_hold(steps):
    """An engine that keeps copies: each block by a name made of its path, stored and removed one by one."""
    translator, ledger, held = HashTranslator(SIZE), BlockLedger(), {}
    for seed, length, adds in steps:
        tokens = [(seed * 7 + place // 4) % 5 for place in range(length * SIZE)]
        paths = [tuple(tokens[: (place + 1) * SIZE]) for place in range(length)]
        if adds:
            known = [path for path in paths if held.get(path)]
            new = paths[len(known) :] or paths[-1:]  # the last again: a second copy
            parent = new[0][:-SIZE] or None
            if parent is not None and not held.get(parent):
                continue
            event = translated(translator, stored(new, parent, [token for path in new for token in path[-SIZE:]]))
            for path in new:
                held[path] = held.get(path, 0) + 1
        elif held.get(paths[-1]) and not any(
            count and path[: len(paths[-1])] == paths[-1] and path != paths[-1] for path, count in held.items()
        ):
            event = translated(translator, {"type": "BlockRemoved", "block_hashes": [paths[-1]], "medium": None})
            held[paths[-1]] -= 1
        else:
            continue
        if event is not None:
            ledger.apply(event)
    expected = {ours(path)[-1] for path, count in held.items() if count}
    assert {block for chain in ledger.dump() for block in chain.hashes} == expected


def test_a_gap_in_the_numbers_and_what_cannot_be_read_forget_what_was_known():
    async def main():
        readers = EventReaders(2)
        publisher = zmq.Context.instance().socket(zmq.XPUB)
        host, _, port = readers.endpoint.rpartition(":")
        publisher.connect(f"{host}:{int(port) + 1}")  # rank 1
        found = [[], []]
        readers.start(SIZE, [into.extend for into in found])
        await until_async(lambda: publisher.poll(0))  # the reader has subscribed

        def send(number, *events):
            publisher.send_multipart([b"", struct.pack(">q", number), msgspec.msgpack.encode([0.0, events, 1])])

        for rubbish in ([b"one part"], [b"", b"x" * 99, b"\xc1"], [b"", bytes(8), b"\x91" * 5000 + b"\x01"]):
            publisher.send_multipart(rubbish)
        send(0, stored([1], None, [1, 2]))
        send(1, stored([2], 1, [3, 4]))
        send(4, stored([3], 2, [5, 6]), stored([4], None, [7, 8]))
        await until_async(lambda: len(found[1]) >= 7)
        publisher.close(0)
        await readers.close()
        chain = ours([1, 2, 3, 4])
        assert found[0] == []
        while found[1][0] == BlocksCleared():  # for what could not be read
            del found[1][0]
        assert found[1] == [
            BlocksStored(chain[:1], None),
            BlocksStored(chain[1:], chain[0]),
            BlocksCleared(),
            BlocksStored(ours([7, 8]), None),
        ]

    uvloop.run(main())


def test_what_an_engine_sends_before_it_is_connected_is_no_loss():
    async def main():
        readers, found = EventReaders(1), []
        publisher = zmq.Context.instance().socket(zmq.XPUB)

        def send(number, *events):
            publisher.send_multipart([b"", struct.pack(">q", number), msgspec.msgpack.encode([0.0, events, 0])])

        send(0, {"type": "AllBlocksCleared"})
        publisher.connect(readers.endpoint)
        await readers.connected()
        readers.start(SIZE, [found.extend])
        await until_async(lambda: publisher.poll(0))  # its socket knows of the subscription
        send(1, stored([1], None, [1, 2]))
        await until_async(lambda: found)
        publisher.close(0)
        await readers.close()
        assert found == [BlocksStored(ours([1, 2]), None)]

    uvloop.run(main())


def test_the_engine_is_told_an_address_that_listens_to_nobody_else():
    async def main():
        readers = EventReaders(3)
        assert readers.endpoint.startswith("tcp://127.0.0.1:")
        await readers.close()

    uvloop.run(main())
