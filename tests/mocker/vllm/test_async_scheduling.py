"""Asynchronous scheduling: a step is scheduled while the one before it runs."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Prefill
from mocker.vllm.core import VllmCore
from tests.mocker.vllm.test_leap import configs, make, timings, workloads
from tests.support.examples import worth

STEPS = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=125.0)


def sequence(id, prompt, output, stop_after=None):
    chain = BlockChain([(id, place) for place in range(prompt // 16)])
    return Sequence(id, num_prompt=prompt, max_tokens=output, stop_after=stop_after, chain=chain)


def engine(**more):
    config = EngineConfig(block_size=16, num_gpu_blocks=17, max_num_batched_tokens=64, max_num_seqs=8, **more)
    return new_engine(config, resolve(config, STEPS).timing, num_blocks=17)


def duration(timing, batch, iteration):
    """Say what a batch takes, from its parts."""
    chunks = [(count, sequence.num_computed - count) for sequence, count in batch.chunks]
    if not chunks:
        return timing.decode(
            len(batch.decodes), batch.num_kv_tokens + len(batch.decodes) * (iteration - batch.iteration)
        ).first
    pairs = float(sum(count * (context + count / 2) for count, context in chunks))
    prefill = Prefill(sum(count for count, _ in chunks), sum(context for _, context in chunks), pairs, len(chunks))
    return timing.mixed(prefill, len(batch.decodes), batch.num_kv_tokens)


def run_as_vllm(config, timing, requests):
    """Return when each request's first and last token came from vLLM's loop: fill a queue of two, then wait for the oldest."""
    scheduler = VllmCore(config, config.num_gpu_blocks)
    sequences = [make(config, request, 1) for request in requests]
    arrivals = deque(zip((request[0] for request in requests), sequences, strict=True))
    queue, now, gpu_free = deque(), 0.0, 0.0
    first, last = {}, {}
    while True:
        while arrivals and arrivals[0][0] <= now:
            scheduler.add(arrivals.popleft()[1])
        if scheduler.running or scheduler.waiting:
            batch, end = scheduler.schedule(), now
            is_executed = batch is not None and not batch.is_empty
            if is_executed:
                start = gpu_free if now < gpu_free else now + timing.lead_s
                end = gpu_free = start + duration(timing, batch, scheduler.iteration - 1)
            queue.append((batch, end))
            if is_executed and len(queue) < 2 and queue[0][1] > now:
                continue
        elif not queue:
            if not arrivals:
                return first, last
            now = arrivals[0][0]
            continue
        batch, end = queue.popleft()
        now = max(now, end)
        if batch is not None:
            sampled, finished = scheduler.update(batch)
            for one in sampled:
                first.setdefault(one.id, now)
            last.update({one.id: now for one in finished})


def run_leaping(config, timing, requests):
    """Return the same of the engine, in leaps."""
    made = new_engine(config, timing, num_blocks=config.num_gpu_blocks)
    arrivals = deque((request[0], make(config, request, 1)) for request in requests)
    sequences, last, now = [one for _, one in arrivals], {}, 0.0
    while arrivals or not made.is_idle or made.step:
        if made.step is None:
            while arrivals and arrivals[0][0] <= now:
                made.add(arrivals.popleft()[1])
            if made.schedule(now, max_iterations=1 << 62) is None and arrivals:
                now = max(now, arrivals[0][0])
        elif arrivals and arrivals[0][0] < made.step.end:
            time, one = arrivals.popleft()
            made.add(one)
            made.step.cut(time)
        else:
            output = made.complete()
            now = output.end
            last.update({one.id: now for one in output.finished})
    assert sum(gaps_of(made)) == sum(one.num_total - one.num_prompt - 1 for one in sequences)
    return {one.id: one.first_token_s for one in sequences}, last


class Leading:
    """Step times of another model, in an engine whose steps start late if the GPU is idle."""

    def __init__(self, model, lead_s):
        self.mixed, self.decode, self.lead_s = model.mixed, model.decode, lead_s


@settings(max_examples=worth(100))
@given(
    configs.filter(lambda config: config.async_scheduling and not config.is_kv_consumer),
    timings,
    st.sampled_from([0.0, 0.03]),
    workloads(),
)
def test_tokens_come_when_a_loop_like_vllms_brings_them(config, timing, lead_s, requests):
    requests = [(*request[:7], None, request[8], None, None) for request in requests]
    timing = Leading(resolve(config, timing).timing, lead_s)
    first, last = run_as_vllm(config, timing, requests)
    our_first, our_last = run_leaping(config, timing, requests)
    assert our_first == pytest.approx(first, rel=1e-9)
    assert our_last == pytest.approx(last, rel=1e-9)


def steps_of(made, now=0.0):
    while (step := made.schedule(now)) is not None:
        now = step.end
        decoding = [one.id for one in made.decoded()]
        output = made.complete()
        yield now, decoding, [one.id for one in output.sampled], [one.id for one in output.finished]


def test_an_end_by_length_costs_nothing_and_a_stop_costs_the_step_already_queued():
    # Recorded on vLLM's own scheduler: a of 20 tokens makes 3, b of 20 stops at its third of 9.
    made = engine()
    made.add(sequence("a", 20, 3))
    made.add(sequence("b", 20, 9, stop_after=3))
    free, seen = [], []
    for now, decoding, _, finished in steps_of(made):
        seen.append((now, decoding, finished))
        free.append(made.num_free_blocks)
    assert seen == [
        (1.0, [], []),
        (1.125, ["a", "b"], []),
        (1.25, ["a", "b"], ["a", "b"]),
        (1.375, [], []),  # b's fourth token, which nobody gets
    ]
    assert free == [12, 12, 16, 16]
    assert sum(gaps_of(made)) == 4


def test_synchronously_a_stop_costs_nothing():
    made = engine(async_scheduling=False)
    made.add(sequence("b", 20, 9, stop_after=3))
    assert [now for now, *_ in steps_of(made)] == [1.0, 1.125, 1.25]


@pytest.mark.parametrize(("is_async", "first_token"), [(False, 2.25), (True, 2.375)])
def test_a_request_waits_for_the_step_in_flight_and_asynchronously_for_the_one_behind_it(is_async, first_token):
    made = engine(async_scheduling=is_async)
    made.add(sequence("a", 20, 9))
    made.schedule(0.0)
    made.complete()
    made.schedule(1.0)
    late = sequence("late", 20, 1)
    made.add(late)
    made.complete()
    list(steps_of(made, 1.125))
    assert late.first_token_s == first_token
    assert late.first_scheduled_s == 1.125


def test_a_seat_is_free_a_step_later_and_a_stop_holds_it_no_longer_than_its_last_token():
    def admitted(stop_after, is_async):
        config = EngineConfig(block_size=16, num_gpu_blocks=99, max_num_seqs=1, async_scheduling=is_async)
        made = new_engine(config, resolve(config, STEPS).timing, num_blocks=99)
        made.add(sequence("a", 20, 3 if stop_after is None else 9, stop_after))
        made.add(second := sequence("second", 20, 1))
        list(steps_of(made))
        return second.first_scheduled_s, second.first_token_s

    assert admitted(None, False) == admitted(3, False) == (1.25, 2.25)
    assert admitted(None, True) == (1.25, 2.25)  # nothing was queued
    assert admitted(3, True) == (1.25, 2.375)  # behind the step that brings nothing


def test_an_abort_drops_what_is_in_flight():
    made = engine()
    made.add(one := sequence("a", 20, 9))
    made.add(sequence("b", 20, 3))
    made.schedule(0.0)
    made.abort(one)
    made.complete()
    assert [(decoding, finished) for _, decoding, _, finished in steps_of(made, 1.0)] == [(["b"], []), (["b"], ["b"])]
    assert made.num_free_blocks == 16


def test_whoever_stops_at_the_limit_is_known_to_end_there():
    one = sequence("a", 20, 3, stop_after=3)
    assert one.finish_reason == "stop"
    assert sequence("b", 20, 3, stop_after=4).finish_reason == "length"
    made = engine()
    made.add(one)
    assert [now for now, *_ in steps_of(made)] == [1.0, 1.125, 1.25]


def test_a_stop_in_flight_ends_a_sequence_that_gets_no_token_meanwhile():
    # Blocks run out for `victim`, which has the lowest priority and is first: nobody behind it is scheduled in that step.
    config = EngineConfig(
        block_size=16, num_gpu_blocks=5, max_num_batched_tokens=64, max_num_seqs=8, scheduling_policy="priority"
    )
    made = new_engine(config, resolve(config, STEPS).timing, num_blocks=5)
    made.add(Sequence("victim", num_prompt=30, max_tokens=20, priority=5, chain=BlockChain(["v"], 1)))
    made.complete() if made.schedule(0.0) else None
    stopper = Sequence("stopper", num_prompt=24, max_tokens=20, stop_after=1, priority=1, chain=BlockChain(["s"], 1))
    made.add(stopper)
    ended = {id: now for now, _, _, finished in steps_of(made, 1.0) for id in finished}
    assert ended["stopper"] == stopper.first_token_s == 2.25
    assert set(ended) == {"victim", "stopper"}


@pytest.mark.parametrize("max_iterations", [1, 1 << 62])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_abort_in_the_last_step_caches_and_ends_nothing(is_async, max_iterations):
    # The last step, from 2.875 to 3 s, fills the second block; asynchronously that is cached when its token is known.
    made = engine(async_scheduling=is_async)
    one = Sequence("a", num_prompt=16, max_tokens=17, chain=BlockChain(["first", "second"]))
    made.add(one)
    finished, now = [], 0.0
    while (step := made.schedule(now, max_iterations=max_iterations)) is not None:
        if step.end >= 3.0:
            made.abort(one)
            step.cut(2.99)
        now = step.end
        finished += made.complete().finished
    stored = [key for event in made.outbox.take_events() for key in event.keys()]  # noqa: SIM118 (an event, not a dict)
    assert finished == []
    assert stored == (["first", "second"] if not is_async else ["first"])
    assert made.num_free_blocks == 16
    assert one.num_total - one.num_prompt - 1 > sum(gaps_of(made))


def gaps_of(made):
    return [made.log.rows[place + 3] * made.log.rows[place + 4] for place in range(0, len(made.log.rows), 5)]
