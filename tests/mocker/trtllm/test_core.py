"""TensorRT-LLM's scheduler behind the contract of engines: the same decisions, in time, and leaps change nothing."""

import pytest
from hypothesis import given, settings

from mocker import BlockChain, Sequence, new_engine
from mocker.contract import NeverAdmittedError
from mocker.events import AllBlocksCleared, BlockRemoved, BlockStored
from mocker.tiers.config import HostMemory
from mocker.timing.constant import Constant
from mocker.trtllm.block_pool import OutOfBlocksError
from mocker.trtllm.config import TrtllmConfig
from tests.mocker.trtllm.driving import IS_COMPILED, decided, drive, scenarios
from tests.support.examples import worth


@pytest.mark.skipif(
    IS_COMPILED, reason="a compiled core cannot be watched; the same test runs with the interpreted one"
)
@settings(max_examples=worth(400), deadline=None)
@given(scenarios())
def test_an_engine_takes_the_decisions_of_the_scheduler(scenario):
    config, num_blocks, calls = scenario
    found = drive(config, num_blocks, calls, max_iterations=1)
    core = found.core
    if found.ended_by is not None:
        with pytest.raises(OutOfBlocksError, match=str(found.ended_by)[:20]):
            decided(config, num_blocks, calls, core.happened, core.num_asked + 1)
        return
    assert core.decisions == decided(config, num_blocks, calls, core.happened, core.num_asked)


@settings(max_examples=worth(400), deadline=None)
@given(scenarios())
def test_a_leap_is_many_steps_at_once(scenario):
    config, num_blocks, calls = scenario
    slow, fast = (drive(config, num_blocks, calls, max_iterations=most) for most in (1, 1000))
    assert str(fast.ended_by) == str(slow.ended_by)
    assert fast.log == slow.log
    assert fast.rows == slow.rows
    assert fast.gaps == slow.gaps
    assert fast.events == slow.events


TIMING = Constant(1.0, 1.0)


def engine_with(num_blocks=20, **changed):
    defaults = {"tokens_per_block": 4, "max_batch_size": 4, "max_num_tokens": 64, "disable_overlap_scheduler": True}
    return new_engine(TrtllmConfig(**(defaults | changed)), TIMING, num_blocks=num_blocks)


def sequence(id, prompt=8, output=4, ids=(), **more):
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain(list(ids)), **more)


def steps(engine, most=1000):
    """Run an engine to its end; return of each step what it computed, and who finished."""
    found, now = [], 0.0
    while (step := engine.schedule(now, max_iterations=most)) is not None:
        batch, count = step.batch, step.num_iterations
        output = engine.complete()
        now = output.end
        prompts = [(s.id, tokens) for s, tokens in batch.chunks]
        found.append((count, prompts, [s.id for s in batch.decodes], [s.id for s in output.finished]))
    return found


def test_decodes_leap_to_the_next_end():
    engine = engine_with()
    engine.add(sequence("a", output=3))
    engine.add(sequence("b", output=6))
    assert steps(engine) == [(1, [("a", 8), ("b", 8)], [], []), (2, [], ["a", "b"], ["a"]), (3, [], ["b"], ["b"])]
    assert engine.is_idle


def test_with_overlap_an_end_token_is_seen_a_step_late_and_an_end_by_length_is_not():
    engine = engine_with(disable_overlap_scheduler=False)
    engine.add(sequence("stops", output=9, stop_after=2))
    engine.add(sequence("ends", output=2))
    assert steps(engine, most=1) == [
        (1, [("stops", 8), ("ends", 8)], [], []),
        (1, [], ["stops", "ends"], ["stops", "ends"]),
        (1, [], ["stops"], []),
    ]


def test_a_prompt_starts_only_when_its_blocks_to_its_end_are_free():
    engine = engine_with(num_blocks=6)
    engine.add(sequence("a", prompt=8, output=8))
    engine.add(sequence("b", prompt=4, output=8))
    assert [finished for *_, finished in steps(engine)] == [[], ["a"], [], ["b"]]


def test_maximum_utilization_pauses_the_last_started():
    engine = engine_with(num_blocks=6, capacity_scheduler_policy="MAX_UTILIZATION", enable_block_reuse=False)
    sequences = [sequence("a", prompt=8, output=8), sequence("b", prompt=8, output=8)]
    for each in sequences:
        engine.add(each)
    found = steps(engine)
    assert [each.num_preemptions for each in sequences] == [0, 1]
    assert found[-2][1] == [("b", 13)]  # its prompt and the outputs that it had
    assert found[-1][3] == ["b"]


def test_equal_prompts_are_computed_once():
    engine = engine_with()
    for name in "ab":
        engine.add(sequence(name, prompt=9, ids=("x", "y")))
    assert [prompts for _, prompts, *_ in steps(engine)] == [[("a", 9)], [("b", 1)], [], []]
    assert engine.prefix_cache_stats.num_hits == 8


def test_events_name_what_is_stored_and_what_is_evicted_with_all_that_continues_it():
    engine = engine_with(num_blocks=4)
    engine.add(sequence("a", prompt=9, output=2, ids=("x", "y")))
    steps(engine)
    (stored,) = engine.outbox.take_events()
    assert (type(stored), stored.start, stored.stop, stored.keys()) == (BlockStored, 0, 2, ["x", "y"])
    engine.add(sequence("b", prompt=12, output=4, ids=("z",)))
    steps(engine)
    gone = [key for event in engine.outbox.take_events() if isinstance(event, BlockRemoved) for key in event.keys()]  # noqa: SIM118
    assert gone == ["y", "x"]
    assert engine.reset_prefix_cache()
    engine.add(sequence("c", output=1))
    steps(engine)
    assert engine.outbox.take_events()[0] == AllBlocksCleared()


def test_an_aborted_request_takes_part_once_more_and_leaves():
    engine = engine_with()
    a, b = sequence("a", output=9), sequence("b", output=3)
    engine.add(a)
    engine.add(b)
    engine.schedule(0.0)
    engine.complete()
    engine.abort(a)
    assert engine.sequences() == [b]
    step = engine.schedule(1.0)
    assert [each.id for each in step.batch.decodes] == ["a", "b"]
    assert engine.decoded() == [b]
    assert engine.complete().finished == []
    assert engine.num_free_blocks == 20 - 3
    assert steps(engine)[-1][3] == ["b"]


def test_a_request_that_is_aborted_when_nothing_else_runs_leaves_an_idle_engine():
    engine = engine_with()
    engine.add(a := sequence("a"))
    engine.abort(a)
    steps(engine)
    assert engine.is_idle
    assert engine.num_free_blocks == engine.num_blocks


def test_a_pause_of_new_requests_leaves_running_ones_alone():
    engine = engine_with()
    engine.add(sequence("a", output=3))
    engine.schedule(0.0)
    engine.complete()
    engine.add(sequence("b", output=1))
    engine.pause("new")
    assert steps(engine) == [(2, [], ["a"], ["a"])]
    assert engine.num_waiting == 1
    engine.resume()
    assert steps(engine) == [(1, [("b", 8)], [], ["b"])]


@pytest.mark.parametrize("has_overlap", [True, False])
def test_a_pause_of_all_leaves_everyone_alone(has_overlap):
    engine = engine_with(disable_overlap_scheduler=not has_overlap)
    engine.add(sequence("a", output=5))
    engine.schedule(0.0)
    engine.pause("all")
    engine.complete()
    assert len(steps(engine)) == has_overlap  # the batch ahead
    engine.resume()
    assert steps(engine)[-1][3] == ["a"]


def test_a_paused_request_that_has_outgrown_a_step_is_never_admitted_again():
    engine = engine_with(
        num_blocks=6, max_num_tokens=10, capacity_scheduler_policy="MAX_UTILIZATION", enable_block_reuse=False
    )
    a, b = sequence("a", prompt=8, output=8), sequence("b", prompt=8, output=8)
    engine.add(a)
    engine.add(b)
    with pytest.raises(NeverAdmittedError, match="enable_chunked_context is false") as caught:
        steps(engine)
    assert caught.value.sequence is b
    engine.abort(b)
    steps(engine)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"enable_chunked_context": True, "chunk_unit_size": 2}, "expected at least tokens_per_block"),
        ({"max_batch_size": 0}, "max_batch_size"),
    ],
)
def test_settings_that_are_not_modelled_are_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        engine_with(**asked)


def test_memory_that_is_not_modelled_is_refused():
    with pytest.raises(ValueError, match="not modelled yet for TensorRT-LLM"):
        new_engine(TrtllmConfig(), TIMING, num_blocks=9, host=HostMemory(num_chunks=4))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"is_remote_prefill": True}, "is at another engine; expected server_role generation, not None"),
        ({"adapter": "one"}, "adapter one is not modelled yet"),
        ({"prompt": 65}, "without enable_chunked_context it must be at most max_num_tokens \\(64\\)"),
        ({"prompt": 50, "output": 40}, "need 23 KV blocks; the cache has 20"),
        ({"prompt": 60}, "reaches max_seq_len \\(60\\)"),
    ],
)
def test_requests_that_never_fit_are_refused(asked, message):
    engine = engine_with(max_seq_len=60 if asked == {"prompt": 60} else None)
    with pytest.raises(ValueError, match=message):
        engine.add(sequence("a", **asked))
