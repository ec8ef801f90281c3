"""Values that a model wrote as plain text, as JSON of the types that a tool's schema wants."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.model.parsers.json_text import encodable

NAMES_OF_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


class ToolTypes:
    """The types of tools' parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function") for tool in tools]
        self._schemas = {
            function.get("name"): function.get("parameters") for function in functions if isinstance(function, Mapping)
        }

    def of(self, function: str, parameter: str) -> frozenset[str]:
        """Return the types of a function's parameter; one that the schema does not describe is a string."""
        schema = self._schemas.get(function)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        described = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types(described, schema, depth=8) or frozenset({"string"})


def _types(schema: object, root: object, depth: int) -> frozenset[str]:
    """Return the types that a schema names, by itself, its values, its alternatives, or what it refers to."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {name for name in named or () if isinstance(name, str)}
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    found |= {NAMES_OF_TYPES.get(type(value), "null") for value in values}
    choices = [choice for key in ("anyOf", "oneOf", "allOf") for choice in _list(schema.get(key))]
    if isinstance(schema.get("$ref"), str):
        choices.append(_referred(schema["$ref"], root))
    return frozenset(found).union(*(_types(choice, root, depth - 1) for choice in choices))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: object) -> object:
    """Return what a reference within a document means."""
    found = root
    for key in reference.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def to_json(text: str, types: frozenset[str]) -> str:
    """Return a value's JSON: of the first type that fits, or else whatever JSON it is, or else a string."""
    readers = [reader for name, reader in _READERS if name in types]
    for reader in readers if "string" in types else [*readers, _finite]:
        try:
            return encodable(json.dumps(reader(text), ensure_ascii=False))
        except (ValueError, KeyError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)


def _null(text: str) -> None:
    if text.strip().lower() != "null":
        raise ValueError(text)


def _number(text: str) -> float | int:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() else number


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _finite(text: str) -> Any:
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


_READERS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    ("null", _null),
    ("integer", int),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _finite),
    ("array", _finite),
)
