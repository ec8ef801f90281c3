"""The types in which weights are stored, with the bits of their scales: by the names that formats have for them."""

from collections.abc import Mapping
from typing import Any

from mocker.models.keys import MOST, shown, whole
from mocker.models.layers import BFLOAT16, WeightType

PLAIN = {
    "bfloat16": BFLOAT16,
    "fp8": WeightType("fp8", 1.0, "fp8"),
    "int8": WeightType("int8", 1.0, "int8"),
    "int4": WeightType("int4", 0.5625, "bfloat16"),
    "fp4": WeightType("fp4", 0.5625, "fp4"),
}
"""The types that a setting can ask for; the 4-bit ones with a scale of 8 bits for every 16 weights."""
FP8, INT8, NVFP4 = PLAIN["fp8"], PLAIN["int8"], PLAIN["fp4"]
MXFP4 = WeightType("fp4", 0.5 + 1 / 32, "fp4")
MXFP8 = WeightType("fp8", 1.0 + 1 / 32, "fp8")
UNPACKED = "bfloat16"
"""Computed in 16 bits: the weights are unpacked on the way."""


def number(found: Mapping[str, Any], *names: str, default: int | None = 0) -> int:
    """Return the whole number that the first of several names gives.

    Raises:
        ValueError: it is no such number, or is missing and has no default.
    """
    name, value = next(((name, found[name]) for name in names if found.get(name) is not None), ("", default))
    if not name and default is None:
        raise ValueError(f"it lacks {names[0]}")
    if (count := whole(value)) is None or not -1 <= count <= MOST:
        raise ValueError(f"{name} is {shown(value)}; expected a whole number")
    return count


def integer(bits: int, group_size: int, scale_bits: float = 16) -> WeightType:
    """Return whole numbers that are unpacked before they are multiplied, with bits of scale for each group, if there are any.

    Raises:
        ValueError: they have no such number of bits.
    """
    if bits not in (2, 3, 4, 8):
        raise ValueError(f"its weights have {bits} bits; expected 2, 3, 4 or 8")
    scale = scale_bits / 8 / group_size if group_size > 0 else 0.0
    return WeightType("int4" if bits <= 4 else "int8", bits / 8 + scale, UNPACKED)


def of_group(weights: Mapping[str, Any], *, is_weight_only: bool) -> WeightType:
    """Return the type of a group of compressed-tensors: floats or whole numbers, with a scale for each group of weights.

    Raises:
        ValueError: it is not known.
    """
    bits, size = number(weights, "num_bits"), number(weights, "group_size")
    kind, is_grouped = weights.get("type", "int"), size > 0 and "group" in str(weights.get("strategy") or "group")
    match kind, bits:
        case _, 16:
            return BFLOAT16
        case "float", 8:
            plain = MXFP8 if is_grouped and size == 32 else FP8
            return plain._replace(compute=UNPACKED) if is_weight_only else plain
        case "float", 4:
            scale = 1 / size if is_grouped else 0.0
            return WeightType("fp4", 0.5 + scale, UNPACKED if is_weight_only else "fp4")
        case "int", 8 if not is_weight_only and not is_grouped:
            return INT8
        case "int", int():
            return integer(bits, size if is_grouped else 0, 16 if weights.get("symmetric", True) else 16 + bits)
    raise ValueError(
        f"its weights are {shown(kind)} of {shown(weights.get('num_bits'))} bits; expected float of 4 or 8, or int"
    )


def algorithm(name: str, found: Mapping[str, Any]) -> WeightType:
    """Return the type of a modelopt algorithm, such as FP8, NVFP4, W4A16_AWQ or MXFP8.

    Raises:
        ValueError: it is not known.
    """
    plain, size = name.upper(), number(found, "group_size")
    if "NVFP4" in plain:
        return WeightType("fp4", 0.5 + 1 / (size or 16), UNPACKED if plain.startswith("W4A16") else "fp4")
    if "MXFP4" in plain:
        return MXFP4
    if "MXFP8" in plain:
        return MXFP8
    if plain.startswith(("W4A8", "W4A16", "INT4")):
        return integer(4, size or 128)
    if plain.startswith("FP8"):
        return FP8
    if plain.startswith(("INT8", "W8A8")):
        return INT8
    if plain.startswith("W8A16"):
        return integer(8, 0)
    raise ValueError(f"quant_algo is {shown(name)}; expected one of FP8, NVFP4, MXFP4, MXFP8, W4A16_AWQ, INT8_SQ")


def torchao_type(how: Mapping[str, Any]) -> WeightType:
    """Return the type of a torchao configuration: its name says what weights and activations are.

    Raises:
        ValueError: it is not known.
    """
    name, size = str(how.get("_type")), number(how.get("_data") or {}, "group_size")
    plain = name.lower().replace("_", "")
    if "int4weight" in plain:
        return integer(4, size or (128 if "int4weightonly" in plain else 32), 32)
    if "float8weightonly" in plain:
        return FP8._replace(compute=UNPACKED)
    if "float8weight" in plain:
        return FP8
    if "int8weightonly" in plain:
        return integer(8, size)
    if "int8weight" in plain:
        return INT8
    if "nvfp4" in plain:
        return NVFP4
    raise ValueError(f"its type is {shown(name)}; expected one such as Int4WeightOnlyConfig or Float8WeightOnlyConfig")
