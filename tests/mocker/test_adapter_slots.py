"""A step waits for the adapters that have no slot on the GPU; the least recently used make room."""

import pytest

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig

TIMING = TimingConfig(timing="constant", constant_prefill_ms=1000.0, constant_decode_ms=250.0)
LOAD_S, READ_S = 0.125, 4.0


def made(**settings):
    config = EngineConfig(
        block_size=16,
        num_gpu_blocks=400,
        async_scheduling=False,
        enable_lora=True,
        lora_load_ms=1000 * LOAD_S,
        lora_read_ms=1000 * READ_S,
        **settings,
    )
    simulated = resolve(config, TIMING)
    return new_engine(
        config, simulated.timing, num_blocks=400, adapters=simulated.adapters, acceptance=simulated.acceptance
    )


def waits(engine, *adapters):
    """Run a request of each adapter alone, one after another; return how long its first step waited (s)."""
    found, now = [], 0.0
    for number, adapter in enumerate(adapters):
        engine.add(Sequence(number, num_prompt=20, max_tokens=2, chain=BlockChain([], 0), adapter=adapter))
        step = engine.schedule(now)
        found.append(step.end - now - 1.0)
        engine.complete()
        step = engine.schedule(step.end)
        assert step.end - step.start == 0.25
        now = engine.complete().end
    return found


def test_the_first_request_of_an_adapter_waits_until_it_is_read_and_loaded_and_the_next_does_not():
    engine = made(max_loras=2)
    assert waits(engine, "a", "a", "", "b", "a") == [LOAD_S + READ_S, 0, 0, LOAD_S + READ_S, 0]
    counts = engine.adapters.counts
    assert {name: (of.loads, of.reads, of.stall_s) for name, of in counts.items()} == {
        "a": (1, 1, 4.125),
        "b": (1, 1, 4.125),
    }


def test_adapters_take_as_long_to_load_where_steps_verify_drafts():
    engine = made(max_loras=2, num_speculative_tokens=1, acceptance_rates="0", drafting_ms=0)
    assert waits(engine, "a", "a", "b") == [LOAD_S + READ_S, 0, LOAD_S + READ_S]


def test_the_least_recently_used_adapter_makes_room_on_the_gpu_and_stays_in_host_memory():
    engine = made(max_loras=2, max_cpu_loras=3)
    waits(engine, "a", "b", "a", "c")
    assert engine.adapters.loaded == ["a", "c"]
    assert waits(engine, "a", "b") == [0, LOAD_S]  # c goes
    assert waits(engine, "d", "c") == [LOAD_S + READ_S, LOAD_S + READ_S]  # d took the place of c in host memory


def test_by_default_host_memory_has_room_for_those_on_the_gpu_only():
    engine = made(max_loras=1)
    assert waits(engine, "a", "b", "a") == [LOAD_S + READ_S] * 3


def test_several_adapters_that_a_step_lacks_are_loaded_one_after_another():
    engine = made(max_loras=3)
    for number, adapter in enumerate("abca"):
        engine.add(Sequence(number, num_prompt=20, max_tokens=2, chain=BlockChain([], 0), adapter=adapter))
    assert engine.schedule(0.0).end == 1.0 + 3 * (LOAD_S + READ_S)


def test_an_engine_whose_settings_have_adapters_limits_those_in_a_step():
    engine = made(max_loras=1)
    for number, adapter in enumerate("ab"):
        engine.add(Sequence(number, num_prompt=20, max_tokens=2, chain=BlockChain([], 0), adapter=adapter))
    assert [sequence.adapter for sequence in engine.schedule(0.0).batch.admitted] == ["a"]


@pytest.mark.parametrize(
    ("rank", "timing", "expected_ms"),
    [
        (16, TimingConfig(model="llama-3.1-8b", gpu="h100"), 2.6415),  # 83.9 MB at 32 GB/s, and 20 us
        (8, TimingConfig(model="llama-3.1-8b", gpu="h100"), 1.3307),
        (16, TimingConfig(), 2.6415),  # the model is not known
        (16, TimingConfig(model="llama-3.1-70b", gpu="h200", tensor_parallel_size=4), 12.9634),
    ],
)
def test_an_adapter_takes_as_long_as_its_bytes(rank, timing, expected_ms):
    adapters = resolve(EngineConfig(enable_lora=True, max_lora_rank=rank), timing).adapters
    assert adapters.load_s * 1e3 == pytest.approx(expected_ms, rel=1e-4)
    assert adapters.read_s == 0.1


def test_slots_leave_less_room_for_kv():
    timing = TimingConfig(model="llama-3.1-8b", gpu="h100")
    room = [
        resolve(EngineConfig(block_size=16, enable_lora=n > 0, max_loras=n or 1), timing).num_blocks for n in (0, 25)
    ]
    assert room[0] - room[1] == pytest.approx(25 * 83_886_080 / (16 * 131_072), abs=1)  # 1,000 blocks


def test_without_adapters_there_is_no_room_for_any():
    assert resolve(EngineConfig()).adapters is None


def test_less_room_in_host_memory_than_on_the_gpu_is_refused():
    with pytest.raises(ValueError, match="max_cpu_loras is 2, and max_loras is 3; expected at least as many"):
        EngineConfig(enable_lora=True, max_loras=3, max_cpu_loras=2)
