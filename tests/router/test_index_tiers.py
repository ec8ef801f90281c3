"""What is known beyond the GPU, against a plain model: a set of blocks for each worker and tier, walked one by one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.router import Prompt, PromptBlocks, Router, RouterConfig
from serving.router.index import PrefixIndex
from tests.support.examples import worth

MEDIA = ("CPU", "STORAGE", "SHARED")
WORKERS = range(3)
IDS = {"first": ["a", "b", "c"], "second": ["a", "b", "x"], "third": ["p", "q", "r"]}


def blocks_of(ids, per_id):
    return [(id, place) for id in ids for place in range(per_id)]


def plain_walk(model, chain, start, worker):
    """Count by tier what continues at block `start`, each block in the nearest tier that has it."""
    counts = dict.fromkeys(MEDIA, 0)
    for block in chain[start:]:
        for medium in MEDIA:
            if block in model[medium, 0 if medium == "SHARED" else worker]:
                counts[medium] += 1
                break
        else:
            break
    return tuple(counts.values())


changes = st.tuples(
    st.sampled_from(["store", "store", "store", "remove", "remove", "drop"]),
    st.sampled_from(["GPU", *MEDIA]),
    st.sampled_from(WORKERS),
    st.sampled_from(list(IDS)),
    st.integers(0, 12),
    st.integers(0, 12),
)


@settings(max_examples=worth(500))
@given(st.lists(changes, max_size=40), st.sampled_from([1, 4]), st.sampled_from(list(IDS)), st.integers(1, 12))
def test_a_run_beyond_the_gpu_is_what_a_walk_block_by_block_finds(happenings, per_id, asked, num_blocks):
    index = PrefixIndex()
    model = {(medium, worker): set() for medium in MEDIA for worker in WORKERS}
    for kind, medium, worker, name, start, stop in happenings:
        ids = IDS[name]
        chain = blocks_of(ids, per_id)
        stop = min(stop, len(chain))
        held = model.get((medium, 0 if medium == "SHARED" else worker))
        if kind == "drop":
            index.drop(worker)
            for other in ("CPU", "STORAGE"):
                model[other, worker].clear()
        elif start >= stop:
            continue
        elif medium == "GPU":  # blocks come behind those that are there, and go from the last
            num_held = index.overlaps(PromptBlocks(ids, len(chain), per_id)).get(worker, 0)
            if kind == "store":
                index.store_blocks(worker, ids, min(start, num_held), stop, per_id)
            elif stop == num_held:
                index.remove_blocks(worker, ids, start, stop, per_id)
        elif kind == "store":
            index.tiers.store(worker, medium, ids, start, stop, per_id)
            held.update(chain[start:stop])
        else:
            index.tiers.remove(worker, medium, ids, start, stop, per_id)
            held.difference_update(chain[start:stop])
    chain = blocks_of(IDS[asked], per_id)[:num_blocks]
    prompt = PromptBlocks(IDS[asked], len(chain), per_id)
    on_gpu = index.overlaps(prompt)
    runs = index.tiers.runs(prompt, on_gpu, list(WORKERS))
    expected = {worker: plain_walk(model, chain, on_gpu.get(worker, 0), worker) for worker in WORKERS}
    assert runs == {worker: counts for worker, counts in expected.items() if any(counts)}
    assert index.tiers.is_empty is not any(model[medium, worker] for medium in MEDIA for worker in WORKERS)


def runs(index, ids, *workers):
    prompt = PromptBlocks.of(ids)
    return index.tiers.runs(prompt, index.overlaps(prompt), list(workers))


def test_a_block_in_several_tiers_counts_once_in_the_nearest():
    index = PrefixIndex()
    index.store(0, ["a"])
    index.tiers.store(0, "CPU", ["a", "b"], 0, 2, 1)
    index.tiers.store(0, "STORAGE", ["a", "b", "c"], 0, 3, 1)
    assert runs(index, ["a", "b", "c", "d"], 0) == {0: (1, 1, 0)}


def test_a_block_that_leaves_the_gpu_is_still_known_in_host_memory():
    index = PrefixIndex()
    index.store(0, ["a", "b"])
    index.tiers.store(0, "CPU", ["a", "b"], 0, 2, 1)
    index.remove(0, ["a", "b"])
    assert index.overlaps(PromptBlocks.of(["a", "b"])) == {}
    assert runs(index, ["a", "b"], 0) == {0: (2, 0, 0)}


def test_a_chunk_that_is_missing_ends_the_run_and_another_tier_bridges_it():
    index = PrefixIndex()
    index.tiers.store(0, "CPU", ["a", "b", "c", "d"], 0, 4, 1)
    index.tiers.remove(0, "CPU", ["a", "b", "c", "d"], 1, 2, 1)
    assert runs(index, ["a", "b", "c", "d"], 0) == {0: (1, 0, 0)}
    index.tiers.store(0, "STORAGE", ["b"], 0, 1, 1)
    assert runs(index, ["a", "b", "c", "d"], 0) == {0: (3, 1, 0)}


def test_what_one_worker_writes_to_the_shared_store_every_worker_can_fetch():
    index = PrefixIndex()
    index.store(1, ["a"])
    index.tiers.store(0, "SHARED", ["a", "b"], 0, 2, 1)
    assert runs(index, ["a", "b"], 0, 1, 9) == {0: (0, 0, 2), 1: (0, 0, 1), 9: (0, 0, 2)}
    index.drop(0)
    assert runs(index, ["a", "b"], 1) == {1: (0, 0, 1)}
    index.tiers.remove(9, "SHARED", ["b"], 0, 1, 1)
    assert runs(index, ["a", "b"], 0, 1) == {0: (0, 0, 1)}


def router(mode="jspt", **values):
    core = Router(mode, RouterConfig(**values), block_size=4, rng=random.Random(1))
    for worker in range(2):
        core.add_rank(worker)
    core.index.store(0, ["a"])
    core.index.tiers.store(0, "CPU", ["a", "b", "c"], 0, 3, 1)
    return core


PROMPT = Prompt(18, PromptBlocks.of(("a", "b", "c", "d")))


def test_what_a_router_expects_there_is_what_need_not_be_computed():
    core = router()
    decision = core.pick("r", PROMPT, now=0.0)
    assert (decision.slot, decision.overlap_blocks, decision.gpu_blocks) == (0, 3, 1)
    assert decision.scored.found_blocks == [3, 0]
    assert core.load(0).prefill_tokens == decision.prefill_tokens == 18 - 3 * 4


def test_a_mode_that_counts_hits_in_part_books_them_in_part():
    core = router("kv")
    decision = core.pick("r", PROMPT, now=0.0)
    assert decision.costs == [4.5 - 1 - 0.75 * 2 + 5, 4.5 + 5]
    assert core.load(0).prefill_tokens == 18 - 4 - 6
    core.on_finish("r")
    assert core.load(0).prefill_tokens == 0


def test_a_shared_store_draws_a_request_to_no_worker():
    core = router()
    core.index.drop(0)
    core.index.tiers.store(0, "SHARED", ["a", "b", "c"], 0, 3, 1)
    decision = core.pick("r", PROMPT, now=0.0)
    assert decision.scored.found_blocks == [3, 3]
    assert decision.costs[0] == decision.costs[1]


@pytest.mark.parametrize("load_us", [0.0, 100.0])
def test_a_hit_costs_the_time_to_fetch_it(load_us):
    decision = router(host_load_us_per_token=load_us).peek(PROMPT, now=0.0)
    there = 0.0222 + 6 * 1.86e-5 + 8 * load_us / 1e6
    assert decision.costs == pytest.approx([there, 0.0222 + 18 * 1.86e-5])
    assert decision.slot == (1 if load_us else 0)


def test_a_worker_that_leaves_takes_its_host_memory_with_it():
    core = router()
    core.remove_rank(0)
    core.add_rank(0)
    assert core.pick("r", PROMPT, now=0.0).scored.found_blocks == [0, 0]
