"""Layers that do not see all tokens: they take no longer than layers that do, and hold KV as vLLM groups it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mocker import BlockChain, EngineConfig, Sequence, new_engine
from mocker.models.catalog import find_model, model_configs
from mocker.models.kv_cache import kv_cache
from mocker.models.shape import shape_of
from mocker.timing.catalog import find_engine, find_gpu
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Prefill, chunk
from mocker.timing.parts import coefficients
from mocker.timing.roofline import Reach, Roofline
from tests.support.examples import worth

GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
}
WINDOWED = [
    name
    for name in model_configs()
    if any(mixer.window and mixer.compression == 1 for mixer, _ in find_model(name).mixers)
]


def without_windows(shape):
    """Return the same model, all of whose layers see all tokens."""

    def opened(layer):
        return layer._replace(mixers=tuple(replace(mixer, window=0) for mixer in layer.mixers))

    return replace(shape, layers=tuple((opened(layer), count) for layer, count in shape.layers))


def times(shape, gpu="h200", num_gpus=8):
    gpu = find_gpu(gpu)
    return Roofline(coefficients(shape, gpu, find_engine("vllm", gpu.architecture), tensor_parallel_size=num_gpus))


PAIRS = {name: (times(find_model(name)), times(without_windows(find_model(name)))) for name in WINDOWED}


def test_windowed_models_are_among_the_bundled():
    assert {"openai/gpt-oss-120b", "google/gemma-4-26B-A4B", "XiaomiMiMo/MiMo-V2-Flash"} <= set(WINDOWED)


@settings(max_examples=worth(300))
@given(
    name=st.sampled_from(WINDOWED),
    chunks=st.lists(st.tuples(st.integers(1, 16_384), st.integers(0, 200_000)), min_size=1, max_size=5),
    decodes=st.lists(st.integers(1, 200_000), max_size=300),
)
def test_a_window_only_removes_work(name, chunks, decodes):
    windowed, full = PAIRS[name]
    count, context = len(decodes), sum(decodes)
    parts = [chunk(tokens, before) for tokens, before in chunks]
    prefill = Prefill(*(sum(column) for column in zip(*parts, strict=True)))
    assert windowed.mixed(prefill, count, context) <= full.mixed(prefill, count, context) * (1 + 1e-12)
    if count:
        few, all_ = windowed.decode(count, context), full.decode(count, context)
        for step in (0, 1, 1000):
            now = windowed.decode(count, context + count * step).first
            assert now <= all_.duration(step) * (1 + 1e-12)
            if step < few.num_steps:
                assert few.duration(step) == pytest.approx(now, rel=1e-12)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_decode_reads_no_more_than_the_window(name):
    windowed, full = PAIRS[name]
    window = max(mixer.window for mixer, _ in find_model(name).mixers)
    inside, beyond = (windowed.decode(4, 4 * tokens) for tokens in (window - 1, 4 * window))
    assert inside.first == pytest.approx(full.decode(4, 4 * (window - 1)).first, rel=1e-12)
    assert beyond.slope < inside.slope == pytest.approx(full.decode(4, 4 * (window - 1)).slope, rel=1e-12)


def pairs(window, tokens, before=0):
    """Count the pairs of a chunk one by one."""
    return sum(min(before + place + 1, window) for place in range(tokens))


@pytest.mark.parametrize(("tokens", "before"), [(10, 0), (100, 0), (1000, 0), (50, 80), (50, 990), (1000, 1000)])
def test_the_pairs_that_a_window_leaves_are_those_that_are_counted_one_by_one(tokens, before):
    left = Reach(100).pairs(chunk(tokens, before))
    assert left == pytest.approx(pairs(100, tokens, before), abs=tokens)  # half a pair for each token


def test_a_long_prompt_of_gemma_3_takes_less_time_than_with_layers_that_see_everything():
    windowed = times(shape_of(GEMMA), "h100", 1).mixed(chunk(8192), 0, 0)
    full = times(without_windows(shape_of(GEMMA)), "h100", 1).mixed(chunk(8192), 0, 0)
    assert 0.9 * full < windowed < full == pytest.approx(0.639, abs=0.001)


# KV blocks


def test_a_model_whose_layers_all_keep_everything_has_blocks_of_one_kind():
    cache = kv_cache(find_model("meta-llama/Llama-3.1-8B"), block_size=16)
    assert cache.layout.is_plain
    assert (cache.layout.block, cache.token, cache.is_exact) == (16 * 131_072, 131_072, True)


def engine_of(num_blocks, **settings):
    """Return an engine for Gemma 3 with a pool of vLLM's blocks."""
    layout = kv_cache(shape_of(GEMMA), block_size=16).layout
    settings = {"enable_prefix_caching": False, "async_scheduling": False, **settings}
    config = EngineConfig(block_size=16, max_model_len=131_072, **settings)
    return new_engine(config, times(shape_of(GEMMA), "h100", 1), num_blocks=num_blocks, layout=layout)


def prompt(name, length, output):
    return Sequence(
        name,
        num_prompt=length,
        max_tokens=output,
        chain=BlockChain([(name, place) for place in range(-(-length // 16))]),
    )


def run(engine, now=0.0):
    """Run until nothing is left; return the most blocks in use, and when it ended."""
    most, step = 0, engine.schedule(now)
    while step is not None:
        most, now = max(most, engine.view().num_used_blocks), step.end
        engine.complete()
        step = engine.schedule(now)
    return most, now


def test_a_prompt_holds_the_blocks_of_all_groups_and_returns_them():
    engine = engine_of(2000)
    engine.add(prompt("a", 900, 12))
    engine.schedule(0.0)
    assert 2000 - 1 - engine.num_free_blocks == 57 * 7
    engine.complete()
    run(engine)
    assert engine.num_free_blocks == 2000 - 1


def test_blocks_outside_the_windows_are_freed_as_a_prompt_goes_on():
    engine = engine_of(10_000, max_num_batched_tokens=512)
    engine.add(prompt("a", 8000, 400))
    most, _ = run(engine)
    before, after = (7168 - 1023) // 16, 7680 // 16  # the last chunk of 512 tokens: what it sees begins in this block
    assert most == after + 6 * (after - before)


def test_as_many_prompts_run_at_once_as_fit_into_the_groups():
    engine = engine_of(15_873, max_num_batched_tokens=65_536)
    for name in range(60):
        engine.add(prompt(name, 900, 12))
    engine.schedule(0.0)
    assert engine.view().num_running == 39


def test_what_never_fits_into_the_groups_is_refused():
    engine = engine_of(300)
    with pytest.raises(ValueError, match="need 399 KV blocks; the cache has 299"):
        engine.add(prompt("a", 900, 12))


def test_a_prompt_that_is_sent_again_is_hit_in_all_groups():
    engine = engine_of(4000, enable_prefix_caching=True)
    for name in range(2):
        engine.add(again := prompt("a", 3000, 12))
        run(engine, float(name))
    assert again.cached_tokens == 2992


def test_a_prompt_that_leaves_another_inside_its_windows_is_hit_only_the_second_time():
    engine, found = engine_of(4000, enable_prefix_caching=True), []
    for name, shared in (("a", 3000), ("b", 2000), ("c", 2000)):
        one = prompt("a", 3000, 12)
        own = [("a", place) if place < shared // 16 else (name, place) for place in range(188)]
        one.chain = BlockChain(own)
        engine.add(one)
        run(engine)
        found.append(one.cached_tokens)
    assert found == [0, 0, 2000]


def test_blocks_that_are_set_are_those_of_the_pool(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    timing = TimingConfig(model=str(tmp_path), gpu="h100")
    assert resolve(EngineConfig(block_size=16, num_gpu_blocks=2268), timing).num_blocks == 2268
    assert resolve(EngineConfig(block_size=16), timing).num_blocks == 15_873
