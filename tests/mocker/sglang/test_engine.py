"""In an engine, on the clock, SGLang's scheduler decides what it decides alone, and a leap is many iterations at once."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, Sequence, new_engine
from mocker.contract import EngineStoppedError
from mocker.sglang.config import SglangConfig
from mocker.sglang.request import Request
from mocker.sglang.scheduler import Scheduler
from mocker.timing.constant import Constant
from tests.support.examples import worth

PREFILL_S, DECODE_S = 0.25, 0.125
NUM_OFFER = 40

configs = st.builds(
    SglangConfig,
    page_size=st.sampled_from([1, 1, 4, 16]),
    max_running_requests=st.sampled_from([2, 5, 64]),
    chunked_prefill_size=st.sampled_from([-1, 16, 40, 200]),
    max_prefill_tokens=st.sampled_from([60, 16384]),
    prefill_max_requests=st.sampled_from([None, None, 2]),
    enable_mixed_chunk=st.booleans(),
    prefill_decode_interval=st.sampled_from([0, 0, 3]),
    prefill_decode_interval_min_bs=st.sampled_from([0, 2]),
    schedule_policy=st.sampled_from(["fcfs", "fcfs", "lof"]),
    schedule_conservativeness=st.sampled_from([0.05, 0.3, 1.0]),
    enable_priority_scheduling=st.booleans(),
    schedule_low_priority_values_first=st.booleans(),
    disable_priority_preemption=st.booleans(),
    priority_scheduling_preemption_threshold=st.sampled_from([0, 1]),
    retraction_policy=st.sampled_from(["length", "priority"]),
    disable_radix_cache=st.sampled_from([False, False, False, True]),
    radix_eviction_policy=st.sampled_from(["lru", "lru", "lfu", "fifo", "mru", "filo", "slru", "priority"]),
    disable_overlap_schedule=st.booleans(),
    decode_log_interval=st.sampled_from([1, 3, 40]),
    new_token_ratio_decay_steps=st.sampled_from([5, 600]),
)
ordered = st.builds(
    SglangConfig,
    page_size=st.sampled_from([1, 4]),
    schedule_policy=st.sampled_from(["lpm", "hrrn", "dfs-weight", "shortest-prefill-first"]),
    schedule_conservativeness=st.sampled_from([0.1, 1.0]),
    chunked_prefill_size=st.sampled_from([16, 200]),
    disable_overlap_schedule=st.booleans(),
)
seldom = st.builds(replace, configs, scheduler_recv_interval=st.sampled_from([2, 3, 10]))
"""Those that look for new requests only now and then."""


def dyadic(time):
    """Round a time so that sums of such times are exact, and never just as a step ends."""
    return round(time * (1 << 30)) / (1 << 30) + 1 / (1 << 32)


@st.composite
def workloads(draw):
    """Return when each request arrives, what it is, and when it is aborted; no two things happen at once."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    requests, now = [], 0.0
    for number in range(rng.randint(1, 25)):
        now += dyadic(rng.choice([1e-6, 1e-6, 0.1, 0.5, 3.0]) * (0.5 + rng.random()))
        shared = rng.choice([0, 16, 48])
        requests.append(
            {
                "id": number,
                "arrival": now,
                "group": rng.randrange(2),
                "shared": shared,
                "num_prompt": shared + rng.randint(1, 60),
                "max_tokens": rng.choice([1, rng.randint(1, 50)]),
                "stop_after": rng.randint(1, 40) if rng.random() < 0.6 else None,
                "priority": rng.randrange(3),
                "abort": now + dyadic(3 * rng.random()) if rng.random() < 0.2 else math.inf,
            }
        )
    return requests


def chain_of(request, size):
    """Return the names of a request's pages: those of its group, its own, and those of its answer."""
    shared = [("shared", request["group"], place) for place in range(request["shared"] // size)]
    num_pages = request["num_prompt"] // size
    own = [("own", request["id"], place) for place in range(len(shared), num_pages)]
    chain = BlockChain([*shared, *own])
    chain.payload = request["id"]
    return chain


def happenings(requests):
    """Return what is done to an engine, in order."""
    found = [(request["arrival"], "add", request) for request in requests]
    found += [(request["abort"], "abort", request) for request in requests if request["abort"] < math.inf]
    return sorted(found, key=lambda happening: happening[0])


def flat(events):
    return [(type(event).__name__, event.chain.payload, event.start, event.stop) for event in events]


def drive(config, num_pages, requests, *, max_iterations, looks=(), host=None):
    """Run a workload on an engine, and return what came of each request, KV events, gaps, and how many events were seen."""
    engine = new_engine(config, Constant(PREFILL_S, DECODE_S), num_blocks=num_pages, host=host)
    to_do = [*happenings(requests), *[(look, "look", None) for look in looks]]
    to_do.sort(key=lambda happening: happening[0])
    sequences, ends, events, seen, now = {}, {}, [], [], 0.0

    def happen(kind, request):
        if kind == "add":
            names = ("num_prompt", "max_tokens", "stop_after", "priority")
            chain = chain_of(request, config.page_size)
            sequence = Sequence(request["id"], chain=chain, **{name: request[name] for name in names})
            sequences[request["id"]] = sequence
            engine.add(sequence)
        elif kind == "abort":
            engine.abort(sequences[request["id"]])
        else:
            seen.append(len(events))

    while True:
        if engine.step is None:
            while to_do and to_do[0][0] <= now:
                happen(*to_do.pop(0)[1:])
            if engine.schedule(now, max_iterations=max_iterations) is None:
                events += engine.outbox.take_events()
                if not to_do and engine.wake_s == math.inf:
                    break
                now = min(engine.wake_s, to_do[0][0] if to_do else math.inf)
                continue
        if to_do and to_do[0][0] < engine.step.end:
            time, kind, request = to_do.pop(0)
            engine.advance(time)
            events += engine.outbox.take_events()
            happen(kind, request)
            if kind != "look":
                engine.step.cut(time)
            continue
        output = engine.complete()
        now = output.end
        ends |= {each.id: (now, each.finish_reason) for each in output.finished if not each.is_failed}
        events += engine.outbox.take_events()
    assert engine.is_idle
    assert not engine._core.scheduler.in_flight
    assert engine.num_free_blocks == engine.num_blocks
    rows = {
        sequence.id: (
            sequence.first_token_s if sequence.id in ends else None,
            sequence.num_preemptions,
            sequence.cached_tokens if sequence.first_scheduled_s >= 0 else None,
        )
        for sequence in sequences.values()
    }
    return rows, ends, flat(events), gaps_of(engine), seen


def gaps_of(engine):
    """Return each gap between two tokens of a sequence."""
    gaps, data = [], engine.log.rows
    for place in range(0, len(data), 5):
        first, slope, curve, count, tokens = data[place : place + 5]
        gaps += [first + j * (slope + j * curve) for j in range(int(count)) for _ in range(int(tokens))]
    return sorted(gaps)


def loop(config, num_pages, requests):
    """Run a workload through SGLang's event loop, and return the same; an aborted request has no gaps from then on."""
    scheduler = Scheduler(config, num_pages)
    to_do, known, tokens, ends, cached, now = happenings(requests), {}, {}, {}, {}, 0.0
    before, before_end = None, 0.0

    def ingest():
        while to_do and to_do[0][0] <= now:
            _, kind, request = to_do.pop(0)
            if kind == "add":
                names = ("num_prompt", "stop_after", "priority")
                known[request["id"]] = scheduled = Request(
                    request["id"],
                    chain_of(request, config.page_size),
                    max_new=request["max_tokens"],
                    ignores_eos=request["stop_after"] is None,
                    **{name: request[name] for name in names},
                )
                scheduler.add(scheduled)
            else:
                aborted_s.setdefault(request["id"], request["abort"])
                scheduler.abort(known[request["id"]])

    def take(outcome, time):
        for request in outcome.tokens:
            tokens.setdefault(request.id, []).append(time)
        for request in outcome.finished:
            ends[request.id] = (time, request.ending)

    aborted_s, num_idle = {}, 0
    while True:
        ingest()
        work = scheduler.schedule()
        for request, prefix, _ in work.prefills:
            cached.setdefault(request.id, prefix)
        num_idle = num_idle + 1 if work.kind == "idle" else 0
        duration = PREFILL_S * bool(work.prefills) + DECODE_S * bool(work.decodes)
        if not config.is_async:
            if work.kind != "idle":
                now += duration
                take(scheduler.process(work), now)
        else:
            begin = max(now, before_end)
            if before is not None:
                now = before_end
                take(scheduler.process(before), now)
            before, before_end = (None, 0.0) if work.kind == "idle" else (work, begin + duration)
        if num_idle > config.is_async:  # with overlap, the first idle turn has processed a result
            scheduler.rest()
            if num_idle > 5:
                if not to_do:
                    break
                now = max(now, to_do[0][0])
    ended = {id: end for id, end in ends.items() if end[0] <= aborted_s.get(id, math.inf)}
    rows = {
        id: (tokens[id][0] if id in ended else None, request.num_retractions, cached.get(id))
        for id, request in known.items()
    }
    gaps = [
        later - sooner
        for id, times in tokens.items()
        for sooner, later in pairwise(times)
        if later <= aborted_s.get(id, math.inf)
    ]
    return rows, ended, flat(scheduler.pool.tree.events), sorted(gaps)


def room_for(requests, config):
    """Return a number of pages in which each request fits, and not much more."""
    most = max(request["num_prompt"] + request["max_tokens"] for request in requests)
    return -(-most // config.page_size) + 4 + NUM_OFFER // config.page_size


@settings(max_examples=worth(400), deadline=None)
@given(configs | ordered, workloads())
def test_an_engine_decides_what_the_scheduler_decides_alone(config, requests):
    num_pages = room_for(requests, config)
    try:
        expected = loop(config, num_pages, requests)
    except EngineStoppedError:
        with pytest.raises(EngineStoppedError):
            drive(config, num_pages, requests, max_iterations=1)
        return
    found = drive(config, num_pages, requests, max_iterations=1)
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert ours == theirs
    assert found[3] == expected[3]


@settings(max_examples=worth(400), deadline=None)
@given(configs | ordered | seldom, workloads(), st.lists(st.floats(0, 20), max_size=8))
def test_a_leap_is_its_iterations_taken_one_at_a_time(config, requests, looks):
    num_pages = room_for(requests, config)
    try:
        expected = drive(config, num_pages, requests, max_iterations=1, looks=looks)
    except EngineStoppedError:
        return
    assert drive(config, num_pages, requests, max_iterations=1 << 62, looks=looks) == expected


def test_a_long_answer_is_one_leap():
    request = {"id": 0, "group": 0, "shared": 0, "num_prompt": 10, "max_tokens": 500, "priority": 0}
    engine = new_engine(SglangConfig(), Constant(PREFILL_S, DECODE_S), num_blocks=1000)
    engine.add(Sequence(0, num_prompt=10, max_tokens=500, chain=chain_of(request, 1)))
    num_steps, now = 0, 0.0
    while (step := engine.schedule(now, max_iterations=1 << 62)) is not None:
        num_steps, now = num_steps + 1, engine.complete().end
        assert step.end == now
    assert num_steps < 8
    assert now == PREFILL_S + 499 * DECODE_S


@pytest.mark.parametrize("max_iterations", [1, 1 << 62])
@pytest.mark.parametrize("is_async", [False, True])
def test_events_leave_after_prompts_then_seldom_and_when_nothing_is_left(is_async, max_iterations):
    config = SglangConfig(decode_log_interval=10, disable_overlap_schedule=not is_async)
    engine = new_engine(config, Constant(PREFILL_S, DECODE_S), num_blocks=1000)
    for id, max_tokens in enumerate((3, 25)):
        request = {"id": id, "group": id, "shared": 0, "num_prompt": 10, "max_tokens": max_tokens, "priority": 0}
        engine.add(Sequence(id, num_prompt=10, max_tokens=max_tokens, chain=chain_of(request, 1)))
    sent, now = [], 0.0
    while engine.schedule(now, max_iterations=max_iterations) is not None:
        now = engine.complete().end
        if events := engine.outbox.take_events():
            sent.append(((now - PREFILL_S) / DECODE_S, [event.stop - event.start for event in events]))
    # The prompts; the answer that ends with the second decode; the other, whose last token is never computed.
    assert sent == [(0, [10, 10]), (10, [2]), (24, [24])]
