"""Sizes of models: those of published files, against what Transformers' classes have."""

import json
from pathlib import Path

import pytest

from mocker.models.architectures import ARCHITECTURES
from mocker.models.catalog import find_model, model_configs
from mocker.models.shape import shape_of

HERE = Path(__file__).parent
SHARED = HERE.parents[3] / "shared" / "models"
"""Whole files, where they are at hand."""
ONE_OF_EACH = json.loads((HERE / "architectures.json").read_text())
BUNDLED = json.loads((HERE / "bundled.json").read_text())
WHOLE = json.loads((SHARED / "truth.json").read_text()) if (SHARED / "truth.json").is_file() else {}


def check(found, expected):
    assert found.num_parameters == pytest.approx(expected["parameters"], rel=0.01)
    assert found.num_expert_parameters == pytest.approx(expected["experts"], rel=0.01)
    assert found.num_active_parameters == pytest.approx(expected.get("active", found.num_active_parameters), rel=0.02)
    assert dict(found.kinds) == (expected["kinds"] or {"full_attention": found.num_layers})
    assert found.is_tied == expected["tied"]


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_model_of_each_architecture_has_the_sizes_that_its_class_has(name):
    check(shape_of(ONE_OF_EACH[name]["config"]), ONE_OF_EACH[name])


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_have_the_sizes_that_their_classes_have(name):
    check(find_model(name), BUNDLED[name])


@pytest.mark.parametrize("name", [*WHOLE, *sorted(BUNDLED)[:1]])
def test_whole_files_are_read_as_their_bundled_parts_are(name):
    if name in WHOLE:
        truth = WHOLE[name]
        kinds = {"parameters": truth["params"], "kinds": truth["layer_types"]}
        check(find_model(str(SHARED / name)), {**truth, **kinds})
    else:
        check(shape_of(model_configs()[name]), BUNDLED[name])


def test_every_architecture_of_the_table_reads_a_file_of_another_name():
    """Those of which no file is at hand read the one of an architecture that is made of the same."""
    tried = {*ONE_OF_EACH, *[config["model_type"] for config in model_configs().values()]}
    made_of = [ARCHITECTURES[name] for name in tried if name in ARCHITECTURES]
    unlike = sorted(name for name in ARCHITECTURES if name not in tried and ARCHITECTURES[name] not in made_of)
    assert unlike == ["granitemoehybrid", "nemotron-nas"]  # below


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
