"""The prefix cache is reset between steps: if nothing is in use, or by preempting what runs."""

import math

import pytest

from mocker import AllBlocksCleared, BlockChain, BlockStored, EngineConfig, Sequence, new_engine
from mocker.tiers.config import HostMemory
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig

SIZE = 4
STEPS = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=125.0)


def sequence(id, num_prompt=9, max_tokens=8):
    chain = BlockChain([(id, place) for place in range((num_prompt + max_tokens) // SIZE)])
    return Sequence(id, num_prompt=num_prompt, max_tokens=max_tokens, chain=chain)


def engine(*, is_async, **more):
    config = EngineConfig(
        block_size=SIZE, num_gpu_blocks=33, max_num_batched_tokens=64, max_num_seqs=8, async_scheduling=is_async
    )
    return new_engine(config, resolve(config, STEPS).timing, num_blocks=33, **more)


def step(made):
    """Take a step; return who got a token."""
    if made.schedule(made.known_until_s) is None:
        return []  # asynchronously, the batch after the last one is empty
    decoded = made.decoded()
    output = made.complete()
    return sorted(one.id for one in (*decoded, *output.sampled))


def finish(made):
    """Take steps until nothing is left; return how many tokens each got."""
    counts = {}
    while not made.is_idle:
        for id in step(made):
            counts[id] = counts.get(id, 0) + 1
    return counts


both = pytest.mark.parametrize("is_async", [False, True])


@both
def test_a_reset_is_refused_while_blocks_are_in_use_and_forgets_all_afterwards(is_async):
    made = engine(is_async=is_async)
    made.add(sequence("a"))
    step(made)
    assert not made.reset_prefix_cache()
    finish(made)
    assert made._core.pool.num_evictable
    assert made.reset_prefix_cache()
    assert not made._core.pool.num_evictable


@both
def test_the_event_of_a_reset_comes_with_those_of_the_next_step(is_async):
    made = engine(is_async=is_async)
    made.add(sequence("a"))
    finish(made)
    made.outbox.take_events()
    made.reset_prefix_cache()
    assert not made.outbox.events
    made.add(sequence("a", max_tokens=1))
    step(made)
    cleared, stored = made.outbox.take_events()
    assert (cleared, stored[1:]) == (AllBlocksCleared(), (0, 2))


@both
def test_a_reset_may_preempt_what_runs_which_then_starts_over_with_what_it_has_said(is_async):
    made = engine(is_async=is_async)
    first, second = sequence("a"), sequence("b")
    made.add(first)
    made.add(second)
    so_far = [step(made), step(made), step(made)]
    made.outbox.take_events()
    assert made.reset_prefix_cache(preempts_running=True)
    assert made.num_known_tokens(first) == 9 + 3
    assert made.num_free_blocks == 32
    assert so_far == [["a", "b"]] * 3
    assert finish(made) == {"a": 5, "b": 5}  # none twice, none lost
    assert (first.num_preemptions, second.num_preemptions) == (1, 1)
    cleared, *events = made.outbox.take_events()
    assert cleared == AllBlocksCleared()
    assert [event[1:] for event in events if isinstance(event, BlockStored)][:2] == [(0, 3), (0, 3)]


def test_what_was_in_flight_for_preempted_ones_is_dropped():
    made = engine(is_async=True)
    made.add(sequence("a"))
    step(made)
    made.reset_prefix_cache(preempts_running=True)
    assert step(made) == []  # it was closed before the reset
    assert step(made) == ["a"]


@both
def test_preempted_ones_are_admitted_again_in_their_order_in_the_next_step(is_async):
    made = engine(is_async=is_async)
    for id in "abc":
        made.add(sequence(id))
    step(made)
    made.reset_prefix_cache(preempts_running=True)
    assert [one.id for one in made._core.queued()] == ["a", "b", "c"]
    batch = made._core.schedule()
    assert [one.id for one in batch.resumed] == ["a", "b", "c"]
    assert sorted(one.id for one in batch.preempted) == ["a", "b", "c"]


@both
def test_a_last_token_in_flight_is_computed_again(is_async):
    made = engine(is_async=is_async)
    made.add(sequence("a", max_tokens=3))
    step(made)
    step(made)
    made.reset_prefix_cache(preempts_running=True)
    assert finish(made) == {"a": 1}


@both
def test_a_reset_of_an_idle_engine_needs_to_preempt_nobody(is_async):
    made = engine(is_async=is_async)
    assert made.reset_prefix_cache(preempts_running=True)


def test_blocks_of_a_load_in_progress_refuse_a_reset_that_preempts():
    host = HostMemory(num_chunks=64, chunk_bytes=1.0, bandwidth=0.1)
    made = engine(is_async=False, host=host)
    made.add(sequence("a", num_prompt=41, max_tokens=2))
    finish(made)
    assert made.schedule(1e6) is None  # the store has ended
    assert made.reset_prefix_cache()
    made.add(sequence("a", num_prompt=41, max_tokens=2))
    assert made.schedule(2e6) is None
    assert made.wake_s < math.inf
    with pytest.raises(RuntimeError, match="KV that is being transferred"):
        made.reset_prefix_cache(preempts_running=True)


def test_a_step_that_a_load_must_not_overtake_refuses_a_reset_and_preempts_nobody():
    made = engine(is_async=True, host=HostMemory(num_chunks=64, chunk_bytes=1.0, bandwidth=1e9))
    made.add(one := sequence("a", num_prompt=41, max_tokens=20))
    step(made)
    with pytest.raises(RuntimeError, match="step in flight"):
        made.reset_prefix_cache(preempts_running=True)
    assert one.num_preemptions == 0
