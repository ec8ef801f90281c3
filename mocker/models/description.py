"""What was understood of a model: in a line, in figures, and what of it is only approximated."""

import re
from collections import Counter
from typing import Any

from mocker.models.architectures import ARCHITECTURES
from mocker.models.catalog import assumed
from mocker.models.kv_cache import bytes_per_token, kv_cache
from mocker.models.shape import ModelShape

SHORT = {"bfloat16": "BF16", "fp8": "FP8", "int8": "INT8", "int4": "INT4", "fp4": "FP4"}
PROMISED = re.compile(r"fp8|nvfp4|mxfp4|fp4|awq|gptq|int4|int8|w4a16|w8a8")
NOTABLE = 0.05
"""Share of the bytes from which on a second type of weights is named."""


def summary(shape: ModelShape, kv_dtype: str = "auto") -> str:
    """Return a line: parameters, layers that keep KV, and the types of weights and KV."""
    size = f"{_billions(shape.num_parameters)} B parameters"
    if shape.num_experts:
        size += f", {_billions(shape.num_active_parameters)} B active"
    return f"{size}; {_layers(shape)}; {_weights(shape)} weights, {SHORT[_kv(shape, kv_dtype)]} KV"


def facts(shape: ModelShape, kv_dtype: str = "auto") -> dict[str, Any]:
    """Return the figures, by their names in JSON; bytes are those that a single GPU would hold."""
    kv = _kv(shape, kv_dtype)
    return {
        "architecture": shape.architecture,
        "parameters": shape.num_parameters,
        "active_parameters": shape.num_active_parameters,
        "expert_parameters": shape.num_expert_parameters,
        "layers": dict(shape.kinds),
        "weights": shape.weights,
        "weight_bytes": round(shape.num_weight_bytes),
        "kv_cache_dtype": kv,
        "kv_bytes_per_token": bytes_per_token(shape, kv),
        "window": max([mixer.window for mixer, _ in shape.mixers], default=0) or None,
        "state_bytes": round(sum([count * mixer.state_bytes for mixer, count in shape.mixers])),
        "context_length": shape.context_length,
        "tied_embeddings": shape.is_tied,
    }


def approximations(shape: ModelShape) -> str:
    """Return what is not simulated exactly as vLLM does it, in a clause; nothing if all is."""
    found = [clause] if (clause := ARCHITECTURES[shape.architecture].approximation) else []
    if any(mixer.state_bytes for mixer, _ in shape.mixers):
        found.append("the times of layers with a state were not measured")
    if any(mixer.index is not None or mixer.compression > 1 for mixer, _ in shape.mixers):
        found.append("the times of sparse attention were not measured")
    try:
        cache = kv_cache(shape, block_size=16)
    except ValueError as error:
        return str(error)
    if not cache.is_exact:
        found.insert(
            0,
            "KV blocks are counted as if compressed layers formed groups like others, and windows beside them took none",
        )
    return "; ".join(found)


def doubt(name: str, shape: ModelShape) -> str:
    """Return what speaks against the types of the weights: a checkpoint that is not bundled, or a name that promises others."""
    if said := assumed(name, shape.weights):
        return said
    promised = PROMISED.search(name.rstrip("/").rpartition("/")[2].lower())
    if promised is None or shape.weights != "bfloat16":
        return ""
    return (
        f"the name says {promised[0].upper()}, but config.json has no quantization_config and there is no "
        "hf_quant_config.json beside it, so the weights are read as BF16; --quantization sets their type"
    )


def _billions(count: float) -> str:
    return f"{count / 1e9:,.1f}" if count >= 1e9 else f"{count / 1e9:.2f}"


def _layers(shape: ModelShape) -> str:
    """Return how many layers keep KV of what."""
    total, kept, states = shape.num_layers, 0, 0
    windows: Counter[int] = Counter()
    for mixer, count in shape.mixers:
        if mixer.keeps_all:
            kept += count
        elif mixer.num_kv_heads and mixer.has_kv:
            windows[mixer.window] += count
        elif mixer.state_bytes:
            states += count
    if kept >= total:  # some have two attentions
        return f"{kept} layers keep KV"
    if not kept and len(windows) == 1:
        ((window, count),) = windows.items()
        text = f"{count} of {total} layers keep KV of only {window:,} tokens"
    else:
        text = f"{kept} of {total} layers keep KV"
        text += "".join([f", {count} keep only {window:,} tokens" for window, count in windows.items()])
    return text + (f", {states} keep a state" if states else "")


def _weights(shape: ModelShape) -> str:
    sizes = shape.weight_bytes_by_type
    total = sum(sizes.values())
    named = [name for name, size in sizes.most_common() if size > NOTABLE * total]
    return " and ".join([SHORT[name] for name in named])


def _kv(shape: ModelShape, kv_dtype: str) -> str:
    return shape.kv_dtype if kv_dtype == "auto" else kv_dtype
