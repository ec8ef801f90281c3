"""An engine whose model is cut into stages: batches overlap, and each sequence waits for its own token."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from tests.mocker.vllm.test_leap import configs, make, timings, workloads
from tests.support.examples import worth

STEPS = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=125.0)


def engine(*stage_shares, is_async=False, budget=64):
    config = EngineConfig(
        block_size=16, num_gpu_blocks=40, max_num_batched_tokens=budget, max_num_seqs=8, async_scheduling=is_async
    )
    return new_engine(config, resolve(config, STEPS).timing, num_blocks=40, stage_shares=stage_shares)


def sequence(id, prompt, output):
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain([], 0))


def tokens_of(made, arrivals=()):
    """Return when the tokens of each request come, one for each time; requests arrive at their times."""
    arrivals, found, now = deque(arrivals), {}, 0.0
    while True:
        while arrivals and arrivals[0][0] <= now:
            made.add(arrivals.popleft()[1])
        if made.schedule(now) is None:
            if not arrivals:
                return found
            now = arrivals[0][0]
            continue
        while arrivals and arrivals[0][0] < made.step.end:
            made.add(arrivals.popleft()[1])
        output = made.complete()
        now = output.end
        for one in output.sampled:
            found.setdefault(one.id, []).append(now)
        for one, count in output.emitted:
            found[one.id] += [now] * count


@pytest.mark.parametrize("is_async", [False, True])
def test_alone_a_request_passes_all_stages_for_each_token(is_async):
    made = engine(0.5, 0.25, 0.25, is_async=is_async)
    made.add(sequence("a", 20, 4))
    assert tokens_of(made) == {"a": [1.0, 1.125, 1.25, 1.375]}
    assert made.is_idle


def test_two_requests_are_in_different_stages_at_a_time():
    made = engine(0.5, 0.5, budget=20)
    for id in "ab":
        made.add(sequence(id, 20, 3))
    # Each decode takes 0.0625 s in either stage. The second stage is busy with b's prompt until 1.5 s.
    assert tokens_of(made) == {"a": [1.0, 1.5625, 1.6875], "b": [1.5, 1.625, 1.75]}


def test_the_chunks_of_a_prompt_follow_each_other_through_the_stages():
    made = engine(0.5, 0.5)
    made.add(sequence("a", 128, 1))
    assert tokens_of(made) == {"a": [1.5]}


def test_the_slowest_stage_sets_the_pace():
    made = engine(0.75, 0.25)
    made.add(sequence("a", 192, 1))
    made.add(sequence("b", 10, 1))
    assert tokens_of(made) == {"a": [3 * 0.75 + 0.25], "b": [4 * 0.75 + 0.25]}


def test_shares_are_of_the_whole():
    with pytest.raises(ValueError, match=r"stages take \(0.5, 0.4\).*expected shares that sum to 1"):
        engine(0.5, 0.4)


@settings(max_examples=worth(100))
@given(configs.filter(lambda config: config.kv_role is None), timings, workloads())
def test_one_stage_is_as_none(config, timing, requests):
    timing = resolve(config, timing).timing
    found = []
    for stage_shares in ((), (1.0,)):
        made = new_engine(config, timing, num_blocks=config.num_gpu_blocks, stage_shares=stage_shares)
        arrivals, last, now = deque((request[0], make(config, request, 1)) for request in requests), {}, 0.0
        sequences = [one for _, one in arrivals]
        while arrivals or not made.is_idle or made.step:
            while arrivals and arrivals[0][0] <= now:
                made.add(arrivals.popleft()[1])
            if made.schedule(now) is None:
                now = max(now, arrivals[0][0]) if arrivals else now
                continue
            while arrivals and arrivals[0][0] < made.step.end:
                made.add(arrivals.popleft()[1])
            output = made.complete()
            now = output.end
            last |= {one.id: now for one in output.finished}
        found.append({one.id: (one.first_token_s, last[one.id]) for one in sequences})
    for id, times in found[0].items():
        assert found[1][id] == pytest.approx(times, rel=1e-9)


@settings(max_examples=worth(60))
@given(
    configs.filter(lambda config: config.kv_role is None),
    st.sampled_from([(0.5, 0.5), (0.2, 0.3, 0.5), (0.25,) * 4]),
    workloads(),
)
def test_every_token_comes_and_nothing_is_left(config, stage_shares, requests):
    timing = resolve(config, STEPS).timing
    made = new_engine(config, timing, num_blocks=config.num_gpu_blocks, stage_shares=stage_shares)
    sequences = [make(config, request, 1) for request in requests]
    times = tokens_of(made, [(request[0], one) for request, one in zip(requests, sequences, strict=True)])
    for one in sequences:
        assert len(times[one.id]) == one.num_total - one.num_prompt
        assert times[one.id] == sorted(times[one.id])
    assert made.is_idle
    assert made.num_free_blocks == made.num_blocks
