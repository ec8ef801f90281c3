"""Types of weights: what each format says of each module, and sizes of published checkpoints."""

import re

import pytest

from mocker.models.catalog import find_model, model_configs
from mocker.models.quantisation import quantisation_of
from mocker.models.shape import shape_of
from mocker.timing.memory import size_of_weights

GIB = 2**30
LLAMA_70B = model_configs()["meta-llama/Llama-3.1-70B"]
LLAMA_8B = model_configs()["meta-llama/Llama-3.1-8B"]
QUERY, DOWN = "layers.5.self_attn.q_proj", "layers.5.mlp.down_proj"


def group(bits, kind, **more):
    activations = {"num_bits": 8, "type": kind} if more.pop("activations", False) else None
    weights = {"num_bits": bits, "type": kind, "strategy": "channel", **more}
    return {"input_activations": activations, "targets": ["Linear"], "weights": weights}


def compressed(*groups, ignore=("lm_head",), **more):
    named = {f"group_{place}": found for place, found in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": list(ignore), **more}


def types(config, *modules, beside=None):
    found = quantisation_of({"quantization_config": config} if config else {}, beside)
    return [(weight.name, round(weight.bytes, 4)) for weight in [found.weight_of([module]) for module in modules]]


FP8_DYNAMIC = compressed(group(8, "float", activations=True))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def test_llama_70b_in_fp8_takes_68_gib_as_vllm_logs_it():
    found = size_of_weights(shape_of(LLAMA_70B | {"quantization_config": FP8_DYNAMIC}))
    assert found / GIB == pytest.approx(67.7, rel=0.005)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("openai/gpt-oss-120b", 65.25),
        ("openai/gpt-oss-20b", 13.76),
        ("moonshotai/Kimi-K2.5", 595),
        ("zai-org/GLM-5.2-FP8", 745),
    ],
)
def test_checkpoints_are_as_large_as_those_that_are_published(name, gigabytes):
    assert size_of_weights(find_model(name)) / 1e9 == pytest.approx(gigabytes, rel=0.015)


QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(("config", "gigabytes"), [(AWQ, 5.57), (GPTQ, 5.57), (GPTQ | {"bits": 8}, 8.9)])
def test_qwen_7b_is_as_large_as_its_published_checkpoints(config, gigabytes):
    found = size_of_weights(shape_of(QWEN_7B | {"quantization_config": config}))
    assert found / 1e9 == pytest.approx(gigabytes, rel=0.015)


@pytest.mark.parametrize(
    ("config", "query"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8", 1.0)),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}, ("fp8", 1.0)),
        (FP8_DYNAMIC, ("fp8", 1.0)),
        (compressed(group(8, "int", activations=True)), ("int8", 1.0)),
        (compressed(group(4, "int", strategy="group", group_size=128)), ("int4", 0.5156)),
        (compressed(group(4, "int", strategy="group", group_size=32, symmetric=False)), ("int4", 0.5781)),
        (compressed(group(4, "float", strategy="tensor_group", group_size=16)), ("fp4", 0.5625)),
        (compressed(group(4, "float", strategy="group", group_size=32)), ("fp4", 0.5312)),
        (compressed(group(8, "float", strategy="group", group_size=32)), ("fp8", 1.0312)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8", 1.0)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, ("fp4", 0.5625)),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, ("fp8", 1.0312)),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128}, ("int4", 0.5156)),
        ({"quant_method": "modelopt", "quant_algo": "INT8_SQ"}, ("int8", 1.0)),
        (GPTQ | {"bits": 2}, ("int4", 0.2676)),
        (GPTQ | {"bits": 3}, ("int4", 0.3936)),
        (GPTQ, ("int4", 0.5195)),
        (GPTQ | {"group_size": -1}, ("int4", 0.5)),
        (GPTQ | {"bits": 8}, ("int8", 1.0234)),
        (AWQ, ("int4", 0.5195)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("int4", 0.5625)),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, ("int4", 0.5159)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ("int8", 1.0)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": []}, ("bfloat16", 2.0)),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, ("int4", 0.5312)),
        ({"quant_method": "torchao", "quant_type": "float8_dynamic_activation_float8_weight"}, ("fp8", 1.0)),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}},
            },
            ("fp4", 0.5312),
        ),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, ("fp8", 1.0)),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 128}, ("int4", 0.5195)),
        ({"bits": 4, "group_size": 64}, ("int4", 0.5625)),
    ],
)
def test_each_format_says_how_wide_a_weight_is_with_its_scales(config, query):
    assert types(config, QUERY) == [query]


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.5.self_attn.q_proj"]},
        {"quant_method": "fp8", "ignored_layers": ["model.layers.5.self_attn"]},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["self_attn"]},
        compressed(group(8, "float"), ignore=["re:.*self_attn.*"]),
        compressed(group(8, "float"), ignore=["model.language_model.layers.5.self_attn.q_proj"]),
        compressed({**group(8, "float"), "targets": ["re:.*mlp.*"]}),
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*self_attn*"]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.5.self_attn*"]},
        GPTQ | {"dynamic": {"-:.*self_attn.*": {}}},
        GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]},
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["q_proj"]},
        {"quant_method": "quark", "exclude": ["*q_proj"], "global_quant_config": {"weight": {"dtype": "int8"}}},
        {"quant_method": "auto-round", "bits": 4, "extra_config": {QUERY: {"bits": 16}}},
    ],
)
def test_modules_that_are_left_out_stay_in_16_bits(config):
    query, down = types(config, QUERY, DOWN)
    assert query == ("bfloat16", 2.0)
    assert down[0] != "bfloat16"


def test_a_name_with_a_star_is_not_that_of_a_layer_with_more_digits():
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["model.layers.1*"]}
    one, ten = types(config, "layers.1.self_attn.q_proj", "layers.10.self_attn.q_proj")
    assert (one[0], ten[0]) == ("bfloat16", "fp4")


def test_groups_of_modules_by_name_count_before_those_by_class():
    config = compressed(
        group(8, "float"), {**group(4, "int", strategy="group", group_size=128), "targets": ["re:.*mlp.*"]}
    )
    assert [name for name, _ in types(config, QUERY, DOWN)] == ["fp8", "int4"]


def test_rules_of_gptq_give_modules_their_own_bits():
    config = GPTQ | {"dynamic": {r"+:.*\.5\.mlp\..*": {"bits": 8, "group_size": 64}}}
    assert types(config, QUERY, DOWN) == [("int4", 0.5195), ("int8", 1.0469)]


def test_mixed_precision_lists_modules_and_leaves_the_others_as_they_are():
    layers = {
        "model.layers.5.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.5.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    }
    beside = {
        "quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    }
    found = types(None, QUERY, "layers.5.mlp.experts.0.up_proj", DOWN, beside=beside)
    assert [name for name, _ in found] == ["fp8", "fp4", "bfloat16"]
    assert quantisation_of({}, beside).kv_dtype == "fp8"


def test_the_file_beside_counts_only_where_config_json_says_nothing():
    beside = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    assert types(None, QUERY, beside=beside) == [("fp4", 0.5625)]
    assert types(FP8_DYNAMIC, QUERY, beside=beside) == [("fp8", 1.0)]


def test_a_quantization_config_inside_of_text_config_counts():
    text = QWEN_7B | {"quantization_config": AWQ}
    assert shape_of({"model_type": "qwen2_5_vl", "text_config": text}).weights == "int4"


@pytest.mark.parametrize(
    ("more", "kv"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"kv_cache_scheme": None}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_type_of_the_kv_cache_is_read(more, kv):
    assert quantisation_of({"quantization_config": FP8_DYNAMIC | more}).kv_dtype == kv


def test_a_type_of_the_kv_cache_that_is_not_simulated_is_refused():
    with pytest.raises(ValueError, match="KV cache is 'NVFP4'; expected FP8"):
        quantisation_of({}, {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}})


@pytest.mark.parametrize(
    "method", ["fp8", "compressed-tensors", "modelopt", "gptq", "awq", "torchao", "quark", "auto-round"]
)
@pytest.mark.parametrize("value", [5, "x", [1], {"a": 5}])
def test_what_a_format_does_not_write_is_refused_in_a_line(method, value):
    config = {"quant_method": method, "config_groups": value, "quant_type": value, "global_quant_config": value}
    config |= {"ignore": value, "modules_to_not_convert": value, "bits": value, "quantized_layers": value}
    with pytest.raises(
        ValueError, match=f"quantization_config.*{method}|{method}.*quantization_config|quantization_config"
    ):
        quantisation_of({"quantization_config": config})


@pytest.mark.parametrize("bits", [1, 5, 6, 7, 9, 0, -1])
def test_weights_of_other_bits_than_are_known_are_refused(bits):
    with pytest.raises(ValueError, match=f"have {bits} bits; expected 2, 3, 4 or 8"):
        types(GPTQ | {"bits": bits}, QUERY)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": "four"}, "gptq: bits is 'four'; expected a whole number"),
        (GPTQ | {"bits": True}, "gptq: bits is True; expected a whole number"),
        (GPTQ | {"group_size": 1.5}, "gptq: group_size is 1.5; expected a whole number"),
        ({"quant_method": "gptq", "group_size": 128}, "gptq: it lacks bits"),
        ({"quant_method": "awq", "w_bit": "x"}, "awq: w_bit is 'x'; expected a whole number"),
        ({"bits": "x"}, "mlx: bits is 'x'; expected a whole number"),
        (compressed(group("x", "int")), "compressed-tensors: num_bits is 'x'; expected a whole number"),
        ({"quant_method": "fp8", "weight_block_size": ["x", 1]}, "fp8: weight_block_size is ['x', 1]; expected two"),
        ({"quant_method": "w4afp8", "group_size": "x"}, "w4afp8: group_size is 'x'; expected a whole number"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": "x"},
            "modelopt: group_size is 'x'; expected",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "strange"}}},
            "quark: dtype is 'strange'; expected one such as",
        ),
        (
            {"quant_method": "torchao", "quant_type": "int8_weight_only", "quant_type_kwargs": {"group_size": "x"}},
            "torchao: group_size is 'x'; expected a whole number",
        ),
    ],
)
def test_a_number_of_a_format_that_is_none_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=re.escape(f"quantization_config of {message}")):
        types(config, QUERY)
