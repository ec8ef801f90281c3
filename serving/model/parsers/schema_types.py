"""Values that a model wrote as plain text, as JSON of the types that a tool's schema wants."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.model.parsers.json_text import encodable

NAMES_OF_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
TYPES = frozenset((*NAMES_OF_TYPES.values(), "null"))

Types = frozenset[str]
STRING = frozenset({"string"})


class ToolTypes:
    """The types of tools' parameters; those of one tool are found together, when its first call is read."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool.get("function") for tool in tools]
        self._schemas = {
            function.get("name"): function.get("parameters") for function in functions if isinstance(function, Mapping)
        }
        self._found: dict[str, dict[str, Types]] = {}

    def of(self, function: str, parameter: str) -> Types:
        """Return the types of a function's parameter; one that the schema does not describe is a string."""
        if function not in self._found:
            self._found[function] = _parameter_types(self._schemas.get(function))
        return self._found[function].get(parameter) or STRING


def _parameter_types(root: object) -> dict[str, Types]:
    """Return the types that each property of a schema may have.

    A client wrote the schema: what it refers to may be anything, itself included. Each place is visited once, and then
    its types spread to the places that name it, each of them at most once.
    """
    properties = root.get("properties") if isinstance(root, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    types: dict[int, set[str]] = {}
    users: dict[int, list[int]] = {}
    unseen = list(properties.values())
    while unseen:
        place = unseen.pop()
        if not isinstance(place, Mapping) or id(place) in types:
            continue
        types[id(place)] = _own_types(place)
        choices = _choices(place, root)
        unseen += choices
        for choice in choices:
            users.setdefault(id(choice), []).append(id(place))
    _spread(types, users)
    return {name: frozenset(types.get(id(place), ())) for name, place in properties.items()}


def _spread(types: dict[int, set[str]], users: dict[int, list[int]]) -> None:
    """Add to each place the types of the places that it names."""
    fresh = [(place, name) for place, names in types.items() for name in names]
    while fresh:
        place, name = fresh.pop()
        for user in users.get(place, ()):
            if name not in types[user]:
                types[user].add(name)
                fresh.append((user, name))


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names by itself or by its values."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else [name for name in _list(named) if isinstance(name, str)]
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    found = {name if name in TYPES else "any" for name in names}
    return found | {NAMES_OF_TYPES.get(type(value), "null") for value in values}


def _choices(schema: Mapping[str, Any], root: object) -> list[Any]:
    """Return the schemas that a schema names: its alternatives, and what it refers to."""
    choices = [choice for key in ("anyOf", "oneOf", "allOf") for choice in _list(schema.get(key))]
    reference = schema.get("$ref")
    return [*choices, _referred(reference, root)] if isinstance(reference, str) else choices


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
