"""A model in stages: its layers, times and memory."""

import pytest

from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.stages import layers_of_stages, shares_of_stages

MODEL = {"model": "meta-llama/Llama-3.3-70B", "gpu": "h100"}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [
        (80, 4, [20, 20, 20, 20]),
        (61, 4, [15, 15, 16, 15]),
        (62, 4, [15, 16, 16, 15]),
        (63, 4, [16, 16, 16, 15]),
        (7, 2, [4, 3]),
    ],
)
def test_layers_that_are_left_go_to_stages_before_the_last(num_layers, num_stages, expected):
    assert layers_of_stages(num_layers, num_stages) == expected


def test_there_are_no_more_stages_than_layers():
    with pytest.raises(ValueError, match="pipeline_parallel_size is 9; expected at most the model's 8 layers"):
        layers_of_stages(8, 9)


def test_the_last_stage_has_the_head():
    assert shares_of_stages([2, 2], 4.0, 1.0) == pytest.approx((0.4, 0.6))
    assert sum(shares_of_stages([16, 16, 16, 15], 3.7, 0.3)) == 1


def test_stages_share_the_weights_and_leave_more_room_for_kv():
    whole = resolve(EngineConfig(), TimingConfig(**MODEL, tensor_parallel_size=4))
    cut = resolve(EngineConfig(), TimingConfig(**MODEL, tensor_parallel_size=4, pipeline_parallel_size=2))
    assert cut.stage_shares == pytest.approx((0.5, 0.5), abs=0.02)
    assert (
        2 * whole.num_blocks < cut.num_blocks < 5 * whole.num_blocks
    )  # half of a block's bytes, and half of the weights
    two_gpus = TimingConfig(**MODEL, tensor_parallel_size=1, pipeline_parallel_size=4)
    assert resolve(EngineConfig(), two_gpus).num_blocks > 100
    with pytest.raises(ValueError, match="leave no room for KV blocks"):
        resolve(EngineConfig(), TimingConfig(**MODEL, tensor_parallel_size=1))


def test_lower_bounds_hold_with_batches_in_several_stages():
    cut = resolve(EngineConfig(), TimingConfig(**MODEL, tensor_parallel_size=4, pipeline_parallel_size=2))
    assert cut.at_best.timing.decode(8, 8000).first == pytest.approx(cut.timing.decode(8, 8000).first / 2)


@pytest.mark.parametrize(
    ("engine", "timing", "why"),
    [
        (EngineConfig(), {"timing": "constant", "gpu": None, "model": None}, "and timing is constant; expected 1"),
        (EngineConfig(), {"model": "google/gemma-3-27b"}, "expected 1 with google/gemma-3-27b, whose layers"),
        (EngineConfig(kv_role="kv_producer"), {}, "expected 1 with prefill and decode apart"),
        (EngineConfig(kv_offloading_size=8), {}, "expected 1 with host memory for KV"),
        (EngineConfig(dp_size=2), {}, "expected 1 with data-parallel ranks"),
        (EngineConfig(enable_lora=True), {}, "expected 1 with LoRA adapters"),
        (EngineConfig(num_speculative_tokens=2, acceptance_length=2), {}, "expected 1 with speculative decoding"),
        (SglangConfig(), {}, "SGLang's scheduler has no stages here"),
        (TrtllmConfig(), {}, "TensorRT-LLM's scheduler has no stages here"),
    ],
)
def test_what_is_not_simulated_with_stages_is_refused_by_name(engine, timing, why):
    with pytest.raises(ValueError, match=f"pipeline_parallel_size is 2.*{why}"):
        resolve(engine, TimingConfig(**(MODEL | {"tensor_parallel_size": 4, "pipeline_parallel_size": 2} | timing)))
