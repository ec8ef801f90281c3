"""What speculation costs in time: verifying drafts, and drafting."""

import pytest

from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Load, chunk

H100 = TimingConfig(model="meta-llama/Llama-3.3-70B", gpu="h100", tensor_parallel_size=4)
MODELS = [
    H100,
    TimingConfig(model="google/gemma-3-27b", gpu="h100"),
    TimingConfig(model="openai/gpt-oss-120b", gpu="h100"),
    TimingConfig(timing="constant"),
    TimingConfig(),
]


def engine(num_drafts, timing=H100, **settings):
    given = {"acceptance_length": 1 + num_drafts / 2, "drafting_ms": None} | settings
    return resolve(EngineConfig(num_speculative_tokens=num_drafts, **given), timing)


@pytest.mark.parametrize("timing", MODELS, ids=lambda timing: timing.model or timing.timing_name)
def test_without_drafts_to_verify_a_step_takes_what_it_takes_without_speculation(timing):
    plain = resolve(EngineConfig(), timing).timing
    for num_kv in (64, 64_000):
        assert plain.verify(Load(None, 16, num_kv), 0) == pytest.approx(plain.decode(16, num_kv).first)
        mixed = plain.mixed(chunk(300, 20), 16, num_kv)
        assert plain.verify(Load(chunk(300, 20), 16, num_kv), 0) == pytest.approx(mixed)


@pytest.mark.parametrize("timing", MODELS[:3], ids=lambda timing: timing.model)
def test_verifying_costs_more_than_decoding_and_less_than_as_many_more_sequences(timing):
    plain = resolve(EngineConfig(), timing).timing
    for count in (1, 16, 128):
        num_kv = count * 2000
        before = plain.decode(count, num_kv).first
        seconds = plain.verify(Load(None, count, num_kv), 3 * count)
        assert before <= seconds <= plain.decode(4 * count, 4 * num_kv).first
        assert seconds <= plain.verify(Load(None, count, num_kv), 4 * count)


def test_drafting_takes_a_pass_for_each_draft():
    load = Load(None, 16, 16_000)
    times = [engine(count).timing.verify(load, 0) for count in (1, 2, 3)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=0.01)
    plain = resolve(EngineConfig(), H100).timing.verify(load, 0)
    assert plain < times[0] < plain * 1.1


def test_drafting_takes_the_time_that_is_given():
    load = Load(chunk(100), 4, 400)
    given = engine(2, TimingConfig(timing="constant"), drafting_ms=5).timing
    assert given.verify(load, 8) == pytest.approx(0.02 + 0.01 + 0.005)
    ngram = engine(2, speculative_method="ngram", async_scheduling=False)
    assert ngram.timing.verify(load, 8) < engine(2, async_scheduling=False).timing.verify(load, 8)


def test_a_draft_model_has_its_own_times_and_its_room_in_memory():
    own = engine(3, speculative_method="draft_model", draft_model="meta-llama/Llama-3.2-1B")
    layer = engine(3)
    assert own.timing.verify(Load(None, 8, 8000), 24) > layer.timing.verify(Load(None, 8, 8000), 24)
    assert own.num_blocks < layer.num_blocks < engine(3, speculative_method="ngram", async_scheduling=False).num_blocks


def test_the_least_time_of_a_token_is_never_more_than_a_step_brings():
    speculating = engine(3)
    best = speculating.at_best.timing
    for count in (1, 32):
        load = Load(None, count, count * 1000)
        assert best.decode(count, count * 1000).first * 4 <= speculating.timing.verify(load, 3 * count)
    assert best.mixed(chunk(500), 8, 8000) <= speculating.timing.verify(Load(chunk(500), 8, 8000), 24)


def test_speculation_gives_less_the_more_sequences_share_a_step():
    timing = engine(5, acceptance_length=2.4, acceptance_drafts=3).timing
    gains = [timing.gain(count, count * 1500, 2.72, 5) for count in (1, 16, 64, 256)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 2
    assert gains[-1] < 1


@pytest.mark.parametrize(
    ("settings", "timing", "why"),
    [
        ({"acceptance_length": None}, H100, "with nothing about acceptance; expected one of acceptance_length"),
        ({"acceptance_rates": "0.5,0.4"}, H100, "with acceptance_length and acceptance_rates; expected one of"),
        ({"acceptance_length": None, "acceptance_rates": "high"}, H100, "expected numbers with commas"),
        ({"acceptance_length": None, "acceptance_rates": "0.5"}, H100, "expected one for each of 2 drafts"),
        (
            {"acceptance_length": None, "acceptance_rates": "0.5,0.6"},
            H100,
            "the one before it at 0.5; expected no more",
        ),
        ({"acceptance_length": 5}, H100, "acceptance_length is 5; expected 1 to 3, as 2 drafts were verified"),
        (
            {"draft_model": "meta-llama/Llama-3.2-1B"},
            H100,
            "speculative_method is eagle3, and draft_model is meta-llama",
        ),
        ({"speculative_method": "draft_model"}, H100, "draft_model is None; expected both to be of a draft model"),
        ({}, TimingConfig(), "timing polynomial does not say how long eagle3 drafts; expected drafting_ms with it"),
    ],
)
def test_what_is_not_known_of_speculation_is_refused_by_name(settings, timing, why):
    with pytest.raises(ValueError, match=why):
        engine(2, timing, **settings)
