"""The prefix cache is reset between steps: if nothing is in use, or by preempting what runs."""

import math

import pytest

from mocker import AllBlocksCleared, BlockChain, BlockStored, Engine, EngineConfig, Sequence
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.offload.config import HostMemory

SIZE = 4
STEPS = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=125.0)


def sequence(id, num_prompt=9, max_tokens=8):
    chain = BlockChain([(id, place) for place in range((num_prompt + max_tokens) // SIZE)])
    return Sequence(id, num_prompt=num_prompt, max_tokens=max_tokens, chain=chain)


def engine(*, is_async, **more):
    config = EngineConfig(
        block_size=SIZE, num_gpu_blocks=33, max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=is_async
    )
    return Engine(config, resolve(config, STEPS).timing, num_blocks=33, **more)


def step(core):
    """Take a step; return who got a token."""
    if core.schedule(core.known_until_s) is None:
        return []  # asynchronously, the batch after the last one is empty
    decoded = core.decoded()
    output = core.complete()
    return sorted(one.id for one in (*decoded, *output.sampled))


def finish(core):
    """Take steps until nothing is left; return how many tokens each got."""
    counts = {}
    while not core.is_idle:
        for id in step(core):
            counts[id] = counts.get(id, 0) + 1
    return counts


both = pytest.mark.parametrize("is_async", [False, True])


@both
def test_a_reset_is_refused_while_blocks_are_in_use_and_forgets_all_afterwards(is_async):
    core = engine(is_async=is_async)
    core.add(sequence("a"))
    step(core)
    assert not core.reset_prefix_cache()
    finish(core)
    assert core.scheduler.pool.cached()
    assert core.reset_prefix_cache()
    assert core.scheduler.pool.cached() == []


@both
def test_the_event_of_a_reset_comes_with_those_of_the_next_step(is_async):
    core = engine(is_async=is_async)
    core.add(sequence("a"))
    finish(core)
    core.take_events()
    core.reset_prefix_cache()
    assert not core.has_events
    core.add(sequence("a", max_tokens=1))
    step(core)
    cleared, stored = core.take_events()
    assert (cleared, stored[1:]) == (AllBlocksCleared(), (0, 2))


@both
def test_a_reset_may_preempt_what_runs_which_then_starts_over_with_what_it_has_said(is_async):
    core = engine(is_async=is_async)
    first, second = sequence("a"), sequence("b")
    core.add(first)
    core.add(second)
    so_far = [step(core), step(core), step(core)]
    core.take_events()
    assert core.reset_prefix_cache(preempts_running=True)
    assert core.num_known_tokens(first) == 9 + 3
    assert core.scheduler.pool.num_free == 32
    assert so_far == [["a", "b"]] * 3
    assert finish(core) == {"a": 5, "b": 5}  # none twice, none lost
    assert (first.num_preemptions, second.num_preemptions) == (1, 1)
    cleared, *events = core.take_events()
    assert cleared == AllBlocksCleared()
    assert [event[1:] for event in events if isinstance(event, BlockStored)][:2] == [(0, 3), (0, 3)]


def test_what_was_in_flight_for_preempted_ones_is_dropped():
    core = engine(is_async=True)
    core.add(sequence("a"))
    step(core)
    core.reset_prefix_cache(preempts_running=True)
    assert step(core) == []  # it was closed before the reset
    assert step(core) == ["a"]


@both
def test_preempted_ones_are_admitted_again_in_their_order_in_the_next_step(is_async):
    core = engine(is_async=is_async)
    for id in "abc":
        core.add(sequence(id))
    step(core)
    core.reset_prefix_cache(preempts_running=True)
    assert [one.id for one in core.scheduler.queued()] == ["a", "b", "c"]
    batch = core.scheduler.schedule()
    assert [one.id for one in batch.resumed] == ["a", "b", "c"]
    assert sorted(one.id for one in batch.preempted) == ["a", "b", "c"]


@both
def test_a_last_token_in_flight_is_computed_again(is_async):
    core = engine(is_async=is_async)
    core.add(sequence("a", max_tokens=3))
    step(core)
    step(core)
    core.reset_prefix_cache(preempts_running=True)
    assert finish(core) == {"a": 1}


@both
def test_a_reset_of_an_idle_engine_needs_to_preempt_nobody(is_async):
    core = engine(is_async=is_async)
    assert core.reset_prefix_cache(preempts_running=True)


def test_blocks_of_a_load_in_progress_refuse_a_reset_that_preempts():
    host = HostMemory(num_chunks=64, chunk_bytes=1.0, bandwidth=0.1)
    core = engine(is_async=False, host=host)
    core.add(sequence("a", num_prompt=41, max_tokens=2))
    finish(core)
    assert core.schedule(1e6) is None  # the store has ended
    assert core.reset_prefix_cache()
    core.add(sequence("a", num_prompt=41, max_tokens=2))
    assert core.schedule(2e6) is None
    assert core.wake_s < math.inf
    with pytest.raises(RuntimeError, match="KV that is being transferred"):
        core.reset_prefix_cache(preempts_running=True)


def test_a_step_that_a_load_must_not_overtake_refuses_a_reset_and_preempts_nobody():
    core = engine(is_async=True, host=HostMemory(num_chunks=64, chunk_bytes=1.0, bandwidth=1e9))
    core.add(one := sequence("a", num_prompt=41, max_tokens=20))
    step(core)
    with pytest.raises(RuntimeError, match="step in flight"):
        core.reset_prefix_cache(preempts_running=True)
    assert one.num_preemptions == 0
