"""Sizes of models: those of published files, against what Transformers' classes have."""

import json
from pathlib import Path

import pytest

from mocker.models.architectures import ARCHITECTURES, OTHER_NAMES
from mocker.models.catalog import find_model, model_configs
from mocker.models.shape import shape_of

HERE = Path(__file__).parent
ONE_OF_EACH = json.loads((HERE / "architectures.json").read_text())
BUNDLED = json.loads((HERE / "bundled.json").read_text())
SHARED = HERE.parents[3] / "shared" / "models"
FOLDERS = {name: SHARED / name.replace("/", "--") for name in BUNDLED}
WHOLE = {str(folder): name for name, folder in FOLDERS.items() if folder.is_dir()}
"""Folders of whole files, where they are at hand."""


def check(found, expected):
    assert found.num_parameters == pytest.approx(expected["parameters"], rel=0.01)
    assert found.num_expert_parameters == pytest.approx(expected["experts"], rel=0.01)
    assert found.num_active_parameters == pytest.approx(expected["active"], rel=0.01)
    assert dict(found.kinds) == (expected["kinds"] or {"full_attention": found.num_layers})
    assert found.is_tied == expected["tied"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_model_of_each_architecture_has_the_sizes_that_its_class_has(name):
    check(shape_of(ONE_OF_EACH[name]["config"]), ONE_OF_EACH[name])


@pytest.mark.parametrize(("name", "of"), [*[(name, name) for name in BUNDLED], *WHOLE.items()])
def test_bundled_models_have_the_sizes_that_their_classes_have_and_so_have_their_whole_files(name, of):
    check(find_model(name), BUNDLED[of])


def test_every_architecture_of_the_table_is_made_as_one_whose_file_is_read():
    tried = {*ONE_OF_EACH, *[config["model_type"] for config in model_configs().values()]}
    made_of = [ARCHITECTURES[name] for name in tried if name in ARCHITECTURES]
    unlike = sorted(name for name in ARCHITECTURES if name not in tried and ARCHITECTURES[name] not in made_of)
    assert unlike == ["granitemoehybrid", "nemotron-nas"]  # below


def test_the_page_on_models_names_every_architecture():
    page = (HERE.parents[2] / "docs" / "models.md").read_text()
    assert [name for name in [*ARCHITECTURES, *OTHER_NAMES] if f"`{name}`" not in page] == []


GRANITE = {
    "model_type": "granitemoehybrid",
    "hidden_size": 4096,
    "intermediate_size": 768,
    "layer_types": [*(["mamba"] * 9), "attention"] * 4,
    "mamba_d_conv": 4,
    "mamba_d_head": "auto",
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_heads": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "shared_intermediate_size": 1536,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}


def test_granite_4_has_experts_beside_a_shared_network_or_only_that():
    small = shape_of(GRANITE)
    assert small.num_parameters == pytest.approx(32.2e9, rel=0.01)
    assert small.num_active_parameters == pytest.approx(8.8e9, rel=0.01)  # "9B"
    assert dict(small.kinds) == {"linear_attention": 36, "full_attention": 4}
    dense = shape_of(GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192})
    assert dense.num_experts == 0


def test_layers_that_a_search_took_parts_from_have_each_its_own():
    attention, network = {"n_heads_in_group": 8}, {"ffn_mult": 5.25}
    blocks = [
        {"attention": attention, "ffn": network},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 2.625}},
        {"attention": {"no_op": True}, "ffn": {"no_op": True}},
    ]
    found = shape_of(
        {
            "model_type": "nemotron-nas",
            "block_configs": blocks,
            "hidden_size": 8192,
            "num_attention_heads": 64,
            "num_hidden_layers": 3,
            "vocab_size": 1000,
        }
    )
    assert dict(found.kinds) == {"full_attention": 1, "mlp": 1, "nothing": 1}
    assert [network.size for network, _ in found.feed_forwards] == [28672, 14336]
    assert found.num_parameters == 2 * 1000 * 8192 + 8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * (28672 + 14336)


GROK_2 = {
    "architectures": ["Grok1ForCausalLM"],
    "global_attn_every_n": 1,
    "head_dim": 128,
    "hidden_size": 8192,
    "intermediate_size": 32768,
    "model_type": "git",
    "moe_intermediate_size": 16384,
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "residual_moe": True,
    "sliding_window_size": -1,
    "vocab_size": 131072,
}
STEP_3_5 = {
    "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,
    "model_type": "step3p5",
    "moe_every_n_layer": 1,
    "moe_intermediate_size": 1280,
    "moe_layers_enum": ",".join(str(layer) for layer in range(3, 45)),
    "moe_num_experts": 288,
    "moe_top_k": 8,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "use_head_wise_attn_gate": True,
    "vocab_size": 128896,
}
JAMBA = {
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_size": 8192,
    "intermediate_size": 24576,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 512,
    "mamba_expand": 2,
    "model_type": "jamba",
    "num_attention_heads": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 72,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}


@pytest.mark.parametrize(
    ("config", "billions", "active", "kinds"),
    [
        (GROK_2, 269.5, 114.9, {"full_attention": 64}),
        (STEP_3_5, 196.96, 11.99, {"full_attention": 12, "sliding_attention": 33}),
        (JAMBA, 398.6, 94.1, {"linear_attention": 63, "full_attention": 9}),
    ],
)
def test_models_have_the_sizes_that_were_published(config, billions, active, kinds):
    found = shape_of(config)
    assert found.num_parameters / 1e9 == pytest.approx(billions, rel=0.001)
    assert found.num_active_parameters / 1e9 == pytest.approx(active, rel=0.001)
    assert dict(found.kinds) == kinds
