"""Versions of vLLM: a row of switches for each, read from the settings of an engine."""

import math

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.speculation.drafter import Drafter
from mocker.tiers.config import HostMemory
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.core import VllmCore
from mocker.vllm.versions import NEWEST, RULES, version_of

TIMING = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=250.0)


def engine(*, host=None, **settings):
    config = EngineConfig(block_size=16, **({"num_gpu_blocks": 100, "async_scheduling": False} | settings))
    return new_engine(config, resolve(config, TIMING).timing, num_blocks=config.num_gpu_blocks, host=host)


def prompt(id, num_prompt=64, max_tokens=4, name=None, **facts):
    chain = BlockChain([(name or id, place) for place in range(num_prompt // 16)])
    return Sequence(id, num_prompt=num_prompt, max_tokens=max_tokens, chain=chain, **facts)


def steps_of(made, now=0.0):
    """Run until nothing is left; return of each step the requests that compute prompts in it, and how long it took (s)."""
    found = []
    while not made.is_idle:
        step = made.schedule(now)
        if step is None:
            now = made.wake_s
            continue
        found.append(([sequence.id for sequence, _ in step.batch.chunks], step.end - now))
        now = made.complete().end
    made.schedule(now)
    return found, now


def test_the_newest_version_is_the_default_and_the_last_row():
    assert EngineConfig().rules == RULES[NEWEST]
    assert list(RULES)[-1] == NEWEST


@pytest.mark.parametrize(("release", "version"), [("0.33.0", "0.33"), ("0.32", "0.32"), ("0.32.1.dev3+g12", "0.32")])
def test_a_release_follows_the_rules_of_its_version(release, version):
    assert version_of(release) == version


@pytest.mark.parametrize(
    ("release", "named", "nearest"),
    [
        ("0.31.2", "vLLM 0.31.2", " (the nearest is 0.32)"),
        ("0.330.0", "vLLM 0.330.0", " (the nearest is 0.33)"),
        ("0.34.0rc1", "vLLM 0.34.0rc1", " (the nearest is 0.33)"),
        ("main", "vLLM main", ""),
        ("", "a vLLM whose version it does not name", ""),
        (None, "a vLLM whose version it does not name", ""),
    ],
)
def test_a_release_whose_rules_are_not_known_is_refused_with_the_nearest(release, named, nearest):
    with pytest.raises(ValueError) as refused:
        version_of(release)
    assert str(refused.value) == (
        f"{named}; expected 0.32 or 0.33, whose rules are known: choose one of them with --engine-version{nearest}, "
        "and its rules are assumed"
    )


@pytest.mark.parametrize(
    "settings",
    [{"prefill_schedule_interval": 2}, {"sync_load_budget_bytes": 1, "num_host_blocks": 4}],
    ids=["interval", "budget"],
)
def test_a_setting_that_a_version_does_not_have_is_refused(settings):
    EngineConfig(**settings)
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is .*engine_version is 0.32"):
        EngineConfig(engine_version="0.32", **settings)


def test_an_interval_with_data_parallel_ranks_is_refused():
    with pytest.raises(ValueError, match="prefill_schedule_interval is 3, and dp_size is 2; expected 1"):
        EngineConfig(prefill_schedule_interval=3, dp_size=2)


@pytest.mark.parametrize(("interval", "starts"), [(1, [0, 1]), (4, [0, 4])])
def test_steps_hold_prefills_until_the_interval_is_over(interval, starts):
    made = engine(prefill_schedule_interval=interval)
    made.add(prompt("first", max_tokens=9))
    made.schedule(0.0)
    made.add(prompt("second"))
    now = made.complete().end
    found = [["first"], *[ids for ids, _ in steps_of(made, now)[0]]]
    assert [place for place, ids in enumerate(found) if ids] == starts


def test_one_that_waits_for_a_seat_of_its_adapter_does_not_end_the_interval():
    made = engine(prefill_schedule_interval=4, enable_lora=True, max_loras=1)
    made.add(prompt("first", max_tokens=9, adapter="a"))
    made.add(prompt("other", adapter="b"))
    made.schedule(0.0)
    made.add(prompt("third"))
    found = [["first"], *[ids for ids, _ in steps_of(made, made.complete().end)[0]]]
    assert {place: ids for place, ids in enumerate(found) if ids} == {0: ["first"], 4: ["third"], 9: ["other"]}


def test_nothing_is_held_where_nobody_decodes():
    made = engine(prefill_schedule_interval=9, max_num_batched_tokens=256)
    made.add(prompt("long", num_prompt=1024))
    assert [ids for ids, _ in steps_of(made)[0]] == [["long"]] * 4 + [[]] * 3


def test_by_priority_those_behind_one_that_preempts_itself_get_their_tokens():
    starved = {}
    for version in RULES:
        made = engine(num_gpu_blocks=4, scheduling_policy="priority", engine_version=version)
        made.add(prompt("a", 14, priority=0))
        made.add(prompt("low", 15, priority=5))
        made.schedule(0.0)
        made.add(prompt("c", 16, priority=1))
        made.schedule(made.complete().end)
        batch = made.schedule(made.complete().end).batch
        assert [sequence.id for sequence in batch.preempted] == ["low"]
        starved[version] = [sequence.id for sequence in batch.starved]
    assert starved == {"0.32": ["c"], "0.33": []}


def test_a_step_waits_for_what_it_loads_within_its_budget():
    found = {}
    for budget in (0, 48):
        host = HostMemory(num_chunks=16, chunk_bytes=1.0, bandwidth=2.0, load_tokens_within_step=budget)
        made = engine(num_gpu_blocks=9, host=host)
        _, now = steps_of(made_with(made, prompt("a", num_prompt=80)))
        _, now = steps_of(made_with(made, prompt("b", num_prompt=80)), now)
        late = prompt("again", num_prompt=90, name="a")  # 2 of 5 blocks are on the GPU, 3 in host memory
        found[budget], _ = steps_of(made_with(made, late), now + 100)
        assert (late.cached_tokens, late.host_tokens) == (80, 48)
    assert found[0][0] == (["again"], 1.0)  # after 1.5 s in which no step ran
    assert found[48][0] == (["again"], 2.5)
    assert made.host_use().loads.num_bytes == 3


def test_what_exceeds_the_budget_is_waited_for_outside_of_steps():
    host = HostMemory(num_chunks=16, chunk_bytes=1.0, bandwidth=math.inf, load_tokens_within_step=47)
    made = engine(num_gpu_blocks=9, host=host)
    for name in ("a", "b"):
        steps_of(made_with(made, prompt(name, num_prompt=80)))
    late = prompt("again", num_prompt=90, name="a")
    made.add(late)
    assert made.schedule(100.0) is None
    assert made.view().num_loading == 1


def made_with(made, sequence):
    made.add(sequence)
    return made


class Accepts(Drafter):
    """Three drafts for each step, all of which are accepted."""

    def proposed(self, sequence):
        return 3

    def accepted(self, sequence, num_drafts):
        return num_drafts


def speculating(version, **settings):
    config = EngineConfig(
        engine_version=version,
        block_size=16,
        num_gpu_blocks=40,
        async_scheduling=False,
        num_speculative_tokens=3,
        **settings,
    )
    return VllmCore(config, config.num_gpu_blocks, drafter=Accepts())


def step(core):
    core.update(core.schedule())
    return sum(event.stop - event.start for event in core.pool.events)


@pytest.mark.parametrize(("version", "stored"), [("0.32", [1, 1, 2]), ("0.33", [1, 2, 2])])
def test_blocks_of_accepted_tokens_are_cached_when_they_are_known_or_when_there_are_more(version, stored):
    core = speculating(version, speculative_method="ngram")
    core.add(prompt("a", num_prompt=30, max_tokens=20))  # known: 31, 35, 39
    assert [step(core) for _ in stored] == stored


@pytest.mark.parametrize(
    ("version", "role", "hits"), [("0.32", None, 32), ("0.33", None, 48), ("0.33", "kv_producer", 32)]
)
def test_with_look_ahead_in_names_no_block_of_a_hit_is_computed_again(version, role, hits):
    core = speculating(version, speculative_method="eagle", kv_role=role)
    core.add(prompt("a", num_prompt=60, name="same"))
    step(core)
    late = prompt("b", num_prompt=60, name="same")
    core.add(late)
    core.schedule()
    assert late.cached_tokens == hits


def test_with_look_ahead_a_block_is_cached_once_the_token_after_it_is_known():
    core = speculating("0.33", speculative_method="eagle")
    core.add(prompt("a", num_prompt=32))
    batch = core.schedule()
    assert [(event.start, event.stop) for event in core.pool.events] == [(0, 1)]
    core.update(batch)
    assert [(event.start, event.stop) for event in core.pool.events] == [(0, 1), (1, 2)]
