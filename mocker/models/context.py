"""A model's context length, as vLLM 0.32 derives it from a config.json when `--max-model-len` is not given."""

from collections.abc import Mapping
from typing import Any

from mocker.models.keys import MOST, shown, whole

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
INCLUDED = (
    "default",
    "su",
    "longrope",
    "llama3",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
    "mrope",
    "proportional",
)
"""Kinds of rope scaling whose factor the length already includes."""


def context_length(text: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence, or None if the file does not say."""
    lengths = [int(text[name]) for name in LENGTHS if _is_number(text.get(name))]
    if _is_number(text.get("model_max_length")):  # Cohere's
        lengths = [int(text["model_max_length"])]
    if not lengths:
        return None
    scalings = _scalings(text)
    if any(_kind(scaling) == "longrope" for scaling in scalings):
        original = text.get("original_max_position_embeddings")
        return whole(original) or min(lengths)
    factor = 1.0
    for scaling in scalings:
        if _kind(scaling) not in INCLUDED and "gemma3" not in str(text.get("model_type")):
            factor = _factor(scaling) or factor
    return int(min(lengths) * factor)


def _scalings(text: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the settings of rotary positions: one, or one for each kind of layer."""
    found = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(found, dict):
        return []
    parts: list[Mapping[str, Any]] = [part for part in found.values() if isinstance(part, dict)]
    return parts or [found]


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def _factor(scaling: Mapping[str, Any]) -> float | None:
    factor = scaling.get("factor")
    if factor is not None and not (_is_number(factor) and factor < MOST):
        raise ValueError(f"rope_scaling has factor {shown(factor)}; expected a number above 0")
    return factor


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
