"""What the scheduler refuses, and whom it prefers where vLLM's rule leaves that open."""

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve


def made(**settings):
    config = EngineConfig(**settings)
    return new_engine(config, resolve(config).timing, num_blocks=config.num_gpu_blocks)


def sequence(id, prompt, output, **more):
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain([], 0), **more)


def finished(engine):
    ended, now = [], 0.0
    while (step := engine.schedule(now)) is not None:
        now = step.end
        ended += [one.id for one in engine.complete().finished]
        assert len(engine.log.rows) < 100_000, "they keep preempting each other"
    return ended


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_requests_that_arrive_together_do_not_keep_preempting_each_other(async_scheduling):
    engine = made(
        block_size=1,
        num_gpu_blocks=40,
        max_num_seqs=2,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        long_prefill_token_threshold=7,
        async_scheduling=async_scheduling,
    )
    for id in range(6):
        engine.add(sequence(id, 20, 12))
    assert sorted(finished(engine)) == list(range(6))


def test_a_prompt_longer_than_the_budget_is_refused_where_it_cannot_be_cut():
    engine = made(
        block_size=16, num_gpu_blocks=400, max_num_batched_tokens=64, max_num_seqs=4, enable_chunked_prefill=False
    )
    with pytest.raises(ValueError, match=r"prompt of 100 tokens.*at most max_num_batched_tokens \(64\)"):
        engine.add(sequence("long", 100, 5))
    engine.add(sequence("short", 64, 5))
    assert finished(engine) == ["short"]


def test_the_limit_on_active_sequences_does_not_raise_the_other():
    engine = made(block_size=16, num_gpu_blocks=400, max_num_seqs=1, max_num_active_seqs=5)
    for id in range(3):
        engine.add(sequence(id, 20, 5))
    step = engine.schedule(0.0)
    assert [one.id for one, _ in step.batch.chunks] == [0]
