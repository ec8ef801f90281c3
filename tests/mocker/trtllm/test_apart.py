"""TensorRT-LLM's scheduler in context servers and generation servers."""

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, Sequence, new_engine
from mocker.timing.constant import Constant
from mocker.trtllm.config import TrtllmConfig
from tests.mocker.sglang.test_engine import dyadic, gaps_of
from tests.support.examples import worth

SIZE, PREFILL_S, DECODE_S = 4, 0.25, 0.125
GENERATION = TrtllmConfig(server_role="generation", tokens_per_block=SIZE, disable_overlap_scheduler=True)
CONTEXT = TrtllmConfig(server_role="context", tokens_per_block=SIZE)


def engine_of(config, num_blocks):
    return new_engine(config, Constant(PREFILL_S, DECODE_S), num_blocks=num_blocks)


def sequence(id, num_prompt, max_tokens, *, part="answer", **settings):
    made = Sequence(id, num_prompt=num_prompt, max_tokens=max_tokens, chain=BlockChain([(id, "own")]), **settings)
    made.is_remote_prefill, made.is_remote_decode = part == "answer", part == "prompt"
    return made


def loads_of(engine):
    return [each.id for each in engine.outbox.take_loads()]


def test_a_request_reserves_its_blocks_to_the_end_before_its_kv_comes():
    """Of 10 blocks, a needs 3 + 2 in all, b the other 5; c needs 1 and waits. While KV is on its way, only blocks count."""
    engine = engine_of(GENERATION, 10)
    a, b, c = (sequence(*each) for each in (("a", 12, 8), ("b", 12, 8), ("c", 3, 1)))
    for each in (a, b, c):
        engine.add(each)
    assert engine.schedule(0.0) is None
    assert (loads_of(engine), engine.num_free_blocks) == (["a", "b"], 4)
    assert engine.schedule(0.0) is None
    assert loads_of(engine) == ["c"]


def test_a_request_whose_kv_has_arrived_generates_and_goes_before_new_prompts():
    engine = engine_of(GENERATION, 10)
    a, whole, b = sequence("a", 12, 8), sequence("w", 12, 8, part="all"), sequence("b", 12, 8)
    for each in (a, whole, b):
        engine.add(each)
    engine.schedule(0.0)
    assert (loads_of(engine), engine.view().num_loading, engine.view().num_queued) == (["a", "b"], 2, 1)
    assert engine.end_load(a) == []
    step = engine.schedule(0.0)
    assert (step.batch.decodes, a.first_token_s, engine.outbox.take_shipped()) == ([a], 0.0, [a])
    assert engine.complete().sampled == [a]  # its second token


def test_a_token_that_is_all_that_was_asked_for_ends_the_request():
    engine = engine_of(GENERATION, 10)
    for each in (only := sequence("a", 12, 1), lost := sequence("b", 8, 5)):
        engine.add(each)
    engine.schedule(0.0)
    assert engine.end_load(only) == [only]
    assert engine.end_load(lost, 0) == [lost]
    assert (only.finish_reason, lost.finish_reason, engine.num_free_blocks) == ("length", "error", 10)


def test_blocks_of_a_request_that_was_aborted_stay_taken_until_its_kv_has_arrived():
    engine = engine_of(GENERATION, 10)
    engine.add(one := sequence("a", 12, 5))
    engine.schedule(0.0)
    engine.abort(one)
    assert (engine.num_free_blocks, engine.view().num_retained) == (7, 1)
    assert engine.end_load(one, 0) == []
    assert (engine.num_free_blocks, engine.view().num_retained, engine.is_idle) == (10, 0, True)


def test_a_context_server_keeps_blocks_until_they_were_read_and_never_overlaps():
    engine = engine_of(CONTEXT, 6)
    first, second = (sequence(id, 12, 1, part="prompt") for id in ("a", "b"))
    engine.add(first)
    engine.add(second)
    assert engine.schedule(0.0).batch.chunks == [(first, 12)]
    assert engine.ahead is None
    assert engine.complete().finished == [first]
    assert (engine.num_free_blocks, engine.view().num_retained) == (3, 1)
    assert engine.schedule(1.0) is None
    engine.release_kept(first)
    assert engine.schedule(2.0).batch.chunks == [(second, 12)]
    engine.complete()
    engine.release_kept(second)
    assert engine.num_free_blocks == 6


@pytest.mark.parametrize(("config", "part"), [(CONTEXT, "all"), (CONTEXT, "answer"), (GENERATION, "prompt")])
def test_a_server_refuses_the_part_of_a_request_that_it_does_not_do(config, part):
    with pytest.raises(ValueError, match="server_role"):
        engine_of(config, 10).add(sequence("a", 4, 1, part=part))


generating = st.builds(
    TrtllmConfig,
    server_role=st.just("generation"),
    tokens_per_block=st.just(SIZE),
    max_batch_size=st.sampled_from([2, 5, 64]),
    capacity_scheduler_policy=st.sampled_from(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]),
    disable_overlap_scheduler=st.booleans(),
    enable_block_reuse=st.booleans(),
)


@st.composite
def arriving(draw):
    """Return requests, each with its arrival, how long its KV takes, and when it is aborted, if it is."""
    rng, requests, now = random.Random(draw(st.integers(0, 1 << 32))), [], 0.0
    for number in range(rng.randint(1, 25)):
        now += dyadic(rng.choice([1e-6, 0.1, 0.5, 3.0]) * (0.5 + rng.random()))
        requests.append(
            {
                "id": number,
                "arrival": now,
                "num_prompt": rng.randint(1, 60),
                "max_tokens": rng.choice([1, 2, rng.randint(1, 60)]),
                "stop_after": rng.choice([None, rng.randint(1, 40)]),
                "part": rng.choice(["answer", "answer", "all"]),
                "load_s": dyadic(rng.choice([0.01, 0.3, 2.0]) * (0.5 + rng.random())),
                "is_lost": rng.random() < 0.1,
                "abort": now + dyadic(4 * rng.random()) if rng.random() < 0.2 else None,
            }
        )
    return requests


def drive(config, num_blocks, requests, *, max_iterations):
    """Let an engine answer requests, and return what came of each, and the gaps between their tokens."""
    engine, order = engine_of(config, num_blocks), itertools.count()
    to_do = [(request["arrival"], next(order), "add", request) for request in requests]
    to_do += [(request["abort"], next(order), "abort", request) for request in requests if request["abort"]]
    heapq.heapify(to_do)
    sequences, ends, now = {}, {}, 0.0

    def happen(time, kind, request):
        id = request["id"]
        if kind == "add":
            names = ("num_prompt", "max_tokens", "stop_after", "part")
            sequences[id] = sequence(id, **{name: request[name] for name in names})
            engine.add(sequences[id])
        elif kind == "abort":
            engine.abort(sequences[id])
        else:
            over = engine.end_load(sequences[id], 0 if request["is_lost"] else None)
            ends.update({each.id: (time, each.finish_reason) for each in over})

    while True:
        if engine.step is None:
            while to_do and to_do[0][0] <= now:
                happen(now, *heapq.heappop(to_do)[2:])
            begun = engine.schedule(now, max_iterations=max_iterations)
            for each in engine.outbox.take_loads():
                heapq.heappush(to_do, (now + requests[each.id]["load_s"], next(order), "load", requests[each.id]))
            if begun is None:
                if not to_do:
                    break
                now = max(now, to_do[0][0])
                continue
        if to_do and to_do[0][0] < engine.step.end:
            time, _, kind, request = heapq.heappop(to_do)
            engine.advance(time)
            happen(time, kind, request)
            engine.step.cut(time)
            continue
        output = engine.complete()
        now = output.end
        ends |= {each.id: (now, each.finish_reason) for each in output.finished}
    view = engine.view()
    assert engine.is_idle and (view.num_free_blocks, view.num_retained) == (engine.num_blocks, 0), view
    aborted = {request["id"] for request in requests if request["abort"]}
    assert set(ends) | aborted == set(sequences)
    for id, (_, reason) in ends.items():
        if reason != "error":
            assert sequences[id].num_known == sequences[id].num_total
    rows = {each.id: (each.first_token_s, each.num_preemptions) for each in sequences.values() if each.id in ends}
    return rows, ends, gaps_of(engine)


@settings(max_examples=worth(200), deadline=None)
@given(generating, arriving())
def test_every_request_ends_once_and_a_leap_is_many_iterations_at_once(config, requests):
    num_blocks = 60 if config.capacity_scheduler_policy == "MAX_UTILIZATION" else 1000
    found = drive(config, num_blocks, requests, max_iterations=1000)
    assert found == drive(config, num_blocks, requests, max_iterations=1)
