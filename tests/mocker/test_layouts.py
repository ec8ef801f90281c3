"""Layouts that an engine refuses to start, by hand; tests/real_engines/test_vllm_layouts.py asks vLLM itself."""

from dataclasses import replace

import pytest

from mocker import EngineConfig
from mocker.models.catalog import find_model
from mocker.models.layout import refusal
from mocker.models.shape import shape_of
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.groups import groups_of

FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
DENSE = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000,
}  # fmt: skip
MIXTURE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 1536,
}  # fmt: skip
MAMBA = {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M*-M", "num_hidden_layers": 4, "hidden_size": 2048,
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
}  # fmt: skip


def said(config, tensor_parallel_size, **more):
    return refusal(shape_of(config), tensor_parallel_size=tensor_parallel_size, **more)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_what_divides_starts(size):
    assert said(DENSE, size) is None
    assert said(MIXTURE, size) is None
    assert said(MIXTURE, size, enable_expert_parallel=True) is None


def test_attention_heads_are_divided():
    reason = refusal(find_model("Qwen/Qwen2.5-7B"), tensor_parallel_size=8)
    assert reason == "28 attention heads cannot be divided over tensor_parallel_size 8"
    assert refusal(find_model("Qwen/Qwen2.5-7B"), tensor_parallel_size=4) is None


def test_kv_heads_are_divided_or_repeated():
    reason = refusal(find_model("microsoft/phi-4"), tensor_parallel_size=4)
    assert reason == "10 KV heads can be neither divided over nor repeated on tensor_parallel_size 4"
    assert refusal(find_model("microsoft/phi-4"), tensor_parallel_size=2) is None
    assert said(DENSE | {"num_key_value_heads": 4}, 16) is None


def test_gpt_oss_does_not_repeat_kv_heads():
    assert refusal(find_model("openai/gpt-oss-120b"), tensor_parallel_size=8) is None
    reason = refusal(find_model("openai/gpt-oss-120b"), tensor_parallel_size=16)
    assert reason == "8 KV heads can be neither divided over nor repeated on tensor_parallel_size 16"


def test_some_mixtures_need_an_expert_for_every_gpu():
    few = MIXTURE | {"num_experts": 4}
    assert said(few, 8) == "4 experts are fewer than tensor_parallel_size 8"
    assert said(few | {"model_type": "mixtral", "intermediate_size": 1536}, 8) is None


def test_one_latent_for_all_heads_is_repeated():
    assert refusal(find_model("deepseek-ai/DeepSeek-R1"), tensor_parallel_size=16) is None


def test_feed_forward_networks_are_divided():
    reason = said(DENSE | {"intermediate_size": 8200}, 16)
    assert reason == "8200 feed-forward channels cannot be divided over tensor_parallel_size 16"


def test_the_vocabulary_is_padded_to_64_before_it_is_divided():
    assert said(DENSE | {"vocab_size": 32001}, 16) is None
    heads = {"num_attention_heads": 15, "num_key_value_heads": 5, "intermediate_size": 8190}
    reason = said(DENSE | heads, 5)
    assert reason is None  # 32000 is 500 * 64 and 6400 * 5
    assert said(DENSE | heads | {"vocab_size": 32001}, 5) == (
        "32064 rows of the padded vocabulary cannot be divided over tensor_parallel_size 5"
    )


def test_mamba_heads_and_groups_are_divided():
    assert said(MAMBA, 8) is None
    assert said(MAMBA, 16) == "8 groups of linear_attention cannot be divided over tensor_parallel_size 16"
    assert said(MAMBA | {"n_groups": 1}, 16) is None  # all GPUs hold a single group


def test_rows_of_fp8_weights_are_divided_into_whole_blocks():
    blocks = {"quantization_config": FP8_BLOCKS}
    assert said(DENSE | blocks, 16) is None
    reason = said(DENSE | {"intermediate_size": 25600} | blocks, 16)
    assert reason == (
        "the inputs of mlp.down_proj, 25600/16 = 1600 on each GPU, are not a multiple of 128, the size of a scale block"
    )
    assert said(DENSE | {"intermediate_size": 25600}, 16) is None


def test_rows_of_nvfp4_weights_are_divided_into_whole_groups():
    uneven = DENSE | {"intermediate_size": 2112}  # 2112/8 = 264 is no multiple of 16
    assert said(uneven, 8) is None
    assert said(uneven | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, 8) == (
        "the inputs of mlp.down_proj, 2112/8 = 264 on each GPU, are not a multiple of 16, the size of a scale block"
    )


def test_experts_of_fp8_weights_have_their_blocks_split_down_to_32():
    blocks = MIXTURE | {"quantization_config": FP8_BLOCKS}
    assert said(blocks, 8) is None  # 1536/8 = 192 is three blocks of 64
    smaller = blocks | {"moe_intermediate_size": 768}
    assert said(smaller, 8) is None  # 768/8 = 96 is three blocks of 32
    assert said(smaller, 16) == (
        "channels of each expert, 768/16 = 48 on each GPU, are not a multiple of 128, the size of a scale block; "
        "enable_expert_parallel leaves experts whole"
    )
    assert said(smaller, 16, enable_expert_parallel=True) is None


def test_experts_are_divided_but_for_expert_parallelism():
    uneven = MIXTURE | {"moe_intermediate_size": 1544}
    assert said(uneven, 16) == (
        "1544 channels of each expert cannot be divided over tensor_parallel_size 16; "
        "enable_expert_parallel leaves experts whole"
    )
    assert said(uneven, 16, enable_expert_parallel=True) is None


def test_expert_parallelism_needs_experts():
    assert said(DENSE, 1, enable_expert_parallel=True) == "enable_expert_parallel needs a model with experts"


def test_an_engine_with_such_a_layout_is_not_simulated():
    timing = TimingConfig(model="Qwen/Qwen2.5-7B", gpu="h100", tensor_parallel_size=8)
    with pytest.raises(ValueError, match=r"^model Qwen/Qwen2.5-7B: 28 attention heads cannot be divided"):
        resolve(EngineConfig(), timing)


def test_a_number_of_blocks_does_not_let_a_layout_start():
    timing = TimingConfig(model="Qwen/Qwen2.5-7B", gpu="h100", tensor_parallel_size=8)
    with pytest.raises(ValueError, match="28 attention heads"):
        resolve(EngineConfig(num_gpu_blocks=1000), timing)


def test_times_of_split_blocks_are_not_known_so_a_simulation_refuses_them_with_the_way_out():
    timing = TimingConfig(model="Qwen/Qwen3-235B-A22B-FP8", gpu="h100", tensor_parallel_size=8)
    with pytest.raises(
        ValueError, match=r"1536/8 = 192 on each GPU, are not a multiple of 128.*enable_expert_parallel"
    ):
        resolve(EngineConfig(), timing)
    resolve(EngineConfig(), replace(timing, enable_expert_parallel=True))


@pytest.mark.parametrize(("method", "has_groups"), [("eagle3", False), ("ngram", True)])
def test_beside_chunked_attention_a_drafter_that_reads_the_model_has_one_table(method, has_groups):
    drafts = {"num_speculative_tokens": 2, "acceptance_length": 1.8, "speculative_method": method}
    engine = EngineConfig(**drafts, async_scheduling=False)
    timing = TimingConfig(model="meta-llama/Llama-4-Maverick-17B-128E-Instruct", gpu="b200", tensor_parallel_size=8)
    assert (groups_of(engine, timing) is not None) == has_groups
