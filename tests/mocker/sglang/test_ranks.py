"""SGLang with attention DP: ranks decide by themselves, step together, and get requests from a controller."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, Sequence, new_engine
from mocker.contract import EngineStoppedError
from mocker.sglang.config import SglangConfig
from mocker.sglang.controller import PUBLISH_INTERVAL
from mocker.timing.constant import Constant
from tests.mocker.sglang.test_engine import chain_of, configs, gaps_of, happenings, ordered, seldom, workloads
from tests.support.examples import worth

TIMING = Constant(0.25, 0.125)
"""A step lasts 0.25 s if a rank computes prompts in it, and 0.125 s longer if that rank also decodes."""


def engine_with(num_ranks=2, num_blocks=1000, **changed):
    config = SglangConfig(attn_dp_size=num_ranks, **({"disable_radix_cache": True} | changed))
    return new_engine(config, TIMING, num_blocks=num_blocks, num_ranks=num_ranks, kv_events=False)


def sequence(id, prompt=8, output=3):
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain([]))


def steps(engine, later=()):
    """Run an engine to its end; return of each step how long it took, its prompts, its decodes, and who finished.

    `later` are sequences that are added after so many steps.
    """
    found, now, later = [], 0.0, list(later)
    while (step := engine.schedule(now, max_iterations=1000)) is not None:
        batch = step.batch
        while later and later[0][0] == len(found) + 0.5:  # while the step is computed
            engine.add(later.pop(0)[1])
        output = engine.complete()
        prompts, decodes = [s.id for s, _ in batch.chunks], [s.id for s in batch.decodes]
        found.append((output.end - now, prompts, decodes, [s.id for s in output.finished]))
        now = output.end
    return found


def ranks_of(engine):
    """Return which sequences each rank has."""
    return [[sequence.id for sequence in rank.sequences()] for rank in engine._core.ranks]


def test_while_one_rank_computes_a_prompt_the_other_decodes_in_the_same_step():
    engine = engine_with(disable_overlap_schedule=True)
    engine.add(sequence("a"))
    engine.add(sequence("b"))
    # c goes to the rank of a, which decodes again when the prompt of c is computed.
    assert steps(engine, [(1.5, sequence("c", output=2))]) == [
        (0.25, ["a", "b"], [], []),
        (0.125, [], ["a", "b"], []),
        (0.25, ["c"], ["b"], ["b"]),
        (0.125, [], ["a", "c"], ["a", "c"]),
    ]
    assert engine.is_idle
    assert engine.num_free_blocks == engine.num_blocks == 2000


def test_with_overlap_a_rank_without_requests_has_an_empty_batch_ahead_too():
    engine = engine_with()
    engine.add(sequence("a", output=5))
    # The batches of the third step are closed when the second starts, and b comes after that.
    found = steps(engine, [(1.5, sequence("b", output=1))])
    assert [prompts for _, prompts, _, _ in found] == [["a"], [], [], ["b"], []]
    assert [duration for duration, _, _, _ in found] == [0.25, 0.125, 0.125, 0.25, 0.125]


def test_a_rank_has_its_share_of_the_settings():
    config = SglangConfig(attn_dp_size=8, max_running_requests=100, chunked_prefill_size=8192)
    own = config.of_rank(8)
    assert (own.chunk_size, own.max_running_requests, own.max_prefill_tokens) == (1024, 12, 16384)
    assert own.schedule_conservativeness == pytest.approx(0.3)
    assert SglangConfig(max_running_requests=3, chunked_prefill_size=-1).of_rank(8).max_running_requests == 1
    assert SglangConfig(chunked_prefill_size=-1).of_rank(8).chunk_size is None


def test_a_rank_may_not_compute_less_than_a_page():
    with pytest.raises(ValueError, match=r"chunked_prefill_size \(64\) is divided among 8 ranks.*page_size \(16\)"):
        SglangConfig(attn_dp_size=8, chunked_prefill_size=64, page_size=16)


@pytest.mark.parametrize("method", ["auto", "round_robin"])
def test_requests_go_to_the_ranks_in_turn(method):
    engine = engine_with(num_ranks=3, load_balance_method=method)
    for id in range(5):
        engine.add(sequence(id, prompt=100 if id == 0 else 8))
    assert ranks_of(engine) == [[0, 3], [1, 4], [2]]


def test_requests_go_to_the_rank_with_the_fewest():
    engine = engine_with(load_balance_method="total_requests", disable_overlap_schedule=True)
    engine.add(sequence("short", output=1))
    engine.add(sequence("a", output=9))
    steps_before = [engine.schedule(0.0), engine.complete()]
    assert all(steps_before)
    # Ranks told what they have before the first tokens were known: one request each.
    engine.add(sequence("b", output=9))
    engine.add(sequence("c", output=9))
    assert ranks_of(engine) == [["b"], ["a", "c"]]
    engine.schedule(1.0)
    engine.complete()
    # The prompts of b and c ran, and neither is merged with what runs yet: rank 0 tells 0 requests, rank 1 tells 1.
    engine.add(sequence("d", output=9))
    engine.add(sequence("e", output=9))
    assert ranks_of(engine) == [["b", "d", "e"], ["a", "c"]]


def test_requests_go_to_the_rank_with_the_fewest_tokens():
    engine = engine_with(load_balance_method="total_tokens")
    for id, prompt in (("a", 100), ("b", 30), ("c", 60), ("d", 20), ("e", 2)):
        engine.add(sequence(id, prompt=prompt))
    assert ranks_of(engine) == [["a", "e"], ["b", "c", "d"]]


def test_a_rank_that_decodes_tells_its_load_seldom():
    engine, now = engine_with(load_balance_method="total_requests", disable_overlap_schedule=True), 0.0
    engine.add(sequence("a", output=2))
    engine.add(sequence("b", output=90))
    for _ in range(2 + PUBLISH_INTERVAL):
        engine.schedule(now)
        now = engine.complete().end
    # Rank 0 has told by now that it has nothing.
    engine.add(sequence("c"))
    assert ranks_of(engine) == [["c"], ["b"]]


def test_routers_that_follow_caches_are_refused():
    with pytest.raises(ValueError, match="KV events of ranks with attention DP are not modelled yet"):
        new_engine(SglangConfig(attn_dp_size=2), TIMING, num_blocks=99, num_ranks=2)


def drive(config, num_blocks, requests, num_ranks):
    """Run a workload on an engine, each request once for each rank; return what came of each, and the gaps."""
    engine = new_engine(config, TIMING, num_blocks=num_blocks, num_ranks=num_ranks, kv_events=False)
    to_do, sequences, ends, now = happenings(requests), {}, [], 0.0

    def happen(kind, request):
        for rank in range(num_ranks):
            id = request["id"], rank
            if kind == "add":
                names = ("num_prompt", "max_tokens", "stop_after", "priority")
                chain = chain_of(request, config.page_size)
                sequences[id] = Sequence(request["id"], chain=chain, **{name: request[name] for name in names})
                sequences[id].payload = id
                engine.add(sequences[id])
            else:
                engine.abort(sequences[id])

    while True:
        while to_do and to_do[0][0] <= now:
            happen(*to_do.pop(0)[1:])
        step = engine.schedule(now)
        if step is None:
            if not to_do:
                break
            now = to_do[0][0]
            continue
        while to_do and to_do[0][0] < step.end:
            happen(*to_do.pop(0)[1:])
        output = engine.complete()
        now = output.end
        ends += [(each.payload, now, each.finish_reason, each.is_failed) for each in output.finished]
    assert engine.is_idle
    assert engine.num_free_blocks == engine.num_blocks
    rows = {
        id: (sequence.first_token_s, sequence.num_preemptions, sequence.num_known) for id, sequence in sequences.items()
    }
    return rows, sorted(ends), gaps_of(engine)


@settings(max_examples=worth(300), deadline=None)
@given(st.one_of(configs, ordered, seldom), st.integers(40, 300), workloads(), st.sampled_from([2, 3]))
def test_ranks_with_equal_requests_do_what_one_engine_does(config, num_tokens, requests, num_ranks):
    config = replace(config, max_running_requests=4 * num_ranks, chunked_prefill_size=num_ranks * 40)
    longest = max(request["num_prompt"] + request["max_tokens"] for request in requests)
    num_pages = -(-max(num_tokens, longest + 64) // config.page_size) + 2
    try:
        alone = drive(config.of_rank(num_ranks), num_pages, requests, 1)
    except EngineStoppedError:
        with pytest.raises(EngineStoppedError):
            drive(replace(config, attn_dp_size=num_ranks), num_pages, requests, num_ranks)
        return
    rows, ends, gaps = drive(replace(config, attn_dp_size=num_ranks), num_pages, requests, num_ranks)
    for rank in range(num_ranks):
        assert {id: row for (id, its_rank), row in rows.items() if its_rank == rank} == {
            id: row for (id, _), row in alone[0].items()
        }
        assert [(id, *end) for (id, its_rank), *end in ends if its_rank == rank] == [
            (id, *end) for (id, _), *end in alone[1]
        ]
    assert gaps == sorted(alone[2] * num_ranks)


@settings(max_examples=worth(300), deadline=None)
@given(
    st.one_of(configs, seldom),
    workloads(),
    st.sampled_from([2, 4]),
    st.sampled_from(["round_robin", "total_requests", "total_tokens"]),
)
def test_every_request_ends_once(config, requests, num_ranks, method):
    config = replace(config, attn_dp_size=num_ranks, load_balance_method=method, chunked_prefill_size=160)
    engine = new_engine(config, TIMING, num_blocks=2000 // config.page_size, num_ranks=num_ranks, kv_events=False)
    to_do, sequences, ended, now = happenings(requests), {}, [], 0.0
    while to_do or not engine.is_idle:
        now = max(now, to_do[0][0]) if engine.is_idle else now
        while to_do and to_do[0][0] <= now:
            _, kind, request = to_do.pop(0)
            if kind == "add":
                names = ("num_prompt", "max_tokens", "stop_after", "priority")
                made = Sequence(
                    request["id"], chain=chain_of(request, config.page_size), **{name: request[name] for name in names}
                )
                sequences[request["id"]] = made
                engine.add(made)
            else:
                engine.abort(sequences[request["id"]])
        if engine.schedule(now) is not None:
            output = engine.complete()
            now = output.end
            ended += [each.id for each in output.finished]
    aborted = {request["id"] for request in requests if request["abort"] < math.inf}
    assert len(ended) == len(set(ended))
    assert set(sequences) - aborted <= set(ended) <= set(sequences)
    assert engine.num_free_blocks == engine.num_blocks
    for request in requests:
        if request["id"] not in aborted:
            expected = min(request["max_tokens"], request["stop_after"] or request["max_tokens"])
            assert sequences[request["id"]].num_known == request["num_prompt"] + expected
