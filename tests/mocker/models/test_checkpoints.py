"""The types of weights of bundled checkpoints: those of the lists that are published beside their config.json."""

import re

import pytest

from mocker.models.catalog import find_model, hub_id, model_configs, original_id
from mocker.models.description import doubt
from mocker.timing.memory import size_of_weights

LATENT = {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"}
INDEX = {"self_attn.indexer.wq_b", "self_attn.indexer.wk"}
PLAIN = {"self_attn.q_proj", "self_attn.o_proj"}
DELTA = {"linear_attn.in_proj_qkv", "linear_attn.in_proj_b", "linear_attn.out_proj"}
DENSE = {"mlp.gate_proj", "mlp.down_proj"}
SHARED = {"mlp.shared_experts.gate_proj", "mlp.shared_experts.down_proj"}
EXPERTS = {"mlp.experts.0.gate_proj", "mlp.experts.0.down_proj"}


def modules(shape, weights):
    """Return the kinds of matrices that have a type."""
    return {matrix.modules[0] for matrix, _ in shape.matrices if matrix.weight.name == weights}


@pytest.mark.parametrize(
    ("name", "of_4_bits", "of_16_bits", "gigabytes"),
    [
        ("nvidia/DeepSeek-V3.1-NVFP4", DENSE | SHARED | EXPERTS | {"self_attn.o_proj"}, LATENT, 386.4),
        ("nvidia/DeepSeek-R1-0528-FP4-V2", DENSE | SHARED | EXPERTS | {"self_attn.o_proj"}, LATENT, 386.4),
        ("nvidia/GLM-5-NVFP4", DENSE | SHARED | EXPERTS, LATENT | INDEX | {"self_attn.o_proj"}, 440.9),
        ("nvidia/GLM-5.1-NVFP4", EXPERTS, LATENT | INDEX | {"self_attn.o_proj"} | DENSE | SHARED, 446.0),
        ("nvidia/GLM-5.2-NVFP4", EXPERTS, LATENT | INDEX | {"self_attn.o_proj"} | DENSE | SHARED, 444.9),
        ("nvidia/Kimi-K2.5-NVFP4", DENSE | SHARED | EXPERTS, LATENT | {"self_attn.o_proj"}, 589.8),
        ("nvidia/MiniMax-M2.5-NVFP4", EXPERTS, PLAIN, 134.4),
        ("nvidia/MiniMax-M2.7-NVFP4", EXPERTS, PLAIN, 134.4),
        ("nvidia/Gemma-4-26B-A4B-NVFP4", EXPERTS, PLAIN | SHARED, 17.64),
        ("nvidia/Qwen3.5-397B-A17B-NVFP4", EXPERTS, PLAIN | DELTA | SHARED, 237.0),
    ],
)
def test_what_a_checkpoint_in_4_bits_leaves_out_has_16(name, of_4_bits, of_16_bits, gigabytes):
    found = find_model(name)
    assert (modules(found, "fp4"), modules(found, "bfloat16")) == (of_4_bits, of_16_bits)
    assert (found.kv_dtype, found.weights) == ("fp8", "fp4")
    assert size_of_weights(found) / 1e9 == pytest.approx(gigabytes, rel=0.001)


def test_mamba_before_attention_has_16_bits_like_attention_in_nemotron_3_nano():
    found = find_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4")
    counts = {
        (matrix.modules[0], matrix.weight.name): count
        for matrix, count in found.matrices
        if not matrix.modules[0].startswith("mlp")
    }
    assert counts == {
        ("mixer.in_proj", "fp4"): 17,
        ("mixer.out_proj", "fp4"): 17,
        ("mixer.in_proj", "bfloat16"): 6,
        ("mixer.out_proj", "bfloat16"): 6,
        ("self_attn.q_proj", "bfloat16"): 6,
        ("self_attn.o_proj", "bfloat16"): 6,
    }
    assert modules(found, "fp4") >= {"mlp.experts.0.up_proj", "mlp.shared_experts.up_proj"}
    assert (found.kv_dtype, round(size_of_weights(found) / 1e9, 1)) == ("fp8", 19.3)


@pytest.mark.parametrize(
    ("name", "of_16_bits", "gigabytes"),
    [
        ("Qwen/Qwen3.5-397B-A17B-FP8", {"linear_attn.in_proj_b"}, 398.5),
        ("zai-org/GLM-5-FP8", set(), 745.9),
        ("deepseek-ai/DeepSeek-R1", set(), 673.0),
    ],
)
def test_checkpoints_in_fp8_have_blocks_of_128_and_leave_little_out(name, of_16_bits, gigabytes):
    found = find_model(name)
    assert (modules(found, "bfloat16"), found.weight_block) == (of_16_bits, 128)
    assert size_of_weights(found) / 1e9 == pytest.approx(gigabytes, rel=0.001)


def test_every_bundled_name_that_states_a_type_has_a_file_that_says_it():
    for name, config in model_configs().items():
        stated = re.search(r"-(fp8|nvfp4|fp4)\b", name.lower())
        assert stated is None or "quantization_config" in config, name
        assert doubt(name, find_model(name)) == ""


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("GLM-5", "zai-org/GLM-5"),
        ("zhipuai/GLM-5", "zai-org/GLM-5"),
        ("GLM-5-FP8", "zai-org/GLM-5-FP8"),
        ("glm-5-nvfp4", "nvidia/GLM-5-NVFP4"),
        ("GLM-5.1", "zai-org/GLM-5.1"),
        ("Kimi-K2.5", "moonshotai/Kimi-K2.5"),
        ("DeepSeek-R1-FP8", "deepseek-ai/DeepSeek-R1"),
    ],
)
def test_a_short_name_is_the_checkpoint_of_its_type_or_else_the_original(name, like):
    assert find_model(name) == find_model(like)
    assert doubt(name, find_model(name)) == ""


def test_a_checkpoint_that_is_not_bundled_is_said_to_be_assumed():
    name = "zai-org/GLM-5.1-FP8"
    found = find_model(name)
    assert (modules(found, "bfloat16"), found.weight_block) == (set(), 0)
    assert doubt(name, found).startswith("this checkpoint is not bundled; all layers of zai-org/GLM-5.1 count as FP8")


def test_a_model_of_which_only_a_quantised_checkpoint_is_bundled_has_16_bits_and_it_is_said():
    name = "deepseek-ai/DeepSeek-V3.1"
    found = find_model(name)
    assert (found.weights, found.kv_dtype) == ("bfloat16", "bfloat16")
    assert doubt(name, found) == (
        "of this model, only nvidia/DeepSeek-V3.1-NVFP4 is bundled; without --quantization, all weights count as BF16"
    )
    assert doubt(name, found.quantised("fp8")) == ""
    assert doubt("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", found) == ""


def test_a_type_that_the_bundled_checkpoint_does_not_have_is_refused():
    with pytest.raises(
        ValueError, match=r"the weights of deepseek-ai/DeepSeek-R1, which is, are FP8; give the model's"
    ):
        find_model("nvidia/DeepSeek-R1-NVFP4")


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("GLM-5-FP8", "zai-org/GLM-5-FP8"),
        ("glm-5-nvfp4", "nvidia/GLM-5-NVFP4"),
        ("Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8"),
        ("Nemotron-3-Nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("GLM-5.1-FP8", "GLM-5.1-FP8"),  # not bundled, as those below: others' weights are not served in its place
        ("DeepSeek-V3.1", "DeepSeek-V3.1"),
        ("Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("zhipuai/GLM-5", "zhipuai/GLM-5"),
    ],
)
def test_a_short_name_is_completed_to_the_id_of_the_same_weights_only(name, whole):
    assert hub_id(name) == whole


def test_a_date_in_a_name_is_no_size():
    assert hub_id("nvidia/DeepSeek-R1-NVFP4") == "nvidia/DeepSeek-R1-NVFP4"


@pytest.mark.parametrize("name", ["zhipuai/GLM-5", "nvidia/GLM-5-NVFP4", "GLM-5-FP8"])
def test_checkpoints_of_a_model_share_its_originals_id(name):
    assert original_id(name) == "zai-org/GLM-5"


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b-BF16", "deepseek-ai/DeepSeek-R1-BF16"])
def test_a_name_that_promises_16_bits_is_not_read_as_fewer(name):
    with pytest.raises(ValueError, match=r"is not bundled, and the weights of .* --quantization bfloat16"):
        find_model(name)
    assert find_model("Qwen/Qwen3-8B-BF16") == find_model("Qwen/Qwen3-8B")
