"""The values of arguments: text in, values out, and one line that says what was expected if they cannot be."""

import json
import re
from collections.abc import Callable
from typing import Any

from serving.stand_in.vllm.flags.arguments import Argument

DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
BARE_COUNT = re.compile(r'("(?:[^"\\]|\\.)*")|\b(\d+(?:\.\d+)?[kKmMgGtT])\b')
"""A string of JSON, or a number with a suffix outside of strings."""


def value_of(argument: Argument, text: str) -> Any:
    """Return what one word of an argument means.

    Raises:
        ValueError: it means nothing; the message names the flag, the word, and what was expected.
    """
    if argument.is_optional and text in ("", "None"):
        return None
    try:
        value = READERS[argument.type](text)
    except ValueError as error:
        raise _refusal(argument, text, str(error)) from None
    if argument.choices and value not in argument.choices:
        raise _refusal(argument, text, f"one of {', '.join(map(str, argument.choices))}")
    if argument.type == "settings":
        _check_fields(argument, value)
    return value


def _refusal(argument: Argument, text: str, expected: str) -> ValueError:
    return ValueError(f"{argument.flag} {text}: expected {expected}")


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def count(text: str) -> int:
    """Read a whole number as people write it: 8k is 8,000, 8K is 8,192, 1.5m is 1,500,000.

    Raises:
        ValueError: it is none; the message is what was expected.
    """
    found = COUNT.fullmatch(text.strip())
    if found is None:
        try:
            return int(text)
        except ValueError:
            raise ValueError("a whole number, such as 8192, 8k (8,000) or 8K (8,192)") from None
    number, suffix = found.groups()
    if suffix in DECIMAL:
        return int(float(number) * DECIMAL[suffix])
    if "." in number:
        raise ValueError(f"a whole number before {suffix}, or {number}{suffix.lower()}") from None
    return int(number) * BINARY[suffix]


def _count_or_auto(text: str) -> int:
    if text.strip().lower() in ("-1", "auto"):
        return -1
    try:
        return count(text)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"JSON ({error})") from None


def _object(text: str) -> dict[str, Any]:
    """Read a JSON object, in which numbers may have suffixes."""
    found = _json(BARE_COUNT.sub(lambda part: part[1] or str(count(part[2])), text))
    if not isinstance(found, dict):
        raise ValueError("a JSON object")
    return found


def _json_or_text(text: str) -> Any:
    is_object = text.strip().startswith("{") and text.strip().endswith("}")
    return _json(text) if is_object else text


def _name(text: str) -> str:
    return text.lower().replace("-", "_")


def _ids(text: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in map(str.strip, text.split(","))]


def _lora_module(text: str) -> dict[str, Any]:
    """Read NAME=PATH, or a JSON object with both."""
    name, equals, path = text.partition("=")
    if equals and "," not in text:
        return {"name": name, "path": path}
    found = _json(text) if text.lstrip().startswith("{") else None
    known = {"name", "path", "base_model_name", "is_3d_lora_weight"}
    if not isinstance(found, dict) or not {"name", "path"} <= found.keys() <= known:
        raise ValueError("NAME=PATH, or a JSON object with name, path and perhaps base_model_name")
    return found


READERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "name": _name,
    "integer": _integer,
    "count": count,
    "count_or_auto": _count_or_auto,
    "number": _number,
    "json": _json,
    "json_or_text": _json_or_text,
    "settings": _object,
    "ids": _ids,
    "lora_modules": _lora_module,
}


def _check_fields(argument: Argument, given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in argument.fields:
            raise ValueError(
                f"{argument.flag}.{name} {value!r}: unknown; expected some of {', '.join(argument.fields)}"
            )
