"""Which requests run together if each may need a LoRA adapter, and what a paused scheduler does.

The rule is vLLM's (`Scheduler.schedule`): a request at the head of the queue whose adapter would be one too many beside
those of the requests that have tokens in this iteration is skipped; those behind it are not held up.
"""

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve


def made(max_loras=None, **settings):
    adapters = {} if max_loras is None else {"enable_lora": True, "max_loras": max_loras}
    config = EngineConfig(**({"block_size": 16, "num_gpu_blocks": 400} | adapters | settings))
    return new_engine(config, resolve(config).timing, num_blocks=config.num_gpu_blocks)


def sequence(id, adapter="", output=3, prompt=20):
    return Sequence(id, num_prompt=prompt, max_tokens=output, chain=BlockChain([], 0), adapter=adapter)


def admissions(engine):
    """Run until nothing is left; return the requests that each step started, those of steps that start none left out."""
    started, now = [], 0.0
    while (step := engine.schedule(now)) is not None:
        now = step.end
        if step.batch.admitted:
            started.append([one.id for one in step.batch.admitted])
        engine.complete()
    return started


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_request_whose_adapter_is_one_too_many_waits_and_those_behind_it_do_not(async_scheduling):
    engine = made(2, async_scheduling=async_scheduling)
    for id, adapter in [("a1", "a"), ("b1", "b"), ("c1", "c"), ("plain", ""), ("a2", "a"), ("d1", "d")]:
        engine.add(sequence(id, adapter))
    # Those of a and b end together; then there are seats for c and d.
    assert admissions(engine) == [["a1", "b1", "plain", "a2"], ["c1", "d1"]]


def test_a_skipped_request_starts_as_soon_as_an_adapter_is_no_longer_in_use():
    engine = made(1, async_scheduling=False)
    engine.add(sequence("short", "a", output=2))
    engine.add(sequence("long", "a", output=5))
    engine.add(sequence("other", "b", output=1))
    engine.add(sequence("plain", output=9))
    assert admissions(engine) == [["short", "long", "plain"], ["other"]]
    assert not engine._core.waiting


def test_without_a_limit_any_adapters_run_together():
    engine = made(None)
    for id in "abcd":
        engine.add(sequence(id, id))
    assert admissions(engine) == [list("abcd")]


def test_a_request_that_is_loading_needs_a_seat_for_its_adapter_when_it_starts_to_run():
    engine = made(1, kv_role="kv_consumer", async_scheduling=False)
    remote = Sequence(
        "remote", num_prompt=20, max_tokens=2, chain=BlockChain([], 0), adapter="a", is_remote_prefill=True
    )
    engine.add(remote)
    assert engine.schedule(0.0) is None and engine.outbox.take_loads() == [remote]
    engine.add(sequence("here", "b", output=4))
    step = engine.schedule(0.0)
    engine.complete()
    engine.end_load(remote)
    starts = []
    while (step := engine.schedule(step.end)) is not None:
        starts += [one.id for one in step.batch.admitted]
        engine.complete()
        if "remote" in starts:
            assert not any(one.id == "here" for one in engine._core.running)
    assert starts == ["remote"]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_paused_for_new_requests_those_that_run_end_and_the_others_wait(async_scheduling):
    engine = made(async_scheduling=async_scheduling)
    engine.add(sequence("first"))
    step = engine.schedule(0.0)
    engine.pause("new")
    engine.add(sequence("second"))
    engine.complete()
    assert admissions(engine) == []
    assert [one.id for one in engine._core.waiting] == ["second"]
    engine.resume()
    assert admissions(engine) == [["second"]]
    assert step.batch.admitted[0].is_over


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_paused_for_all_requests_nothing_is_scheduled_and_nothing_is_lost(async_scheduling):
    engine = made(async_scheduling=async_scheduling)
    running = sequence("running", output=6)
    engine.add(running)
    now, num_steps = 0.0, 0
    for _ in range(2):
        now = engine.schedule(now).end
        engine.complete()
        num_steps += 1
    engine.pause("all")
    while (step := engine.schedule(now)) is not None:  # the batch that was closed ahead
        now, num_steps = step.end, num_steps + 1
        engine.complete()
    assert not running.is_over and engine._core.running == [running]
    engine.resume()
    while (step := engine.schedule(now)) is not None:
        now, num_steps = step.end, num_steps + 1
        engine.complete()
    assert running.is_over and num_steps == 6
