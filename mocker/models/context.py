"""A model's context length, as vLLM 0.32 derives it from a config.json when `--max-model-len` is not given."""

from collections.abc import Mapping
from typing import Any

from mocker.models.keys import MOST, Keys, shown
from mocker.models.spellings import SPELLINGS

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


def context_length(k: Keys, text: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence, or None if the file does not say.

    Args:
        k: the values, of which the lengths are read.
        text: the same, of which the scaling of rotary positions is read.

    Raises:
        ValueError: a length or a factor is no such number.
    """
    lengths = [length for name in SPELLINGS["max_position_embeddings"] if (length := k.number(name, 0))]
    if not lengths:
        return None
    shortest = k.number("model_max_length", 0) or min(lengths)  # Cohere's counts alone
    scalings = _scalings(text)
    if any(_kind(scaling) == "longrope" for scaling in scalings):
        return k.number("original_max_position_embeddings", 0) or shortest
    factor = 1.0
    for scaling in scalings:
        if _kind(scaling) not in INCLUDED and "gemma3" not in str(text.get("model_type")):
            factor = _factor(scaling) or factor
    if not 1 <= shortest * factor <= MOST:
        raise ValueError(f"rope_scaling has factor {factor}, for {shortest:,} tokens; expected 1 to {MOST:,} of both")
    return int(shortest * factor)


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
    if factor is not None and (
        isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < MOST
    ):
        raise ValueError(f"rope_scaling has factor {shown(factor)}; expected a number above 0")
    return factor
