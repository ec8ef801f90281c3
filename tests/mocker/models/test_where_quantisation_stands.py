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
    with pytest.raises(ValueError, match="quantization_config is .*; expected an object with a quant_method"):
        shape_of(LLAMA | {"quantization_config": value})


def test_what_names_no_module_is_refused():
    group = {"targets": ["re:.*nope.*"], "weights": {"num_bits": 4, "type": "int", "group_size": 128}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    with pytest.raises(ValueError, match="names no module of the model"):
        shape_of(LLAMA | {"quantization_config": config})
