"""Layouts are refused here where vLLM refuses them: of every bundled model, and of those in ../shared/models if it is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mocker.models.catalog import find_model, model_configs
from mocker.models.layout import refusal

pytestmark = pytest.mark.timeout(3600)

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "models"
LAYOUTS = [(1, False), (2, False), (3, False), (8, False), (16, False), (16, True)]
"""GPUs that share a layer, and whether experts are left whole."""
NOT_BUILT = {"nvidia--GLM-5-NVFP4", "nvidia--GLM-5.1-NVFP4", "nvidia--GLM-5.2-NVFP4"}
"""Models that no H100 runs: sparse attention with FP8 KV needs other kernels."""
LANGUAGE = {
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "llama4": ("llama4_text", "Llama4ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
"""Types and classes of language models that Transformers names otherwise."""

MORE = {
    "deepseek_v4": {
        "hc_eps": 1e-06, "hc_sinkhorn_iters": 20, "norm_topk_prob": True, "num_hash_layers": 3, "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "topk_method": "noaux_tc", "compress_rope_theta": 160000,
        "rope_theta": 10000, "rms_norm_eps": 1e-06, "attention_bias": False, "hidden_act": "silu",
        "rope_scaling": {
            "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
        },
    },
    "mimo_v2_flash": {
        "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "hidden_act": "silu",
        "layernorm_epsilon": 1e-05, "attention_bias": False, "attention_value_scale": 0.707,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    },
    "minimax_m2": {
        "rotary_dim": 64, "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer",
        "use_routing_bias": True,
    },
}  # fmt: skip
"""What vLLM must also know of a type, which changes no size."""


def written(name, values, into):
    """Write a bundled model as a config.json, with what vLLM needs beside sizes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    kind = values["model_type"]
    kind, architecture = LANGUAGE.get(kind) or (kind, CLASSES[kind])
    whole = MORE.get(kind, {}) | values | {"model_type": kind, "architectures": [architecture]}
    if "weight_block_size" in values.get("quantization_config", {}):
        whole["quantization_config"] = {"activation_scheme": "dynamic"} | values["quantization_config"]
    if "ignore" in whole.get("quantization_config", {}):  # vLLM compares whole names
        left_out = [part.replace("layers.", "model.layers.") for part in whole["quantization_config"]["ignore"]]
        whole["quantization_config"] = whole["quantization_config"] | {"ignore": left_out}
    folder = into / name.replace("/", "--")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What vLLM says of each layout of each model."""
    into = tmp_path_factory.mktemp("models")
    folders = [written(name, values, into) for name, values in model_configs().items()]
    folders += sorted(folder for folder in SHARED.glob("*") if (folder / "config.json").is_file())
    program = [sys.executable, "-m", "tests.real_engines.layouts"]
    asked = json.dumps([[str(folder), *LAYOUTS] for folder in folders])
    said = subprocess.run(
        program,
        input=asked,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"VLLM_PLUGINS": ""},
        check=True,
    )
    return dict(zip(folders, json.loads(said.stdout), strict=True))


def test_vllm_builds_the_models(answers):
    assert {folder.name for folder, (whole, *_) in answers.items() if whole is not None} <= NOT_BUILT


def test_a_layout_is_refused_where_vllm_refuses_it(answers):
    differing = []
    for folder, said in answers.items():
        for (size, is_expert_parallel), theirs in zip(LAYOUTS, said, strict=True):
            shape = find_model(str(folder))
            ours = refusal(shape, tensor_parallel_size=size, enable_expert_parallel=is_expert_parallel)
            if (ours is None) != (theirs is None) and folder.name not in NOT_BUILT:
                differing.append((folder.name, size, is_expert_parallel, theirs, ours))
    assert not differing
