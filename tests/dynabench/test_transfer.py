"""What is transferred: bytes by model shape, and what no network can be."""

import math

import pytest

from mocker.models.catalog import find_model
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size, kv_size_of

QWEN_8B, QWEN_235B, LLAMA_70B = "Qwen/Qwen3-8B", "Qwen/Qwen3-235B-A22B", "meta-llama/Llama-3.1-70B"
GPT_OSS, DEEPSEEK = "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3"


def bytes_per_token(model, **settings):
    return kv_size(find_model(model), block_size=1, **settings).block


@pytest.mark.parametrize(
    ("model", "num_gpus", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", 1, 131_072),
        (QWEN_8B, 8, 147_456),
        (QWEN_235B, 1, 192_512),
        (QWEN_235B, 8, 385_024),  # its 4 KV heads are read by two GPUs each
        (LLAMA_70B, 4, 327_680),
        (DEEPSEEK, 1, 70_272),
        (DEEPSEEK, 8, 70_272),
    ],
)
def test_a_token_has_the_bytes_of_the_models_shape(model, num_gpus, expected):
    assert bytes_per_token(model, tensor_parallel_size=num_gpus) == expected
    assert bytes_per_token(model, tensor_parallel_size=num_gpus, kv_dtype="fp8") == expected / 2


def test_of_layers_with_a_window_only_the_window_is_sent():
    size = kv_size(find_model(GPT_OSS), block_size=16)
    assert size.block == size.window_block == 16 * 73_728 / 2  # every other layer has a window of 128 tokens
    assert size.of(4) == 4 * 16 * 73_728
    assert size.of(1000) == 1000 * size.block + 9 * size.window_block


def test_the_reader_decides_the_bytes_of_a_block():
    timing = TimingConfig(model=QWEN_235B, gpu="h200", tensor_parallel_size=8, kv_cache_dtype="fp8")
    assert kv_size_of(timing, block_size=64).of(10) == 640 * 385_024 / 2
    assert kv_size_of(timing, block_size=64, kv_bytes_per_token=100).of(10) == 64_000


def test_without_a_model_a_token_has_the_bytes_of_llama_8b_or_those_given():
    size = kv_size_of(TimingConfig(), block_size=64)
    assert size == kv_size(find_model("meta-llama/Llama-3.1-8B"), block_size=64)
    assert kv_size_of(TimingConfig(), block_size=1, kv_bytes_per_token=70_272).of(1) == 70_272
    unknown = TimingConfig(model="nobody/nothing")
    assert kv_size_of(unknown, block_size=1, kv_bytes_per_token=5).of(1) == 5
    with pytest.raises(ValueError, match=r"model 'nobody/nothing' is neither bundled .* or set kv_bytes_per_token"):
        kv_size_of(unknown, block_size=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bandwidth_gb_s": -1.0}, "bandwidth_gb_s must be at least 0"),
        ({"bandwidth_gb_s": math.inf}, "bandwidth_gb_s must be"),
        ({"node_bandwidth_gb_s": 50.0}, "node_bandwidth_gb_s needs gpus_per_node"),
        ({"rack_bandwidth_gb_s": 50.0}, "rack_bandwidth_gb_s needs nodes_per_rack"),
        ({"overlap": "all"}, "overlap must be one of none, chunk, layer"),
    ],
)
def test_what_no_network_can_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TransferConfig(**settings)
