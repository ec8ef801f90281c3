"""A tiny random model, made on the spot, and adapters for it: scheduling does not depend on weights."""

import json
from pathlib import Path

from dynabench.fidelity.recordings import Json

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""The model of scenarios that describe none, as a config.json."""
RANK = 4
"""Rank of adapters."""


def write_model(folder: Path, config: Json) -> None:
    """Write what vLLM reads of a model whose weights it draws."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, config: Json, seed: int) -> None:
    """Write a random LoRA adapter of a model, in PEFT's format: one for the queries of each of its attention layers.

    Args:
        folder: made here.
        config: the model's config.json.
        seed: adapters with different seeds answer differently.
    """
    import numpy
    from safetensors.numpy import save_file

    folder.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["q_proj"]}))
    draw = numpy.random.default_rng(seed)
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    queries = num_heads * config.get("head_dim", hidden // num_heads)
    matrices = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        matrices[f"{name}.lora_A.weight"] = draw.standard_normal((RANK, hidden), dtype="float32")
        matrices[f"{name}.lora_B.weight"] = draw.standard_normal((queries, RANK), dtype="float32")
    save_file(matrices, folder / "adapter_model.safetensors")
