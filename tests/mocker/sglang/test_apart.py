"""SGLang's scheduler in engines that only compute prompts, or only answer them."""

import heapq
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, Sequence, new_engine
from mocker.contract import EngineStoppedError, NeverAdmittedError
from mocker.sglang.config import SglangConfig
from mocker.timing.constant import Constant
from tests.mocker.sglang.test_engine import dyadic, gaps_of
from tests.support.examples import worth

PREFILL_S, DECODE_S = 0.25, 0.125
DECODE = SglangConfig(disaggregation_mode="decode", disable_overlap_schedule=True, num_reserved_decode_tokens=10)
PREFILL = SglangConfig(disaggregation_mode="prefill", disable_overlap_schedule=True)


def engine_of(config, num_pages):
    return new_engine(config, Constant(PREFILL_S, DECODE_S), num_blocks=num_pages)


def sequence(id, num_prompt, max_tokens, *, is_decode=True, names=(), **settings):
    made = Sequence(
        id, num_prompt=num_prompt, max_tokens=max_tokens, chain=BlockChain([*names, (id, "own")]), **settings
    )
    if is_decode:
        made.is_remote_prefill = made.is_token_shipped = True
    else:
        made.is_remote_decode = True
    return made


def step(engine, now):
    """Take a step; return its decodes, its end, and who was given room for its KV."""
    begun = engine.schedule(now)
    decodes = [] if begun is None else [each.id for each in begun.batch.decodes]
    loads = [each.id for each in engine.outbox.take_loads()]
    return decodes, now if begun is None else engine.complete().end, loads


def test_a_decode_worker_gives_room_in_order_and_keeps_some_for_each_answer():
    """Of 100 tokens, a needs 30 + 10 and b 40 + 10 of the 60 that are left beside the 10 kept for a; c waits."""
    engine = engine_of(DECODE, 100)
    a, b, c, d = (sequence(name, count, 5) for name, count in (("a", 30), ("b", 40), ("c", 15), ("d", 1)))
    for each in (a, b, c, d):
        engine.add(each)
    assert step(engine, 0.0) == ([], 0.0, ["a", "b"])
    assert (engine.num_free_blocks, engine.view().num_loading, engine.view().num_queued) == (30, 2, 2)
    engine.end_load(b)
    assert engine.view().num_loaded == 1
    assert step(engine, 0.0) == (["b"], DECODE_S, [])
    assert (b.first_token_s, a.first_token_s) == (0.0, -1.0)


def test_the_largest_running_request_could_end_if_all_others_were_retracted():
    """Of 101 tokens, a holds 11 and is cut off at 10 + 89; it knows 12, so that 87 of the 90 free ones are kept for it."""
    config = replace(DECODE, num_reserved_decode_tokens=0)
    for clip, roomy in ((4096, ["b"]), (20, ["b", "c"])):
        engine = engine_of(replace(config, clip_max_new_tokens_estimation=clip), 101)
        engine.add(a := sequence("a", 10, 90))
        assert step(engine, 0.0)[2] == ["a"]
        engine.end_load(a)
        assert step(engine, 0.0)[0] == ["a"]
        engine.add(sequence("b", 2, 1))
        engine.add(sequence("c", 2, 1))
        assert step(engine, 1.0)[2] == roomy


def test_nobody_gets_room_while_one_is_retracted_and_it_is_resumed_first():
    """Two of 10 + 10 tokens in 30 pages: when both have 5 tokens of output, one must leave."""
    engine = engine_of(replace(DECODE, num_reserved_decode_tokens=0, clip_max_new_tokens_estimation=1), 30)
    a, b = sequence("a", 10, 10), sequence("b", 10, 10)
    for each in (a, b):
        engine.add(each)
    now, seen = 0.0, []
    engine.schedule(now)
    for each in engine.outbox.take_loads():
        engine.end_load(each)
    for _ in range(6):
        decodes, now, _ = step(engine, now)
        seen.append("".join(decodes))
    assert (seen, b.num_preemptions) == (["ab"] * 5 + ["a"], 1)
    engine.add(c := sequence("c", 1, 3))
    while engine.num_waiting:
        decodes, now, loads = step(engine, now)
        seen.append("".join(decodes) + "+" * len(loads))
        for each in loads and [c]:
            engine.end_load(each)
    assert seen[6:] == ["a"] * 3 + ["b+", "bc"]
    while engine.num_free_blocks < 30:
        _, now, _ = step(engine, now)
    assert now == 13 * DECODE_S


def test_a_token_that_is_all_that_was_asked_for_ends_the_request():
    engine = engine_of(DECODE, 100)
    for each in (whole := sequence("a", 30, 1), lost := sequence("b", 10, 5)):
        engine.add(each)
    step(engine, 0.0)
    assert engine.end_load(whole) == [whole]
    assert engine.end_load(lost, 3) == [lost]
    assert (whole.finish_reason, lost.finish_reason, engine.num_free_blocks) == ("length", "error", 100)


def test_pages_of_a_request_that_was_aborted_stay_taken_until_its_kv_has_arrived():
    engine = engine_of(DECODE, 100)
    engine.add(one := sequence("a", 30, 5))
    step(engine, 0.0)
    engine.abort(one)
    assert (engine.num_free_blocks, engine.view().num_retained, engine.is_idle) == (70, 1, True)
    assert engine.end_load(one, 0) == []
    assert (engine.num_free_blocks, engine.view().num_retained) == (100, 0)


@pytest.mark.parametrize(("has_tree", "num_cached"), [(False, 0), (True, 20)])
def test_a_decode_worker_keeps_prefixes_only_if_it_is_told_to(has_tree, num_cached):
    engine = engine_of(replace(DECODE, disaggregation_decode_enable_radix_cache=has_tree), 100)
    names = [("shared", place) for place in range(20)]
    for id in ("a", "b"):
        engine.add(each := sequence(id, 25, 2, names=names))
        step(engine, 0.0)
        engine.end_load(each)
        step(engine, 0.0)
    assert each.num_cached_blocks == num_cached
    assert engine.num_free_blocks == 100


def test_who_can_never_have_room_is_named():
    engine = engine_of(DECODE, 100)
    engine.add(sequence("a", 93, 1))
    with pytest.raises(NeverAdmittedError, match=r"'a'.*num_reserved_decode_tokens \(10\)"):
        engine.schedule(0.0)


def loaded(config, num_tokens, requests):
    """Run a decode worker whose KV comes some time after there is room (s), by request; return it and the sequences."""
    engine = engine_of(config, num_tokens // config.page_size)
    sequences, coming, now = {}, [], 0.0
    for id, (num_prompt, max_tokens, _) in requests.items():
        sequences[id] = sequence(id, num_prompt, max_tokens)
        engine.add(sequences[id])
    for _ in range(200):
        while coming and coming[0][0] <= now:
            engine.end_load(sequences[heapq.heappop(coming)[1]])
        begun = engine.schedule(now, max_iterations=1)
        for loading in engine.outbox.take_loads():
            heapq.heappush(coming, (now + requests[loading.id][2], loading.id))
        if begun is not None:
            now = engine.complete().end
        elif coming:
            now = coming[0][0]
        else:
            break
    return engine, sequences


def test_a_request_that_starts_alone_and_finds_no_page_is_over():
    config = SglangConfig(
        disaggregation_mode="decode",
        max_running_requests=64,
        disable_overlap_schedule=True,
        clip_max_new_tokens_estimation=10,
        num_reserved_decode_tokens=0,
    )
    requests = {"a": (36, 2, 0.43), "b": (47, 2, 2.0), "c": (38, 2, 0.01), "d": (57, 45, 2.017)}
    engine, sequences = loaded(config, 140, requests)
    assert engine.is_idle
    assert engine.num_free_blocks == 140
    assert [one.finish_reason for one in sequences.values()].count("length") == 3


def test_one_that_waits_for_what_a_retracted_one_cannot_have_is_named():
    """What has arrived does not start while one is retracted, which can never be resumed beside it."""
    config = SglangConfig(
        disaggregation_mode="decode",
        page_size=4,
        max_running_requests=5,
        enable_priority_scheduling=True,
        clip_max_new_tokens_estimation=1,
        num_reserved_decode_tokens=10,
        disaggregation_decode_enable_radix_cache=True,
    )
    engine, sequences, coming = engine_of(config, 35), {}, [(0.513, "a"), (0.593, "b"), (1.1687, "c")]
    sizes = {"a": (53, 59, 30, 1, 2.2348), "b": (1, 52, None, 2, 1.1248), "c": (58, 2, 23, 1, 2.26943)}
    now = 0.0
    with pytest.raises(NeverAdmittedError, match="80 of 140 tokens of KV are available, nothing runs") as caught:
        for _ in range(400):
            while coming and coming[0][0] <= now:
                id = heapq.heappop(coming)[1]
                if id in sequences:
                    engine.end_load(sequences[id])
                    continue
                num_prompt, max_tokens, stop_after, priority, _ = sizes[id]
                names = [("shared", place) for place in range(num_prompt // 8)]
                given = {"stop_after": stop_after, "priority": priority, "names": names}
                sequences[id] = sequence(id, num_prompt, max_tokens, **given)
                engine.add(sequences[id])
            begun = engine.schedule(now, max_iterations=1)
            for loading in engine.outbox.take_loads():
                heapq.heappush(coming, (now + sizes[loading.id][4], loading.id))
            now = engine.complete().end if begun is not None else max(now, coming[0][0])
    assert caught.value.sequence is sequences["a"]


def test_a_prefill_worker_keeps_kv_until_it_was_read_and_needs_no_room_for_answers():
    engine = engine_of(PREFILL, 60)
    first, second = (sequence(id, 40, 1, is_decode=False) for id in ("a", "b"))
    engine.add(first)
    engine.add(second)
    begun = engine.schedule(0.0)
    assert begun.batch.chunks == [(first, 40)]
    assert engine.complete().finished == [first]
    assert (engine.num_free_blocks, engine.view().num_retained) == (20, 1)
    assert engine.schedule(1.0) is None
    engine.release_kept(first)
    assert engine.schedule(2.0).batch.chunks == [(second, 40)]
    assert engine.complete().finished == [second]
    engine.release_kept(second)
    assert engine.num_free_blocks == 60


@pytest.mark.parametrize("is_decode", [False, True])
def test_a_worker_refuses_the_other_part_of_a_request(is_decode):
    config = PREFILL if is_decode else DECODE
    with pytest.raises(ValueError, match=r"disaggregation_mode is (prefill|decode)"):
        engine_of(config, 100).add(sequence("a", 10, 5, is_decode=is_decode))
    with pytest.raises(ValueError, match="shared with another engine"):
        engine_of(SglangConfig(), 100).add(sequence("a", 10, 5, is_decode=is_decode))


decoding = st.builds(
    SglangConfig,
    disaggregation_mode=st.just("decode"),
    page_size=st.sampled_from([1, 1, 4]),
    max_running_requests=st.sampled_from([2, 5, 64]),
    num_reserved_decode_tokens=st.sampled_from([0, 3, 10]),
    disaggregation_decode_enable_radix_cache=st.sampled_from([False, False, True]),
    disaggregation_decode_extra_slots=st.sampled_from([None, 0, 1]),
    clip_max_new_tokens_estimation=st.sampled_from([1, 10, 4096]),
    enable_priority_scheduling=st.sampled_from([False, False, True]),
    disable_overlap_schedule=st.booleans(),
    scheduler_recv_interval=st.sampled_from([1, 1, 3]),
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
                "priority": rng.randrange(3),
                "load_s": dyadic(rng.choice([0.01, 0.3, 2.0]) * (0.5 + rng.random())),
                "is_lost": rng.random() < 0.1,
                "abort": now + dyadic(4 * rng.random()) if rng.random() < 0.2 else None,
            }
        )
    return requests


def drive(config, num_pages, requests, *, max_iterations):
    """Let an engine answer requests, and return what came of each, and the gaps between their tokens."""
    engine, order = engine_of(config, num_pages), itertools.count()
    to_do = [(request["arrival"], next(order), "add", request) for request in requests]
    to_do += [(request["abort"], next(order), "abort", request) for request in requests if request["abort"]]
    heapq.heapify(to_do)
    sequences, ends, now = {}, {}, 0.0

    def happen(time, kind, request):
        id = request["id"]
        if kind == "add":
            names = ("num_prompt", "max_tokens", "stop_after", "priority")
            shared = [("shared", place) for place in range(request["num_prompt"] // config.page_size // 2)]
            sequences[id] = sequence(id, names=shared, **{name: request[name] for name in names})
            engine.add(sequences[id])
        elif kind == "abort":
            engine.abort(sequences[id])
        else:
            over = engine.end_load(sequences[id], 0 if request["is_lost"] else None)
            ends.update({each.id: (time, each.finish_reason) for each in over})

    def follow_loads():
        for each in engine.outbox.take_loads():
            request = requests[each.id]
            heapq.heappush(to_do, (now + request["load_s"], next(order), "load", request))

    while True:
        if engine.step is None:
            while to_do and to_do[0][0] <= now:
                happen(now, *heapq.heappop(to_do)[2:])
            begun = engine.schedule(now, max_iterations=max_iterations)
            follow_loads()
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
    rows = {each.id: (each.first_token_s, each.num_preemptions, each.num_cached_blocks) for each in sequences.values()}
    return rows, ends, gaps_of(engine)


@settings(max_examples=worth(200), deadline=None)
@given(decoding, arriving(), st.sampled_from([140, 200, 1000]))
def test_every_request_ends_once_and_a_leap_is_many_iterations_at_once(config, requests, num_tokens):
    num_pages = num_tokens // config.page_size
    try:
        expected = drive(config, num_pages, requests, max_iterations=1)
    except EngineStoppedError:
        with pytest.raises(EngineStoppedError):
            drive(config, num_pages, requests, max_iterations=1000)
        return
    assert drive(config, num_pages, requests, max_iterations=1000) == expected
