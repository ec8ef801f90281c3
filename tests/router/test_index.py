"""The index against a plain model: sets of blocks per worker, walked one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.blocks import PromptBlocks
from serving.router.index import PredictedIndex, PrefixIndex
from tests.support.examples import worth

AB = PromptBlocks.of(["a", "b"])


def path(branch, depth):
    """Ids of a tree: two children a node, chained."""
    return [(place, branch >> max(0, 8 - place)) for place in range(depth)]


def linear(held, ids, num_blocks):
    depth = 0
    while depth < num_blocks and ids[depth] in held:
        depth += 1
    return depth


operations = st.lists(
    st.tuples(st.sampled_from(["store", "remove", "drop"]), st.integers(0, 3), st.integers(0, 255), st.integers(1, 12)),
    max_size=60,
)


@settings(max_examples=worth(300))
@given(operations, st.integers(0, 255), st.integers(1, 12))
def test_galloping_finds_what_a_linear_walk_finds(happenings, branch, depth):
    index, model = PrefixIndex(), {worker: {} for worker in range(4)}
    for kind, worker, where, length in happenings:
        ids = path(where, length)
        held = model[worker]
        if kind == "store":
            have = linear(held, ids, length)
            index.store(worker, ids[have:], parent=ids[have - 1] if have else None)
            held.update(dict.fromkeys(ids[have:], 1))
        elif kind == "drop":
            index.drop(worker)
            held.clear()
        elif ids[-1] in held:
            index.remove(worker, [ids[-1]])
            # What hangs below a removed block cannot be used any more.
            for id in [id for id in held if id[0] >= length - 1 and below(id, ids[-1])]:
                del held[id]
    ids = path(branch, depth)
    expected = {worker: count for worker, held in model.items() if (count := linear(held, ids, depth))}
    assert index.overlaps(PromptBlocks.of(ids)) == expected


def below(id, ancestor):
    place, bits = id
    return bits >> max(0, min(place, 8) - min(ancestor[0], 8)) == ancestor[1]


def test_a_block_held_twice_is_forgotten_with_its_last_copy():
    index = PrefixIndex()
    index.store(0, ["a", "b"])
    index.store(0, ["b"], parent="a")
    index.remove(0, ["b"])
    assert index.overlaps(AB) == {0: 2}
    index.remove(0, ["b"])
    assert index.overlaps(AB) == {0: 1}


@settings(max_examples=worth(300))
@given(operations, st.randoms(use_true_random=False))
def test_blocks_evicted_together_in_any_order_leave_what_evicting_them_one_by_one_leaves(happenings, rng):
    together, one_by_one = PrefixIndex(), PrefixIndex()
    for kind, worker, where, length in happenings:
        ids = path(where, length)
        if kind == "store":
            start = rng.randrange(length)  # some are there already: they count as copies
            for index in (together, one_by_one):
                index.store(worker, ids[start:], parent=ids[start - 1] if start else None)
        elif kind == "drop":
            together.drop(worker)
            one_by_one.drop(worker)
        else:
            gone = ids[::-1] if rng.random() < 0.5 else rng.sample(ids, rng.randint(1, length))
            together.evict(worker, gone)
            for id in gone:
                one_by_one.evict(worker, [id])
        assert together.overlaps(PromptBlocks.of(ids)) == one_by_one.overlaps(PromptBlocks.of(ids))
        assert len(together) == len(one_by_one)


def test_a_run_is_split_where_a_prompt_leaves_it_and_everyone_keeps_what_they_have():
    index = PrefixIndex()
    index.store(0, ["a", "b", "c", "d"])
    index.store(1, ["a", "b", "c"])
    index.store(2, ["a", "b"])
    index.store(2, ["x"], parent="b")
    assert index.overlaps(PromptBlocks.of(["a", "b", "c", "d"])) == {0: 4, 1: 3, 2: 2}
    assert index.overlaps(PromptBlocks.of(["a", "b", "x", "y"])) == {0: 2, 1: 2, 2: 3}
    index.remove(0, ["c", "d"])
    assert index.overlaps(PromptBlocks.of(["a", "b", "c", "d"])) == {0: 2, 1: 3, 2: 2}


def test_an_id_that_is_reported_with_another_prefix_is_ignored_and_harms_nobody():
    index = PrefixIndex()
    index.store(0, ["a", "b"])
    index.store(1, ["x"])
    index.store(1, ["b", "c"], parent="x")
    assert index.overlaps(PromptBlocks.of(["a", "b"])) == {0: 2}
    assert index.overlaps(PromptBlocks.of(["x", "b", "c"])) == {1: 1}
    for slot in (0, 1):
        index.drop(slot)
    assert len(index) == 0


def test_a_store_behind_an_unknown_parent_asks_for_a_resync():
    index = PrefixIndex()
    assert not index.store(3, ["b"], parent="a")
    assert index.resync == {3}
    assert index.overlaps(AB) == {}


def test_ids_of_several_blocks_count_blocks():
    index, prompt = PrefixIndex(), PromptBlocks(["a", "b"], 8, 4)
    index.store_blocks(0, ["a", "b"], 0, 6, 4)
    assert index.overlaps(prompt) == {0: 6}
    index.store_blocks(0, ["a", "b"], 6, 8, 4)
    assert index.overlaps(prompt) == {0: 8}
    index.remove_blocks(0, ["a", "b"], 3, 8, 4)
    assert index.overlaps(prompt) == {0: 3}


def test_blocks_inside_an_id_need_those_before_them():
    index = PrefixIndex()
    index.store_blocks(0, ["a", "b"], 0, 2, 4)
    assert not index.store_blocks(0, ["a", "b"], 3, 8, 4)
    assert index.resync == {0}
    assert index.overlaps(PromptBlocks(["a", "b"], 8, 4)) == {0: 2}


@settings(max_examples=worth(300))
@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove"]), st.integers(0, 2), st.integers(0, 12), st.integers(0, 12)),
        max_size=30,
    ),
    st.booleans(),
)
def test_an_id_of_four_blocks_counts_as_four_ids_of_one(happenings, closed_events):
    one, four = (PrefixIndex(closed_events=closed_events) for _ in range(2))
    ids, blocks = ["a", "b", "c"], [(id, place) for id in "abc" for place in range(4)]
    for kind, worker, start, stop in happenings:
        held = one.overlaps(PromptBlocks.of(blocks)).get(worker, 0)
        if start >= stop or (kind == "remove" and stop != held):
            continue  # events remove what is there, last block first
        if closed_events and kind == "store" and start < held:
            continue  # a second copy of a block could be left without those before it
        if kind == "store":
            before = blocks[start - 1] if start else None
            assert one.store(worker, blocks[start:stop], before) == four.store_blocks(worker, ids, start, stop, 4)
        else:
            one.remove(worker, blocks[start:stop])
            four.remove_blocks(worker, ids, start, stop, 4)
        assert one.overlaps(PromptBlocks.of(blocks)) == four.overlaps(PromptBlocks(ids, 12, 4))
    assert one.resync == four.resync


def test_an_empty_index_keeps_nothing():
    index = PrefixIndex()
    index.store(0, ["a", "b", "c"])
    for id in ("c", "b", "a"):
        index.remove(0, [id])
    assert len(index) == 0
    assert not any(index._roots.values())


def test_a_predicted_prompt_expires():
    index = PredictedIndex(ttl_s=120)
    index.routed(1, AB, now=0.0)
    index.routed(1, PromptBlocks.of(["a"]), now=60.0)
    assert index.overlaps(AB, now=119.0) == {1: 2}
    assert index.overlaps(AB, now=121.0) == {1: 1}
    assert index.overlaps(AB, now=180.0) == {}
    assert len(index) == 0
