"""The index against a plain model: sets of blocks per worker, walked one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router.index import PredictedIndex, PrefixIndex


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


@settings(max_examples=300, deadline=None)
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
    assert index.overlaps(ids, depth) == expected


def below(id, ancestor):
    place, bits = id
    return bits >> max(0, min(place, 8) - min(ancestor[0], 8)) == ancestor[1]


def test_a_block_held_twice_is_forgotten_with_its_last_copy():
    index = PrefixIndex()
    index.store(0, ["a", "b"])
    index.store(0, ["b"], parent="a")
    index.remove(0, ["b"])
    assert index.overlaps(["a", "b"], 2) == {0: 2}
    index.remove(0, ["b"])
    assert index.overlaps(["a", "b"], 2) == {0: 1}


def test_a_store_behind_an_unknown_parent_asks_for_a_resync():
    index = PrefixIndex()
    assert not index.store(3, ["b"], parent="a")
    assert index.resync == {3}
    assert index.overlaps(["a", "b"], 2) == {}


def test_ids_of_several_blocks_count_blocks():
    index = PrefixIndex()
    index.store(0, ["a", "b"], stop=6, blocks_per_id=4)
    assert index.overlaps(["a", "b"], 8, 4) == {0: 6}
    index.store(0, ["a", "b"], start=6, stop=8, blocks_per_id=4)
    assert index.overlaps(["a", "b"], 8, 4) == {0: 8}
    index.remove(0, ["a", "b"], start=3, stop=8, blocks_per_id=4)
    assert index.overlaps(["a", "b"], 8, 4) == {0: 3}


def test_an_empty_index_keeps_nothing():
    index = PrefixIndex()
    index.store(0, ["a", "b", "c"])
    for id in ("c", "b", "a"):
        index.remove(0, [id])
    assert len(index) == 0
    assert not index._children
    assert not index._parents


def test_a_predicted_prompt_expires():
    index = PredictedIndex(ttl_s=120)
    index.routed(1, ["a", "b"], 2, 1, now=0.0)
    index.routed(1, ["a"], 1, 1, now=60.0)
    assert index.overlaps(["a", "b"], 2, 1, now=119.0) == {1: 2}
    assert index.overlaps(["a", "b"], 2, 1, now=121.0) == {1: 1}
    assert index.overlaps(["a", "b"], 2, 1, now=180.0) == {}
    assert len(index) == 0
