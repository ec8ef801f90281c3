"""Files that were read wrongly without a word."""

import json
import os
from pathlib import Path

import pytest

from mocker.models.catalog import find_model, model_configs
from mocker.models.description import approximations, facts, summary
from mocker.models.shape import shape_of

ONE_OF_EACH = json.loads(Path(__file__).with_name("architectures.json").read_text())
LLAMA = model_configs()["meta-llama/Llama-3.1-8B"]
GEMMA = {
    "model_type": "gemma3_text",
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
    "vocab_size": 262208,
}


def test_nemotron_3_nano_has_32_billion_parameters_not_102():
    found = find_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert (round(found.num_parameters / 1e9, 1), round(found.num_active_parameters / 1e9, 1)) == (31.6, 3.6)


def test_nemotron_3_super_has_121_billion_parameters_not_1495():
    found = find_model("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8")
    assert (round(found.num_parameters / 1e9), round(found.num_active_parameters / 1e9, 1)) == (121, 12.8)


def test_llama_4_maverick_has_401_billion_parameters_not_778():
    found = find_model("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    assert (round(found.num_parameters / 1e9), round(found.num_active_parameters / 1e9)) == (401, 17)


def test_llama_4_sees_chunks_of_8192_tokens_in_three_layers_of_four():
    found = find_model("meta-llama/Llama-4-Maverick-17B-128E-Instruct")
    assert dict(found.kinds) == {"chunked_attention": 36, "full_attention": 12}
    assert {mixer.window for mixer, _ in found.mixers} == {0, 8192}


def test_mimo_v2_sees_windows_of_128_tokens_in_most_layers():
    found = find_model("XiaomiMiMo/MiMo-V2-Flash")
    assert dict(found.kinds) == {"full_attention": 9, "sliding_attention": 39}
    assert {(mixer.window, mixer.num_kv_heads) for mixer, _ in found.mixers} == {(0, 4), (128, 8)}


def test_gemma_4_has_experts_that_a_token_uses():
    found = find_model("google/gemma-4-26B-A4B")
    assert round(found.num_active_parameters / 1e9, 1) == 3.8


@pytest.mark.parametrize("spelling", [{"sliding_window_pattern": 6}, {"_sliding_window_pattern": 6}, {}])
def test_gemma_3_has_windows_in_five_layers_of_six_by_all_its_spellings(spelling):
    found = shape_of(GEMMA | spelling)
    assert dict(found.kinds) == {"sliding_attention": 52, "full_attention": 10}


def test_a_multimodal_gemma_3_leaves_out_what_its_class_has_by_default():
    text = {name: GEMMA[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")}
    text |= {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    found = shape_of({"model_type": "gemma3", "text_config": text})
    assert found.num_parameters == pytest.approx(3.88e9, rel=0.01)
    assert found.vocab_size == 262208


def test_null_in_a_multimodal_file_is_not_the_default_of_the_class():
    text = {"model_type": "mistral", "hidden_size": 5120, "vocab_size": 131072}
    windowed, full = [
        shape_of({"model_type": "llava", "text_config": text | more}) for more in ({}, {"sliding_window": None})
    ]
    assert (dict(windowed.kinds), dict(full.kinds)) == ({"sliding_attention": 32}, {"full_attention": 32})
    assert windowed.num_parameters == full.num_parameters


def test_what_a_file_outside_of_a_multimodal_one_leaves_out_is_missing():
    with pytest.raises(ValueError, match="it lacks num_hidden_layers"):
        shape_of({"model_type": "mistral", "hidden_size": 5120, "vocab_size": 131072})


def test_glm_5_2_in_nvfp4_is_read():
    found = find_model("nvidia/GLM-5.2-NVFP4")
    assert (found.weights, found.kv_dtype, dict(found.kinds)) == ("fp4", "fp8", {"indexed_attention": 78})


def test_heads_of_a_head_dim_that_says_nothing_are_those_of_latent_attention():
    config = model_configs()["zai-org/GLM-5.2"]
    assert shape_of(config | {"head_dim": 0}).num_parameters == shape_of(config).num_parameters


def test_layers_share_an_index_by_a_list_by_letters_or_by_a_step():
    config = {k: v for k, v in model_configs()["zai-org/GLM-5.2"].items() if k != "indexer_types"}
    count = config["num_hidden_layers"]
    types = ["full" if layer % 4 == 0 else "shared" for layer in range(count)]
    letters = "".join(word[0].upper() for word in types)
    of_list = shape_of(config | {"indexer_types": types}).num_parameters
    assert (
        shape_of(config | {"index_topk_pattern": letters}).num_parameters == of_list < shape_of(config).num_parameters
    )
    assert shape_of(config | {"index_topk_freq": 4, "index_skip_topk_offset": 1}).num_parameters == of_list


def test_ling_2_5_and_3_share_a_name_but_not_their_layers():
    new = ONE_OF_EACH["bailing_hybrid"]["config"]
    old = {name: value for name, value in new.items() if "conv" not in name and "linear" not in name} | {
        "head_dim": 128
    }
    found = shape_of(old)
    state, *_ = [mixer for mixer, _ in found.mixers if mixer.kind == "linear_attention"]
    heads, hidden = old["num_attention_heads"], old["hidden_size"]
    assert sum(matrix.num_parameters for matrix in state.matrices) == 5 * heads * 128 * hidden
    assert found.num_parameters != shape_of(new).num_parameters


def test_values_of_single_layers_count():
    own = {"03": {"num_key_value_heads": 4}, "07": {"intermediate_size": 1000}}
    less = shape_of(LLAMA).num_parameters - shape_of(LLAMA | {"per_layer_config": own}).num_parameters
    assert less == 2 * 4096 * 4 * 128 + 3 * 4096 * (14336 - 1000)


def test_the_language_model_of_deepseek_vl_2_is_known_by_its_class_and_may_keep_keys_and_values():
    text = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": 1,
        "hidden_size": 1280,
        "intermediate_size": 6848,
        "kv_lora_rank": None,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 10,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 12,
        "use_mla": False,
        "vocab_size": 129280,
    }
    found = shape_of({"model_type": "deepseek_vl_v2", "language_config": text})
    assert found.num_parameters == pytest.approx(2.93e9, rel=0.01)
    assert {(mixer.num_kv_heads, mixer.kv_width) for mixer, _ in found.mixers} == {(10, 256)}


def test_a_file_without_a_model_type_is_known_by_its_class():
    config = {name: value for name, value in LLAMA.items() if name != "model_type"}
    assert shape_of(config | {"architectures": ["LlamaForCausalLM"]}).architecture == "llama"


def test_the_network_of_mpt_is_as_wide_as_its_expansion_ratio_says():
    config = ONE_OF_EACH["mpt"]["config"]
    found = {ratio: shape_of(config | {"expansion_ratio": ratio}).num_parameters for ratio in (4, 8)}
    assert found[8] - found[4] == 32 * 2 * 4 * 4096 * 4096


@pytest.mark.parametrize("more", [{"sliding_window_size": 4096}, {"global_attn_every_n": 4}])
def test_a_window_of_grok_is_not_read_as_full_attention(more):
    config = ONE_OF_EACH["grok-1"]["config"]
    assert shape_of(config | {"sliding_window_size": -1, "global_attn_every_n": 1}) == shape_of(config)
    with pytest.raises(ValueError, match=f"{next(iter(more))} is 4.*--read-model-as grok-1"):
        shape_of(config | more)


def test_sparse_attention_that_is_counted_as_full_is_named():
    found = shape_of(ONE_OF_EACH["phi3small"]["config"])
    assert approximations(found) == "its block-sparse attention is counted as full attention"


def test_a_changed_hf_quant_config_is_read_again(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    quant = tmp_path / "hf_quant_config.json"
    found = []
    for place, name in enumerate(["FP8", "NVFP4"]):
        quant.write_text(json.dumps({"quantization": {"quant_algo": name}}))
        os.utime(quant, ns=(place, place))
        found.append(find_model(str(tmp_path)).weights)
    quant.unlink()
    assert [*found, find_model(str(tmp_path)).weights] == ["fp8", "fp4", "bfloat16"]


@pytest.mark.parametrize("text", ["[1]", "{", "5", '{"quantization": {"quant_algo": "strange"}}'])
def test_errors_of_hf_quant_config_name_that_file(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"hf_quant_config.json( of modelopt)?: ") as caught:
        find_model(str(tmp_path))
    assert "has no attribute" not in str(caught.value)


def test_where_all_layers_have_a_window_kv_is_described_as_its_room_is_counted():
    found = shape_of(LLAMA | {"model_type": "mistral", "sliding_window": 4096})
    assert "32 of 32 layers keep KV of only 4,096 tokens" in summary(found)
    assert facts(found)["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    assert approximations(found) == ""


def test_layers_with_windows_or_states_keep_less():
    assert "10 of 62 layers keep KV, 52 keep only 1,024 tokens" in summary(shape_of(GEMMA))
    assert "6 of 52 layers keep KV, 23 keep a state" in summary(
        find_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    )
