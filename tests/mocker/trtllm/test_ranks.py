"""TensorRT-LLM with attention DP behind the contract of engines: ranks step together, and the balance holds prompts back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, Sequence, new_engine
from mocker.timing.constant import Constant
from mocker.trtllm.config import TrtllmConfig
from tests.mocker.trtllm.driving import configs, workloads
from tests.support.examples import worth

TIMING = Constant(0.25, 0.125)
"""A step lasts 0.25 s if a rank computes prompts in it, and 0.125 s if it decodes; both if one rank does both."""


def engine_with(num_ranks=2, num_blocks=100, **changed):
    defaults = {
        "tokens_per_block": 4,
        "max_batch_size": 4,
        "disable_overlap_scheduler": True,
        "enable_block_reuse": False,
    }
    config = TrtllmConfig(enable_attention_dp=True, **(defaults | changed))
    return new_engine(config, TIMING, num_blocks=num_blocks, num_ranks=num_ranks, kv_events=False)


def sequence(id, prompt=8, output=4):
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain([]))


def steps(engine, later=()):
    """Run an engine to its end; return of each step how long it took, its prompts, its decodes, and who finished.

    `later` says after how many steps which sequences are added.
    """
    found, now, later = [], 0.0, dict(later)
    while True:
        for each in later.pop(len(found), []):
            engine.add(each)
        if (step := engine.schedule(now, max_iterations=1000)) is None:
            return found
        batch = step.batch
        output = engine.complete()
        prompts, decodes = sorted(s.id for s, _ in batch.chunks), sorted(s.id for s in batch.decodes)
        found.append((output.end - now, prompts, decodes, sorted(s.id for s in output.finished)))
        now = output.end


def test_a_step_lasts_as_long_as_that_of_the_slowest_rank():
    engine = engine_with()
    engine.add(sequence("a"))
    engine.add(sequence("b", output=2))
    assert steps(engine, {1: [sequence("c", output=2)]}) == [
        (0.25, ["a", "b"], [], []),
        # c joins the rank of a: both have 8 tokens of prompts and one request, and the first goes first.
        (0.375, ["c"], ["a", "b"], ["b"]),
        (0.125, [], ["a", "c"], ["c"]),
        (0.125, [], ["a"], ["a"]),
    ]
    assert engine.is_idle
    assert engine.num_free_blocks == engine.num_blocks == 200


def test_the_longest_prompts_go_to_the_ranks_with_the_fewest_tokens():
    engine = engine_with()
    for id, prompt in (("a", 10), ("b", 40), ("c", 20), ("d", 30)):
        engine.add(sequence(id, prompt=prompt))
    engine.schedule(0.0)
    # 40 to the first rank, 30 to the second; then 20 to the second, and 10 to the first.
    ranks = engine._core.scheduler.ranks
    assert [[request.id for request in rank.active] for rank in ranks] == [["b", "a"], ["d", "c"]]


def prompts_by_step(engine, later):
    return [prompts for _, prompts, _, _ in steps(engine, later)]


def test_the_balance_holds_prompts_until_its_time_is_over():
    balanced = {"attention_dp_enable_balance": True, "attention_dp_timeout_iters": 3}
    engine = engine_with(**balanced)
    engine.add(sequence("a", output=9))
    engine.add(sequence("b", output=9))
    # The rank of b has no prompt. c waits in steps 2 and 3, and not in the third: 3 is not less than 3.
    found = prompts_by_step(engine, {1: [sequence("c", output=2)]})
    assert found[:5] == [["a", "b"], [], [], ["c"], []]


def test_the_balance_lets_prompts_run_when_all_ranks_have_some_and_have_waited_for_more():
    balanced = {
        "attention_dp_enable_balance": True,
        "attention_dp_timeout_iters": 9,
        "attention_dp_batching_wait_iters": 2,
    }
    engine = engine_with(**balanced)
    engine.add(sequence("a", output=12))
    engine.add(sequence("b", output=12))
    # c waits for a prompt on the other rank. With d there is one, and both wait two steps for more.
    found = prompts_by_step(engine, {1: [sequence("c", output=2)], 3: [sequence("d", output=2)]})
    assert found[:7] == [["a", "b"], [], [], [], [], ["c", "d"], []]


def test_the_balance_holds_nothing_while_a_rank_generates_nothing():
    engine = engine_with(attention_dp_enable_balance=True)
    engine.add(sequence("a", output=9))
    # The second rank has a dummy, which counts as generating: c goes there and has a prompt where a has none.
    found = prompts_by_step(engine, {2: [sequence("c", output=2)]})
    assert found[:4] == [["a"], [], ["c"], []]


def test_settings_that_have_no_effect_are_refused():
    with pytest.raises(ValueError, match="attention_dp_enable_balance is true; expected enable_attention_dp"):
        TrtllmConfig(attention_dp_enable_balance=True)
    with pytest.raises(ValueError, match="batch_wait_timeout_iters is 3 with enable_attention_dp"):
        TrtllmConfig(enable_attention_dp=True, batch_wait_timeout_iters=3)


def test_routers_that_follow_caches_are_refused():
    with pytest.raises(ValueError, match="KV events of ranks with enable_attention_dp are not modelled yet"):
        new_engine(TrtllmConfig(enable_attention_dp=True), TIMING, num_blocks=99, num_ranks=2)


@st.composite
def scenarios(draw):
    """Draw settings, the number of ranks, blocks of each, and a workload."""
    config = replace(draw(configs), batch_wait_timeout_iters=0, enable_attention_dp=True)
    config = replace(
        config,
        attention_dp_enable_balance=draw(st.booleans()),
        attention_dp_timeout_iters=draw(st.integers(0, 6)),
        attention_dp_batching_wait_iters=draw(st.integers(0, 4)),
    )
    calls = draw(workloads(config))
    most = max([call.prompt + call.output for call in calls], default=1)
    num_blocks = 2 * -(-most // config.tokens_per_block) + draw(st.integers(0, 30 // config.tokens_per_block + 2))
    return config, draw(st.sampled_from([2, 3, 4])), num_blocks, calls


@settings(max_examples=worth(400), deadline=None)
@given(scenarios())
def test_every_request_ends_once(scenario):
    config, num_ranks, num_blocks, calls = scenario
    engine = new_engine(config, TIMING, num_blocks=num_blocks, num_ranks=num_ranks, kv_events=False)
    to_do = sorted(
        [(call.at_s, 0, call.number, call) for call in calls]
        + [(call.aborted_s, 1, call.number, call) for call in calls if call.aborted_s is not None]
    )
    sequences, ended, now = {}, [], 0.0
    while to_do or not engine.is_idle:
        while to_do and to_do[0][0] <= now:
            _, kind, _, call = to_do.pop(0)
            if kind == 0:
                sequences[call.number] = call.sequence(config.tokens_per_block)
                engine.add(sequences[call.number])
            else:
                engine.abort(sequences[call.number])
        if engine.schedule(now) is None:
            assert to_do or engine.is_idle, "nothing can happen any more, but requests are left"
            now = max(now, to_do[0][0]) if to_do else now
            continue
        output = engine.complete()
        now = output.end
        ended += [each.id for each in output.finished]
    aborted = {call.number for call in calls if call.aborted_s is not None}
    assert len(ended) == len(set(ended))
    assert set(sequences) - aborted <= set(ended) <= set(sequences)
    assert engine.num_free_blocks == engine.num_blocks
    for call in calls:
        if call.number not in aborted:
            limit = (config.max_seq_len or 999) - call.prompt
            expected = min(call.output, call.stop or call.output, limit)
            assert sequences[call.number].num_known == call.prompt + expected
