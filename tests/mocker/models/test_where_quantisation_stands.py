"""Where a quantization_config stands in a file, and what it must name."""

import pytest

from mocker.models.catalog import model_configs
from mocker.models.shape import shape_of

LLAMA = model_configs()["meta-llama/Llama-3.1-8B"]
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}


@pytest.mark.parametrize("part", ["text_config", "llm_config", "language_config", "language_model"])
def test_it_is_read_in_every_part_that_describes_the_language_model(part):
    inside = {"model_type": "internvl_chat", part: LLAMA | AWQ}
    beside = {"model_type": "internvl_chat", part: LLAMA} | AWQ
    assert shape_of(inside).weights == shape_of(beside).weights == "int4"


@pytest.mark.parametrize("value", ["fp8", [{"quant_method": "fp8"}], 8])
def test_what_is_no_object_is_refused(value):
    with pytest.raises(ValueError, match=r"quantization_config is .*; expected an object with a quant_method"):
        shape_of(LLAMA | {"quantization_config": value})


def test_what_names_no_module_is_refused():
    group = {"targets": ["re:.*nope.*"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    with pytest.raises(ValueError, match="names no module of the model"):
        shape_of(LLAMA | {"quantization_config": config})


def weights(**config):
    return shape_of(LLAMA | {"quantization_config": config})


def test_only_the_kv_cache_may_be_quantised():
    found = shape_of(LLAMA, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert (found.weights, found.kv_dtype) == ("bfloat16", "fp8")


def test_modules_that_quark_leaves_out_keep_16_bits():
    fp8 = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "input_tensors": {}}
    plain = weights(quant_method="quark", global_quant_config=fp8)
    mixed = weights(quant_method="quark", global_quant_config=fp8, layer_quant_config={"*self_attn*": {"weight": None}})
    attention = sum(count * m.num_parameters for mixer, count in plain.mixers for m in mixer.matrices)
    assert mixed.num_weight_bytes - plain.num_weight_bytes == pytest.approx(attention, rel=0.001)


def test_mlx_has_one_type_for_all_modules_with_the_scales_of_its_mode():
    one = weights(quant_method="mlx", bits=4, group_size=32, mode="mxfp4")
    matrices = sum(count * m.num_parameters for m, count in one.matrices)
    assert one.weight_bytes_by_type["fp4"] == pytest.approx(matrices * 0.53125, rel=1e-6)
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj has a type of its own"):
        weights(quant_method="mlx", bits=4, group_size=64, **{"model.layers.0.mlp.down_proj": {"bits": 8}})
