"""An engine that counts the tokens of each step: what one in closed form does, and what speculation adds to it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.counted_engine import CountedEngine
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.core import VllmCore
from tests.support.examples import worth

REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(0, 3), st.floats(0, 0.3), st.booleans()),
    min_size=1,
    max_size=12,
)
"""Prompt, answer, prefix group, arrival (s), whether it stops before its limit."""
TIMES = TimingConfig(timing="polynomial")


def sequences(requests):
    made = []
    for number, (prompt, answer, group, arrival, stops) in enumerate(requests):
        chain = BlockChain([(group, block) for block in range(prompt // 4)], prompt // 4)
        stop = max(answer // 2, 1) if stops else None
        one = Sequence(number, num_prompt=prompt, max_tokens=answer, chain=chain, stop_after=stop)
        made.append((arrival, one))
    return sorted(made, key=lambda pair: pair[0])


def drive(engine, requests):
    """Run to the end; return when each step ended and what it brought, and the gap before each token."""
    waiting, now, steps = sequences(requests), 0.0, []
    everyone = [sequence for _, sequence in waiting]
    while waiting or not engine.is_idle:
        while waiting and waiting[0][0] <= now:
            engine.add(waiting.pop(0)[1])
        step = engine.schedule(now)
        if step is None:
            if not waiting:
                break
            now = waiting[0][0]
            continue
        output, now = engine.complete(), step.end
        steps.append((now, [s.id for s in output.sampled], sorted(s.id for s in output.finished)))
    gaps = []
    rows = engine.take_gaps()
    for first, slope, curve, num_steps, tokens in zip(*[iter(rows)] * 5, strict=True):
        for step in range(int(num_steps)):
            gaps += [first + slope * step + curve * step * step] * int(tokens)
    return steps, sorted(gaps), everyone


def config(**changes):
    given = {"block_size": 4, "num_gpu_blocks": 40, "max_num_seqs": 4, "max_num_batched_tokens": 24}
    return EngineConfig(**(given | changes))


@settings(max_examples=worth(120))
@given(REQUESTS, st.booleans(), st.integers(16, 40))
def test_counted_steps_are_those_of_the_closed_form(requests, is_async, num_blocks):
    engine = config(async_scheduling=is_async, num_gpu_blocks=num_blocks + 6)
    timing = resolve(engine, TIMES).timing
    plain = new_engine(engine, timing, num_blocks=num_blocks + 6)
    counted = CountedEngine(engine, VllmCore(engine, num_blocks + 6, is_counted=True), timing)
    (steps, gaps, _), (same_steps, same_gaps, _) = drive(plain, requests), drive(counted, requests)
    assert [step[1:] for step in same_steps] == [step[1:] for step in steps]
    assert [step[0] for step in same_steps] == pytest.approx([step[0] for step in steps])
    assert same_gaps == pytest.approx(gaps)


def speculating(num_drafts, rates, *, is_async=True, seed=0, **changes):
    engine = config(num_speculative_tokens=num_drafts, async_scheduling=is_async, max_num_batched_tokens=64, **changes)
    timing = resolve(EngineConfig(), TIMES).timing
    return new_engine(engine, timing, num_blocks=engine.num_gpu_blocks, acceptance=rates, seed=seed)


@settings(max_examples=worth(120))
@given(REQUESTS, st.booleans(), st.integers(1, 4), st.sampled_from(["eagle", "draft_model", "mtp"]))
def test_every_token_of_an_answer_has_its_gap(requests, is_async, num_drafts, method):
    engine = speculating(num_drafts, (0.7, 0.5, 0.3, 0.2)[:num_drafts], is_async=is_async, speculative_method=method)
    _, gaps, everyone = drive(engine, requests)
    assert all(sequence.is_over and sequence.num_known == sequence.num_total for sequence in everyone)
    assert len(gaps) == sum(sequence.num_total - sequence.num_prompt - 1 for sequence in everyone)
    assert engine.num_free_blocks == engine.num_blocks


@pytest.mark.parametrize("is_async", [False, True])
def test_drafts_that_are_all_accepted_save_steps_and_others_do_not(is_async):
    requests = [(8, 24, 0, 0.0, False)]
    plain = len(
        drive(
            new_engine(config(async_scheduling=is_async), resolve(EngineConfig(), TIMES).timing, num_blocks=40),
            requests,
        )[0]
    )
    everything = speculating(3, (1.0, 1.0, 1.0), is_async=is_async)
    nothing = speculating(3, (0.0, 0.0, 0.0), is_async=is_async)
    assert len(drive(nothing, requests)[0]) == plain
    num_steps = 1 + -(-23 // 4) + is_async  # with one that was scheduled before the end was known
    assert len(drive(everything, requests)[0]) == num_steps
    assert (everything.draft_counts.steps, everything.draft_counts.batches) == (6, 6)
    assert nothing.draft_counts.accepted == [0, 0, 0]


def test_what_is_accepted_does_not_depend_on_who_else_runs():
    alone = speculating(3, (0.7, 0.5, 0.3))
    drive(alone, [(8, 24, 0, 0.0, False)])
    crowd = speculating(3, (0.7, 0.5, 0.3), num_gpu_blocks=400, max_num_seqs=16)
    drive(crowd, [(8, 24, 0, 0.0, False)] * 8)
    eight = [speculating(3, (0.7, 0.5, 0.3)) for _ in range(8)]
    counts = Counter()
    for number, engine in enumerate(eight):
        engine.add(Sequence(number, num_prompt=8, max_tokens=24, chain=BlockChain([])))
        now = 0.0
        while (step := engine.schedule(now)) is not None:
            engine.complete()
            now = step.end
        counts.update(enumerate(engine.draft_counts.accepted))
    together = [sum(engine.draft_counts.accepted[place] for engine in eight) for place in range(3)]
    assert crowd.draft_counts.accepted == together
    assert alone.draft_counts.accepted == eight[0].draft_counts.accepted


def test_seeds_draw_differently():
    requests = [(8, 200, 0, 0.0, False)]
    found = {
        tuple(drive_counts(speculating(3, (0.7, 0.5, 0.3), seed=seed, num_gpu_blocks=80), requests))
        for seed in range(4)
    }
    assert len(found) > 1


def drive_counts(engine, requests):
    drive(engine, requests)
    return engine.draft_counts.accepted
