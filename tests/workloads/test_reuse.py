"""What a cache of some size could find, at most."""

import itertools
import random

import numpy as np
import pytest

from workloads import Request, Workload
from workloads.describe import best_shares, describe_workload
from workloads.reuse import reuse_of


def workload_of(prompts, *, block_size=4, lengths=None):
    """Make a workload of prompts given as block ids."""
    lengths = lengths or [len(ids) * block_size for ids in prompts]
    rows = [
        Request(float(n), length, 1, tuple(ids)) for n, (ids, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return Workload("w", block_size, rows)


def drawn(seed, *, count, depth):
    """Draw prompts that share prefixes; ids are chained."""
    rng, fresh, prompts = random.Random(seed), itertools.count(), []
    for _ in range(count):
        before = rng.choice([(), *prompts])
        shared = before[: rng.randint(0, len(before))]
        prompts.append(shared + tuple(next(fresh) for _ in range(rng.randint(not shared, depth - len(shared)))))
    return prompts


def test_the_block_that_is_needed_again_last_gives_way():
    reuse = reuse_of(workload_of([(1,), (2,), (3,), (1,), (2,), (3,)]))
    # Room for two: 1 stays beside 2 and 3; then 2 and 3 would be needed, and only one of them can have stayed.
    assert reuse.best_hits(2).tolist() == [0, 0, 0, 4, 0, 4]
    assert reuse.best_hits(3).tolist() == [0, 0, 0, 4, 4, 4]
    assert reuse.best_hits(1).sum() == 0


def test_a_prompt_that_runs_takes_the_room_of_others():
    reuse = reuse_of(workload_of([(1, 2), (3, 4, 5), (1, 2)]))
    assert [int(reuse.best_hits(size)[2]) for size in (3, 4, 5)] == [0, 4, 8]


def test_what_begins_a_prompt_stays_longest():
    reuse = reuse_of(workload_of([(1, 2, 3), (9,), (1, 2, 3)]))
    assert reuse.best_hits(3).tolist() == [0, 0, 8]


def test_only_hits_that_count_are_worth_room():
    reuse = reuse_of(workload_of([(1,), (2,), (1,), (2,)]))
    assert reuse.best_hits(1).sum() == 0
    assert reuse.best_hits(2, np.array([True, True, True, False])).tolist() == [0, 0, 4, 0]
    reuse = reuse_of(workload_of([(1,), (2,), (3,), (1,), (2,)]))
    assert reuse.best_hits(2).tolist() == [0, 0, 0, 4, 0]
    assert reuse.best_hits(2, np.array([True, True, True, False, True])).tolist() == [0, 0, 0, 0, 4]


def best_by_trial(prompts, capacity):
    """Try everything that a prefix cache could keep; return the most blocks found."""
    states = {frozenset(): 0}
    for prompt in prompts:
        after = {}
        for held, found in states.items():
            found += next((place for place, id in enumerate(prompt) if id not in held), len(prompt))
            others = sorted(held - set(prompt))
            for count in range(min(len(others), capacity - len(prompt)) + 1):
                for kept in itertools.combinations(others, count):
                    state = frozenset((*kept, *prompt))
                    after[state] = max(after.get(state, 0), found)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(60))
def test_no_way_to_keep_blocks_finds_more_or_less(seed):
    prompts = drawn(seed, count=7, depth=3)
    reuse = reuse_of(workload_of(prompts))
    for capacity in range(max(map(len, prompts)), 10):
        assert reuse.best_hits(capacity).sum() == 4 * best_by_trial(prompts, capacity), (
            f"seed {seed}, {capacity} blocks"
        )


@pytest.mark.parametrize("seed", range(20))
def test_more_room_never_finds_less_and_enough_finds_all(seed):
    reuse = reuse_of(workload_of(drawn(seed, count=200, depth=8)))
    found = [int(reuse.best_hits(size).sum()) for size in range(8, 400, 7)]
    assert found == sorted(found)
    assert reuse.best_hits(10_000).tolist() == reuse.endless_hits().tolist()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(20))
def test_an_unlimited_cache_holds_all_full_blocks_of_its_own_size(seed, size):
    rng, prompts = random.Random(seed), drawn(seed, count=60, depth=6)
    lengths = [4 * len(ids) - rng.randint(0, 3) for ids in prompts]
    seen, expected = set(), []
    for ids, length in zip(prompts, lengths, strict=True):
        blocks = [
            (ids[(stop - 1) // 4], stop) for stop in range(size, length + 1, size)
        ]  # an id, and where the block ends
        expected.append(size * next((n for n, block in enumerate(blocks) if block not in seen), len(blocks)))
        seen.update(blocks)
    assert reuse_of(workload_of(prompts, lengths=lengths), size).endless_hits().tolist() == expected


def test_a_workload_without_full_blocks_has_no_hits():
    reuse = reuse_of(workload_of([(1,), (1,)], lengths=[3, 3]))
    assert reuse.best_hits(5).tolist() == reuse.endless_hits().tolist() == [0, 0]


def test_shares_by_size_go_from_a_cache_that_holds_every_prompt_to_one_that_loses_nothing():
    prompts = [tuple(range(100 * n, 100 * n + 40)) for n in range(8)] * 2
    workload = workload_of(prompts, block_size=1024)
    shares = best_shares(workload)
    # 64 blocks hold one prompt and 24 blocks of another: those stay until that one comes again, and so on.
    assert list(shares) == [1 << 16, 1 << 18, 1 << 20]
    assert (
        0
        < shares[1 << 16]
        < shares[1 << 18]
        < shares[1 << 20]
        == describe_workload(workload).endless_cache_hit_share
        == 0.5
    )


def test_where_it_is_unknown_what_prompts_share_so_are_the_shares():
    assert best_shares(Workload("w", 4, [Request(0.0, 8, 1, (1, 2))], knows_prefixes=False)) is None
