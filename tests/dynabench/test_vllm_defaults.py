"""Defaults that differ from vLLM's own are named where a run says what it simulates."""

import pytest

from dynabench.deployment.description import Pool
from dynabench.experiment.vllm_defaults import other_defaults
from mocker import EngineConfig
from mocker.timing.config import TimingConfig

MODEL = "meta-llama/Llama-3.1-8B"
LIKE_VLLM = EngineConfig(max_num_seqs=1024, block_size=16)


def told(gpu, engine=None, model=MODEL, **timing):
    return other_defaults(Pool(mocker=engine or EngineConfig(), timing=TimingConfig(model=model, gpu=gpu, **timing)))


@pytest.mark.parametrize(
    ("gpu", "settings"),
    [
        ("h100", "max_num_seqs 256 (vLLM: 1,024), block_size 64 (vLLM: 16), gpu_memory_utilization 0.9 (vLLM: 0.92)"),
        (
            "b200",
            "max_num_seqs 256 (vLLM: 1,024), max_num_batched_tokens 8,192 (vLLM: 16,384), "
            "block_size 64 (vLLM: 16), gpu_memory_utilization 0.9 (vLLM: 0.92)",
        ),
        (
            "a100",
            "max_num_batched_tokens 8,192 (vLLM: 2,048), block_size 64 (vLLM: 16), gpu_memory_utilization 0.9 (vLLM: 0.92)",
        ),
    ],
)
def test_settings_at_our_defaults_are_named_with_vllms_own(gpu, settings):
    assert told(gpu) == f"{settings}; vLLM's are the defaults of vllm serve on {gpu} as of 0.32"


def test_what_was_set_is_not_named():
    assert told("h100", LIKE_VLLM, gpu_memory_utilization=0.92) is None
    assert told("h100", EngineConfig(max_num_seqs=128, block_size=32), gpu_memory_utilization=0.8) is None


def test_blocks_of_latent_attention_are_as_large_as_its_backend_needs():
    assert "block_size 64 (vLLM: as its attention backend needs), " in told("b200", model="deepseek-ai/DeepSeek-R1")


def test_nothing_is_said_of_other_engines_or_generic_times():
    assert told("h100", timed_as="sglang") is None
    assert other_defaults(Pool()) is None
