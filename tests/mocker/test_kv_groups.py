"""Layers form groups as vLLM's own sizing forms them."""

import gzip
import json
from pathlib import Path

import pytest

from mocker import EngineConfig
from mocker.models.kv_groups import LayerKv, block_size_beside_states, layout_of
from mocker.speculation.random_drafter import RandomDrafter
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.vllm.core import VllmCore

CASES = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "golden" / "vllm-0.32-hybrid" / "sizing.json.gz").read_bytes())
)
FULL, WINDOWED = LayerKv(8192), LayerKv(8192, window=1024)


def layer_of(case):
    if case["kind"] == "mamba":
        return LayerKv(0.0, state=case["state_bytes"])
    return LayerKv(
        4 * case["heads"] * case["head_size"], case.get("window", case.get("chunk", 0)), case["kind"] == "chunked"
    )


def sized(case):
    """Return what vLLM reports of a case."""
    is_aligned = case["mamba_cache_mode"] == "align"
    layout = layout_of(
        [layer_of(layer) for count, layer in case["layers"] for _ in range(count)],
        case["block_size"],
        state_block_size=None if is_aligned else case["max_model_len"],
        is_hybrid=case["hybrid_manager"],
        is_block_outermost=case["kv_cache_layout"].startswith("B"),
    )
    num_in_flight = case["max_num_batched_tokens"] * (1 + case["async_scheduling"])
    at_once = layout.num_blocks_at_once(case["max_model_len"], num_in_flight, is_aligned=is_aligned)
    if at_once * layout.block > case["memory_bytes"] - layout.block:
        raise ValueError("too little memory for one request of max_model_len")
    num_blocks = int(case["memory_bytes"] // layout.block)
    return {
        "groups": [
            (group.layer.kind, group.block_size, group.page, len(group.layers), list(group.layers[:3]))
            for group in layout.groups
        ],
        "bytes_per_block": layout.block,
        "num_gpu_blocks": num_blocks,
        "capacity_tokens": int(num_blocks / at_once * case["max_model_len"]),
        "max_concurrency": round(num_blocks / at_once, 6),
    }


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['shape']}-{case['kv_cache_layout']}-{case['memory_bytes']}"
)
def test_groups_pages_and_room_are_those_of_vllm(case):
    if "error" in case:
        with pytest.raises(ValueError, match="too little" if "too little" in case["why"] else "one table"):
            sized(case)
        return
    expected = {
        name: case[name] for name in ("bytes_per_block", "num_gpu_blocks", "capacity_tokens", "max_concurrency")
    }
    expected["groups"] = [
        (group["kind"], group["block_size"], group["page_size_bytes"], group["num_layers"], group["first_layers"])
        for group in case["groups"]
    ]
    assert sized(case) == expected


def test_all_cases_are_here():
    assert len(CASES) == 64


def test_the_layers_of_gemma_3_form_seven_groups():
    layout = layout_of([*[WINDOWED] * 5, FULL] * 10 + [WINDOWED] * 2, 16)
    assert [len(group.layers) for group in layout.groups] == [9, 9, 9, 9, 8, 8, 10]
    assert layout.block == 10 * 8192 * 16


def test_a_sequence_holds_no_more_of_a_window_than_it_sees_and_computes():
    layout = layout_of([WINDOWED, FULL], 16)
    assert layout.num_blocks_at_once(100_000, 2048) == (1023 + 2048 + 15) // 16 + 1 + 100_000 // 16


def test_blocks_grow_until_a_state_fits():
    state = LayerKv(0.0, state=1_097_728)
    assert block_size_beside_states([state, LayerKv(2048)], 16) == 544
    assert block_size_beside_states([FULL, WINDOWED], 16) == 16


def test_a_state_that_does_not_fit_is_refused_with_what_would_help():
    with pytest.raises(ValueError, match="a state of 1,097,728 bytes does not fit into a block of 16 tokens"):
        layout_of([LayerKv(0.0, state=1_097_728), LayerKv(2048)], 16)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    "model", ["Qwen/Qwen3.5-35B-A3B", "google/gemma-3-27b", "openai/gpt-oss-120b", "nvidia/Nemotron-3-Nano"]
)
def test_the_room_that_a_sequence_is_said_to_need_is_what_the_scheduler_asks_for(model, num_drafts):
    config = EngineConfig(num_speculative_tokens=num_drafts, acceptance_length=2.0 if num_drafts else None)
    engine = resolve(config, TimingConfig(model=model, gpu="h200"))
    core = VllmCore(engine.config, engine.num_blocks, None, engine.layout, drafter=RandomDrafter(engine.acceptance))
    for num_tokens in (1, 100, 620, 5000, 50_000):
        assert core.blocks.most_needed(num_tokens) == engine.num_blocks_of(num_tokens)
        assert engine.num_blocks_decoding(num_tokens) <= engine.num_blocks_of(num_tokens)
