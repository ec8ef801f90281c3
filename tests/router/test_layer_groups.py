"""What layers that keep only a part of a prompt leave of a rank's hits, as routers know it: in blocks of 4 tokens."""

import contextlib
import itertools
import random

import numpy as np
import pytest

from mocker import BlockChain, EngineConfig, Sequence
from mocker.events import GroupRemoved
from mocker.models.kv_groups import LayerKv, layout_of
from mocker.vllm.core import VllmCore
from serving.engines.block_hashes import HashTranslator
from serving.engines.mock.events import router_events
from serving.router.blocks import PromptBlocks
from serving.router.events import BlocksCleared, BlocksRemoved, BlocksStored, LayerGroup
from serving.router.follower import KvFollower
from serving.router.hashing import block_hashes, sequence_hashes
from serving.router.index import PrefixIndex
from serving.worker.kv_events import BlockLedger, decode_kv_event, encode_kv_event

SIZE = 4
FULL, STATE = LayerKv(4.0), LayerKv(0.0, state=16.0)
WINDOW, CHUNK = LayerKv(4.0, window=11), LayerKv(4.0, window=16, is_chunked=True)
KINDS = (
    [FULL, WINDOW],
    [FULL, STATE],
    [FULL, CHUNK],
    [WINDOW],
    [STATE],
    [FULL, WINDOW, WINDOW, STATE],
    [CHUNK, WINDOW],
)


def engine(layers, block_size=SIZE, num_blocks=80):
    config = EngineConfig(block_size=SIZE, max_model_len=400, max_num_batched_tokens=64, max_num_seqs=4)
    core = VllmCore(config, num_blocks, None, layout_of(layers, block_size))
    core.pool.has_listener = True
    return core


def prompts(rng):
    """Yield prompts that share starts: the names of their blocks, each of all before it."""
    known = [()]
    while True:
        start = rng.choice(known)
        names = start[: rng.randint(0, len(start))] if start else ()
        while len(names) < rng.randint(4, 14):
            names = (*names, hash((names, rng.random())))
        known = [*known[-7:], names]
        yield names


def sequence(names, output):
    answer = [hash((names, place)) for place in range(output // SIZE + 2)]
    return Sequence(
        str(names), num_prompt=len(names) * SIZE + 1, max_tokens=output, chain=BlockChain([*names, *answer])
    )


def run(core, each):
    core.add(each)
    while (batch := core.schedule()) is not None:
        core.update(batch)


@pytest.mark.parametrize(
    ("layers", "block_size"), [*itertools.product(KINDS, [SIZE, 2 * SIZE]), ([FULL, STATE], 6), ([FULL, WINDOW], 6)]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_router_knows_with_how_much_of_a_prompt_every_kind_of_layer_can_start(layers, block_size, seed):
    rng, core, index, ledger = random.Random(seed), engine(layers, block_size), PrefixIndex(), BlockLedger()
    follower, ends = KvFollower(index), 0
    for number, names in zip(range(150), prompts(rng), strict=False):
        hit = core.blocks.cache.find(sequence(names, 1)).length
        assert index.starts(PromptBlocks.of(names)).get(0, 0) == hit // SIZE
        ends += bool(hit)
        run(core, sequence(names, rng.choice([1, 1, 30])))
        events = list(router_events(core.pool.events))
        core.pool.events.clear()
        for event in events:
            ledger.apply(event)
        travelled = [decode_kv_event(part) for event in events for part in encode_kv_event(event)]
        assert not follower.on_events(0, 1, number, travelled)
    assert ends > 10
    repaired = PrefixIndex()
    KvFollower(repaired).on_snapshot(0, 1, 150, ledger.dump())
    for names, _ in zip(prompts(random.Random(seed)), range(150), strict=False):
        assert repaired.starts(PromptBlocks.of(names)) == index.starts(PromptBlocks.of(names))


def message(event):
    """Return an event of the engine as vLLM sends it; blocks are named by their tokens."""
    chain, group = event.chain, event.group
    name = {"group_idx": group.number, "medium": "GPU"}
    if isinstance(event, GroupRemoved):
        return {"type": "BlockRemoved", "block_hashes": event.keys(), **name}
    return {
        "type": "BlockStored",
        "block_hashes": event.keys(),
        "parent_block_hash": group.name(chain, event.start) if event.start else None,
        "token_ids": group.name(chain, event.stop)[event.start :],
        "block_size": event.size,
        "kv_cache_spec_kind": group.kind,
        "kv_cache_spec_sliding_window": group.window or None,
        **name,
    }


@pytest.mark.parametrize("layers", [[FULL, WINDOW], [FULL, STATE], [STATE, FULL], [WINDOW, FULL, FULL, STATE]])
@pytest.mark.parametrize("seed", range(3))
def test_a_router_knows_the_same_by_the_messages_of_vllm(layers, seed):
    rng, core, index = random.Random(seed), engine(layers), PrefixIndex()
    follower, translator, ends = KvFollower(index), HashTranslator(SIZE), 0

    def tokens_of(names):
        return [random.Random(name).randrange(1000) for name in names for _ in range(SIZE)]

    for number, names in zip(range(150), prompts(rng), strict=False):
        tokens = tokens_of(names) + [random.Random(hash(names)).randrange(1000) for _ in range(40)]
        chain = BlockChain([tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)])
        one = Sequence(str(names), num_prompt=len(names) * SIZE + 1, max_tokens=rng.choice([1, 30]), chain=chain)
        hit, ours = (
            core.blocks.cache.find(one).length,
            sequence_hashes(block_hashes(np.array(tokens[: len(names) * SIZE], np.uint32), SIZE)),
        )
        assert index.starts(PromptBlocks.of(ours)).get(0, 0) == hit // SIZE
        ends += bool(hit)
        run(core, one)
        follower.on_events(0, 1, number, translator.translate(list(map(message, core.pool.events))))
        core.pool.events.clear()
    assert ends > 10


@pytest.mark.parametrize(
    ("layers", "first"),
    [
        (LayerGroup(1, 4, 4, 9, 0), {0: 0, 8: 0, 12: 4, 20: 12}),  # a window of 9: the 8 tokens before
        (LayerGroup(1, 4, 8, 9, 0), {8: 0, 16: 8, 24: 16}),
        (LayerGroup(1, 4, 4, 0, 16), {12: 0, 16: 16, 20: 16, 36: 32}),  # chunks of 16
        (LayerGroup(1, 4, 8, 0, 0), {8: 0, 16: 8, 24: 16}),  # the last state
    ],
)
def test_what_layers_need_to_go_on_begins_where_they_see(layers, first):
    assert {tokens: layers.first_needed(tokens) for tokens in first} == first


def test_a_block_that_was_stored_twice_is_there_until_both_are_gone():
    index, group = PrefixIndex(), LayerGroup(1, SIZE, SIZE, 0, 0)
    apply = KvFollower(index).on_events
    blocks = PromptBlocks.of([1, 2, 3])
    apply(0, 1, 0, [BlocksStored([1, 2, 3], None), *[BlocksStored([2], None, group=group)] * 2])
    assert index.starts(blocks) == {0: 2}
    apply(0, 1, 1, [BlocksRemoved([2], group=1)])
    assert index.starts(blocks) == {0: 2}
    apply(0, 1, 2, [BlocksRemoved([2, 9], group=1), BlocksRemoved([2], group=7)])
    assert index.starts(blocks) == {}
    apply(0, 1, 3, [BlocksStored([2], None, group=group), BlocksCleared("GPU")])
    assert index.starts(blocks) == {}


def test_a_rank_without_such_layers_has_all_that_is_cached():
    index = PrefixIndex()
    index.store(0, [1, 2, 3])
    index.store(1, [1, 2])
    index.layer_groups.store(1, LayerGroup(1, SIZE, SIZE, 0, 0), [1])
    assert index.starts(PromptBlocks.of([1, 2, 3])) == {0: 3, 1: 1}
    index.drop(1)
    assert index.starts(PromptBlocks.of([1, 2, 3])) == {0: 3}


@pytest.mark.parametrize("group", [[1, 4, 4, 0], [1, 0, 4, 0, 0], [1, 8, 4, 0, 0], [999, 4, 4, 0, 0], [-1, 4, 4, 0, 0]])
def test_a_group_that_cannot_be_is_refused(group):
    with pytest.raises(ValueError, match="not a group of layers"):
        decode_kv_event([None, [1], group])


@pytest.mark.parametrize("number", [-1, 256, 1 << 50])
def test_a_number_that_no_group_has_is_refused(number):
    with pytest.raises(ValueError, match="not a KV event"):
        decode_kv_event([[1], number])


@pytest.mark.parametrize(
    "change", [{"group_idx": 300}, {"group_idx": "x"}, {"kv_cache_spec_sliding_window": -1}, {"block_size": -4}]
)
def test_what_an_engine_says_of_impossible_layers_never_reaches_a_router(change):
    event = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1] * SIZE,
        "block_size": SIZE,
    }
    event |= {
        "medium": "GPU",
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 9,
    } | change
    translated = []
    with contextlib.suppress(ValueError, TypeError):  # the reader of events ignores the message then
        translated = HashTranslator(SIZE).translate([event])
    assert not translated


def test_what_is_said_of_a_group_last_holds_and_the_others_stay():
    index, blocks = PrefixIndex(), PromptBlocks.of([1, 2, 3])
    groups = index.layer_groups
    index.store(0, [1, 2, 3])
    for number in (1, 2):
        groups.store(0, LayerGroup(number, SIZE, SIZE, 0, 0), [3])
    groups.store(0, LayerGroup(2, SIZE, SIZE, 7, 0), [9])
    assert index.starts(blocks) == {}  # the window of 7 has nothing of it
    groups.store(0, LayerGroup(2, SIZE, SIZE, 0, 0), [3])
    assert index.starts(blocks) == {0: 3}
    groups.store(0, LayerGroup(1, 1, 1, 0, 0), [1])  # other units: what was said before is of another engine
    assert index.starts(PromptBlocks.of([1, 2, 3])) == {0: 1}
