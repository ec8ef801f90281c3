"""Which look-ups in the prefix cache count."""

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve


def made(**settings):
    config = EngineConfig(**({"block_size": 4, "num_gpu_blocks": 40} | settings))
    return new_engine(config, resolve(config).timing, num_blocks=config.num_gpu_blocks)


def added(engine, id, ids, *, output=2, reads_cache=True):
    """Add a sequence with a full block for each of `ids`, and one more token."""
    one = Sequence(id, num_prompt=4 * len(ids) + 1, max_tokens=output, chain=BlockChain(ids))
    one.reads_cache = reads_cache
    engine.add(one)
    return one


def run(engine, now=0.0):
    while (step := engine.schedule(now)) is not None:
        now = step.end
        engine.complete()


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_prompt_counts_once_and_with_what_was_found(async_scheduling):
    engine = made(async_scheduling=async_scheduling)
    for id in range(2):
        added(engine, id, [1, 2, 3])
        run(engine)
    found = engine.prefix_cache_stats
    assert (found.num_prompts, found.num_tokens, found.num_hits, found.num_external) == (2, 26, 12, 0)


def test_a_sequence_that_waits_counts_only_when_it_gets_its_blocks():
    engine = made(num_gpu_blocks=6, scheduler_reserve_full_isl=True)  # 5 of them hold tokens
    added(engine, "first", [1, 2, 3], output=4)
    added(engine, "second", [4, 5, 6], output=4)
    step = engine.schedule(0.0)
    assert engine.prefix_cache_stats.num_tokens == 13
    engine.complete()
    run(engine, step.end)
    assert engine.prefix_cache_stats.num_tokens == 26


def test_a_preempted_sequence_does_not_count_again():
    engine = made(num_gpu_blocks=10)
    sequences = [added(engine, id, [id * 10 + 1, id * 10 + 2], output=16) for id in range(2)]
    run(engine)
    assert sum(one.num_preemptions for one in sequences) > 0
    assert engine.prefix_cache_stats.num_tokens == 18


def test_a_sequence_that_does_not_read_the_cache_computes_its_whole_prompt_for_others():
    engine = made()
    added(engine, "before", [1, 2, 3])
    run(engine)
    alone = added(engine, "alone", [1, 2, 3], reads_cache=False)
    run(engine)
    after = added(engine, "after", [1, 2, 3])
    run(engine)
    found = engine.prefix_cache_stats
    assert (alone.cached_tokens, after.cached_tokens) == (0, 12)
    assert (found.num_tokens, found.num_hits, found.num_unasked) == (26, 12, 13)
