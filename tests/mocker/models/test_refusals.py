"""Files that are not understood: one line, with the way out, whatever they hold."""

import copy
import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mocker.models.catalog import find_model, model_configs
from mocker.models.shape import ModelShape, shape_of
from mocker.models.spellings import SPELLINGS

LLAMA = model_configs()["meta-llama/Llama-3.1-8B"]
MIXTRAL = model_configs()["mistralai/Mixtral-8x7B-v0.1"]
OF_OTHERS = {
    "hybrid_override_pattern": "M*M*",
    "mamba_n_heads": 128,
    "linear_num_key_heads": 16,
    "interleave_moe_layer_step": 2,
    "compress_ratios": [0, 4, 128],
    "index_topk": 2048,
    "num_kv_shared_layers": 10,
    "moe_intermediate_size": 1408,
    "altup_num_inputs": 4,
    "num_local_experts": 8,
    "n_routed_experts": 64,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 512,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention"] * 32,
    "attn_output_gate": True,
    "linear_attn_config": {"num_heads": 32},
    "block_configs": [{}] * 32,
    "swa_head_dim": 64,
    "conv_L_cache": 3,
    "hc_mult": 4,
    "global_head_dim": 512,
    "some_new_num_heads": 7,
    "use_mla": True,
    "share_layers": True,
    "is_encoder_decoder": True,
    "total_ut_steps": 4,
}
HARMLESS = {
    "num_return_sequences": 1,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "max_window_layers": 28,
    "vision_config": {"num_hidden_layers": 24},
    "num_nextn_predict_layers": 1,
    "layer_types": ["full_attention"] * 32,
    "use_sliding_window": False,
    "sliding_window": None,
    "num_experts": 0,
    "router_aux_loss_coef": 0.001,
    "chunk_size_feed_forward": 1,
    "summary_type": "cls_index",
    "type_vocab_size": 2,
}


def refused(config, beside=None):
    with pytest.raises(ValueError) as caught:
        shape_of(config, beside)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_key_that_changes_sizes_and_is_not_read_is_refused_by_name(name):
    message = refused(LLAMA | {name: OF_OTHERS[name]})
    assert message.startswith(name)
    assert "--read-model-as llama" in message
    assert shape_of(LLAMA | {name: OF_OTHERS[name]}, read_as="llama") == shape_of(LLAMA)


READ_OF_A_LLAMA = (
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
NOT_COUNTED = ("num_nextn_predict_layers", "num_mtp_modules", "time_step_rank")
ALL_SIZES = {key for keys in SPELLINGS.values() for key in keys if "." not in key}
READ = {key for name in READ_OF_A_LLAMA for key in SPELLINGS[name]}


@pytest.mark.parametrize("name", sorted(ALL_SIZES - READ - {*NOT_COUNTED}))
def test_every_size_of_the_table_that_a_llama_does_not_have_is_refused(name):
    assert name in refused(LLAMA | {name: 5})


@pytest.mark.parametrize("name", sorted(READ))
def test_every_size_of_the_table_that_a_llama_has_is_read_by_all_its_names(name):
    plain = next(size for size in READ_OF_A_LLAMA if name in SPELLINGS[size])
    sizes = {"head_dim": 128} | LLAMA
    config = {key: value for key, value in sizes.items() if key not in SPELLINGS[plain]}
    assert shape_of(config | {name: sizes[plain]}) == shape_of(LLAMA)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_key_that_changes_nothing_is_not_refused(name):
    shape = shape_of(LLAMA | {name: HARMLESS[name]})
    assert dataclasses.replace(shape, num_nextn_layers=0) == shape_of(LLAMA)


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, 1e300, "32", True, [32], {"a": 1}])
def test_a_size_that_is_no_number_above_zero_is_refused_by_name_and_value(name, value):
    assert name in refused(LLAMA | {name: value})


def test_a_size_by_two_names_that_differ_is_refused_by_both():
    assert refused(LLAMA | {"n_layer": 10}) == "num_hidden_layers is 32, but n_layer is 10; expected one of them"
    assert shape_of(LLAMA | {"n_layer": 32}) == shape_of(LLAMA)


def test_a_missing_size_is_refused_by_name():
    assert "num_hidden_layers" in refused({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


@pytest.mark.parametrize("chosen", [0, None, 9])
def test_a_mixture_of_which_a_token_uses_no_experts_or_too_many_is_refused(chosen):
    assert "num_experts_per_tok" in refused(MIXTRAL | {"num_experts_per_tok": chosen})


@pytest.mark.parametrize(
    "types", [["full_attention"], ["full_attention"] * 33, ["strange"] * 32, "full", [1] * 32, [{}] * 32]
)
def test_kinds_of_layers_that_are_not_one_word_for_each_are_refused(types):
    assert "layer_types" in refused(model_configs()["google/gemma-4-26B-A4B"] | {"layer_types": types})


def test_an_architecture_that_is_not_known_is_refused_with_one_like_it_and_not_with_all():
    message = refused({"model_type": "qwen9", "hidden_size": 64})
    assert "architecture qwen9 is not known" in message
    assert "--read-model-as qwen" in message
    assert len(message) < 200


def test_the_class_of_a_file_does_not_make_its_architecture_known():
    assert "architecture mystery is not known" in refused(
        LLAMA | {"model_type": "mystery", "architectures": ["LlamaForCausalLM"]}
    )


@pytest.mark.parametrize("method", ["gguf", "hqq", "aqlm", "exl2", "strange", "", 5])
def test_a_format_of_weights_that_is_not_known_is_refused_by_name(method):
    assert "quant_method" in refused(LLAMA | {"quantization_config": {"quant_method": method, "x": 1}})


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "llama"', "[]", "null", '{"model_type": ["llama"]}', "\x00"])
def test_a_file_that_is_cut_off_or_no_object_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json: ") as caught:
        find_model(str(tmp_path))
    assert "\n" not in str(caught.value)


NUMBERS = st.integers(-2, 300) | st.floats() | st.sampled_from([10**30, 2**40, -(10**12)])
LEAVES = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["full_attention", "auto", "fp8", "M*"])
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
ONE_OF_EACH = json.loads(Path(__file__).with_name("architectures.json").read_text())
CONFIGS = model_configs() | {name: found["config"] for name, found in ONE_OF_EACH.items()}
KEYS = sorted({key for keys in [*CONFIGS.values(), *SPELLINGS.values()] for key in keys})


def places(part, before=()):
    """Return the ways to all values of a file."""
    found = []
    pairs = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, value in list(pairs)[:50]:
        found += [(*before, name), *places(value, (*before, name))]
    return found


@given(st.data())
def test_whatever_a_file_holds_it_is_a_model_or_an_error_of_one_line(data):
    config = copy.deepcopy(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(places(config)) | st.tuples(st.sampled_from(KEYS)))
        part = config
        for step in way:
            part = part[step]
        if isinstance(part, dict) and data.draw(st.booleans()) and last in part:
            del part[last]
        else:
            part[last] = data.draw(VALUES)
    beside = data.draw(st.none() | st.dictionaries(st.sampled_from(["quantization", "quant_algo"]), VALUES))
    try:
        found = shape_of(config, beside)
    except ValueError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 700
    else:
        assert isinstance(found, ModelShape)
        assert 0 < found.num_active_parameters <= found.num_parameters
        assert found.context_length is None or 1 <= found.context_length <= 10**9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hybrid_layer_spec", ["M", "*"]),
        ("ffn_dim_multiplier", 2),
        ("ffn_dim_multiplier", 1.3),
        ("window_cache", 128),
        ("decoder_attention_heads", 128),
        ("mlp_ratio", 2.5),
        ("moe_ratio", 0.5),
    ],
)
def test_a_word_that_asks_for_sizes_counts_whatever_other_words_stand_beside_it(name, value):
    assert refused(LLAMA | {name: value}).startswith(f"{name} is {value!r}")


@pytest.mark.parametrize("name", ["layer_norm_eps", "vision_select_layer", "mlp_layer_dropout", "mtp_hidden_size"])
def test_the_last_word_or_the_part_of_a_key_says_that_it_is_no_size_of_a_layer(name):
    assert shape_of(LLAMA | {name: 1e-5 if "eps" in name else 2}) == shape_of(LLAMA)


@pytest.mark.parametrize("name", SPELLINGS["max_position_embeddings"])
@pytest.mark.parametrize("value", [math.inf, math.nan, 1e30, 10**30, -1, "long"])
def test_a_length_that_is_no_number_of_tokens_is_refused_by_name(name, value):
    assert refused(LLAMA | {name: value}).startswith(f"{name} is ")


@pytest.mark.parametrize("name", SPELLINGS["max_position_embeddings"])
def test_a_length_counts_by_any_of_its_names(name):
    config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert shape_of(config | {name: 1000, "rope_scaling": None}).context_length == 1000


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (
            "exaone4",
            {"sliding_window_pattern": "LLXG"},
            "sliding_window_pattern is 'LLXG'; expected letters of L and G",
        ),
        ("exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; expected a whole number"),
        ("exaone4", {"sliding_window_pattern": [1]}, "sliding_window_pattern is [1]; expected a whole number"),
        ("ernie4_5_moe", {"moe_layer_end_index": "abc"}, "moe_layer_end_index is 'abc'; expected a whole number"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2; expected a whole number"),
        ("bamba", {"mamba_d_head": 0}, "mamba_d_head is 0; expected a whole number from 1 to 1,000,000,000, or 'auto'"),
        ("bamba", {"mamba_d_head": "wide"}, "mamba_d_head is 'wide'; expected a whole number"),
        ("jamba", {"mamba_dt_rank": 1.5}, "mamba_dt_rank is 1.5; expected a whole number"),
        ("gpt_neo", {"attention_layers": ["global"] * 23 + ["x"]}, "attention_layers has 'x'; expected"),
        ("gpt_neo", {"attention_layers": None, "attention_types": [5]}, "attention_types has 5; expected a list"),
        ("gpt_neo", {"attention_layers": None, "attention_types": [[["x"], 24]]}, "attention_types has 'x'; expected"),
        (
            "gpt_neo",
            {"attention_layers": None, "attention_types": [[["x"], 10**30]]},
            "attention_types has [['x'], 1000",
        ),
    ],
)
def test_a_value_of_one_architecture_that_means_nothing_is_refused_by_its_own_name(name, more, message):
    assert refused(ONE_OF_EACH[name]["config"] | more).startswith(message)


@pytest.mark.parametrize("value", ["x", 2, [0]])
def test_a_layer_of_llama_4_rotates_or_not(value):
    config = model_configs()["meta-llama/Llama-4-Maverick-17B-128E-Instruct"]
    count = config["num_hidden_layers"]
    assert refused(config | {"no_rope_layers": [value] + [0] * (count - 1)}).startswith(f"no_rope_layers has {value!r}")


def test_the_last_mixture_of_ernie_is_minus_one_or_a_number():
    config = ONE_OF_EACH["ernie4_5_moe"]["config"]
    assert shape_of(config | {"moe_layer_end_index": -1}) == shape_of(config)


def test_a_word_means_the_default_where_a_state_may_be_of_any_size():
    config = ONE_OF_EACH["jamba"]["config"]
    assert shape_of(config | {"mamba_dt_rank": "auto"}) == shape_of(config | {"mamba_dt_rank": None})


def test_heads_that_cannot_divide_a_layer_equally_are_refused_unless_their_size_is_said():
    config = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"num_attention_heads": 48}
    assert refused(config) == "it lacks head_dim, and 48 heads cannot divide hidden_size 4096 equally"
    assert shape_of(config | {"head_dim": 128})


def test_bitsandbytes_without_a_number_of_bits_is_refused():
    assert "it lacks load_in_4bit or load_in_8bit" in refused(
        LLAMA | {"quantization_config": {"quant_method": "bitsandbytes"}}
    )


@pytest.mark.parametrize("factor", [1e-9, 1e8])
def test_a_factor_of_positions_that_makes_no_context_is_refused(factor):
    assert "rope_scaling has factor" in refused(LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": factor}})


def test_the_size_of_experts_that_is_null_is_not_taken_from_elsewhere():
    with pytest.raises(ValueError, match="it lacks moe_intermediate_size"):
        shape_of(model_configs()["Qwen/Qwen3-30B-A3B"] | {"moe_intermediate_size": None})


def test_whether_embeddings_are_tied_is_true_or_false():
    with pytest.raises(ValueError, match="tie_word_embeddings is 'false'; expected true or false"):
        shape_of(model_configs()["meta-llama/Llama-3.1-8B"] | {"tie_word_embeddings": "false"})
