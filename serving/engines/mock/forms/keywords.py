"""The part of JSON Schema that the mocker understands, and how references are followed."""

from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import unquote

from serving.engines.mock.forms.errors import FormError

Raw = dict[str, Any] | bool
"""A schema as it was sent."""

Value = TypeVar("Value")

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

UNSUPPORTED = (
    "not",
    "if",
    "then",
    "else",
    "patternProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "$dynamicRef",
    "$recursiveRef",
    "extends",
    "disallow",
)
"""Keywords that constrain values and that the mocker does not support; any other unknown one is an annotation."""

MAX_COUNT = 1 << 64
"""The largest number of things that a keyword may name."""

MAX_DEPTH = 64
"""How deep `allOf` and `$ref` may be nested in each other."""

MAX_WORK = 100_000
"""The most steps that drawing a value may take."""


class WorkLimit:
    """Counts steps, so that hostile schemas end."""

    def __init__(self, limit: int = MAX_WORK) -> None:
        self._limit = self._left = limit

    @property
    def num_steps(self) -> int:
        """How many steps were counted."""
        return self._limit - self._left

    @property
    def is_half_done(self) -> bool:
        """Whether it is time to come to an end."""
        return self._left < self._limit // 2

    def step(self, count: int = 1) -> None:
        """Count steps.

        Raises:
            FormError: there were too many.
        """
        self._left -= count
        if self._left < 0:
            raise FormError("the form is too large, or has too many alternatives or too long texts, for the mocker")


def schema_of(raw: Any, where: str) -> Raw:
    """Return a schema unchanged.

    Raises:
        FormError: it is something else.
    """
    if not isinstance(raw, dict | bool):
        raise FormError(f"{where} is {_kind(raw)}; a schema was expected: an object or a boolean")
    return raw


def flat(root: Raw, raw: Raw, work: WorkLimit) -> list[dict[str, Any]] | None:
    """Return the schemas that must hold together, without `$ref` and `allOf`, None if nothing can satisfy them.

    Raises:
        FormError: a keyword or a reference is not supported.
    """
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    return found if _flatten(root, raw, found, seen, work, 0) else None


def _flatten(root: Raw, raw: Raw, found: list[dict[str, Any]], seen: set[int], work: WorkLimit, depth: int) -> bool:
    work.step()
    if isinstance(raw, bool):
        return raw
    if id(raw) in seen:  # a schema together with itself
        return True
    seen.add(id(raw))
    if depth > MAX_DEPTH:
        raise FormError(f"$ref and allOf are nested more than {MAX_DEPTH} deep")
    for name in UNSUPPORTED:
        if name in raw and not (name == "patternProperties" and not raw[name]):
            raise FormError(f'"{name}" is not supported by the mocker')
    found.append(raw)
    parts: list[Raw] = [schema_of(part, "allOf") for part in listed(raw, "allOf")]
    if "$ref" in raw:
        parts.append(target(root, raw["$ref"], work))
    return all(_flatten(root, part, found, seen, work, depth + 1) for part in parts)


def target(root: Raw, reference: Any, work: WorkLimit) -> Raw:
    """Return what a `$ref` refers to.

    Raises:
        FormError: it is not in this document, or takes too long.
    """
    work.step(len(str(reference)) // 16)
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise FormError(f'"$ref" {_short(reference)} is not supported by the mocker; expected #/... in the same schema')
    place: Any = root
    for part in reference[2:].split("/") if reference != "#" else ():
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            raise FormError(f'"$ref" {_short(reference)} refers to nothing')
    return schema_of(place, f"$ref {_short(reference)}")


def listed(raw: dict[str, Any], name: str) -> list[Any]:
    """Return a keyword's list, empty if it is not there.

    Raises:
        FormError: it is not a list.
    """
    return _typed(raw, name, list, "a list") or []


def names_of(raw: dict[str, Any], name: str) -> list[str]:
    """Return a keyword's list of names, empty if it is not there.

    Raises:
        FormError: it is something else.
    """
    names = listed(raw, name)
    if any(not isinstance(each, str) for each in names):
        raise FormError(f'"{name}" is {_short(names)}; a list of names was expected')
    return names


def mapped(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a keyword's object, empty if it is not there.

    Raises:
        FormError: it is not an object.
    """
    return _typed(raw, name, dict, "an object") or {}


def count_of(raw: dict[str, Any], name: str) -> int | None:
    """Return a keyword's number of things.

    Raises:
        FormError: it is not one.
    """
    value = raw.get(name)
    if value is None:
        return None
    if not _is_number(value) or not 0 <= value <= MAX_COUNT or value != int(value):
        raise FormError(f'"{name}" is {_short(value)}; a whole number was expected, at most {MAX_COUNT}')
    return int(value)


def text_of(raw: dict[str, Any], name: str) -> str | None:
    """Return a keyword's text, None if it is not there.

    Raises:
        FormError: it is not a text.
    """
    return _typed(raw, name, str, "a text")


def _typed(raw: dict[str, Any], name: str, kind: type[Value], words: str) -> Value | None:
    if name not in raw:
        return None
    value = raw[name]
    if not isinstance(value, kind):
        raise FormError(f'"{name}" is {_kind(value)}; {words} was expected')
    return value


def number_of(raw: dict[str, Any], name: str) -> float | None:
    """Return a keyword's number.

    Raises:
        FormError: it is not one.
    """
    value = raw.get(name)
    if value is None:
        return None
    if not _is_number(value):
        raise FormError(f'"{name}" is {_short(value)}; a number was expected')
    found: float = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def bounds_of(raw: dict[str, Any]) -> Iterator[tuple[bool, float, bool]]:
    """Yield a number's bounds: whether it is a lower one, its value, and whether the value itself is excluded.

    Draft 4's `exclusiveMinimum: true` beside a `minimum` is understood, too.
    """
    for is_low, name, exclusive in (
        (True, "minimum", "exclusiveMinimum"),
        (False, "maximum", "exclusiveMaximum"),
    ):
        flag = raw.get(exclusive)
        value = number_of(raw, name)
        if value is not None:
            yield is_low, value, flag is True
        if flag is not None and not isinstance(flag, bool):
            bound = number_of(raw, exclusive)
            assert bound is not None
            yield is_low, bound, True


def types_of(raw: dict[str, Any]) -> set[str] | None:
    """Return the types that a schema allows, None if it names none; numbers include whole ones.

    Raises:
        FormError: a type is unknown.
    """
    names = raw.get("type")
    if names is None:
        return None
    named = names if isinstance(names, list) else [names]
    for name in named:
        if name not in TYPES:
            raise FormError(f'"type" {_short(name)} is unknown; expected one of {", ".join(TYPES)}')
    return {*named, *(["integer"] if "number" in named else [])}


def items_of(raw: dict[str, Any], place: int) -> Raw:
    """Return the schema of an array's element, in today's words or draft 7's.

    Raises:
        FormError: there is something else in its place.
    """
    items = raw.get("items", True)
    prefix, rest = listed(raw, "prefixItems"), items
    if isinstance(items, list):
        prefix, rest = items, raw.get("additionalItems", True)
    return schema_of(prefix[place] if place < len(prefix) else rest, "items")


def prefix_length(raw: dict[str, Any]) -> int:
    """Return how many elements of an array have schemas of their own."""
    items = raw.get("items")
    return len(items if isinstance(items, list) else listed(raw, "prefixItems"))


def type_of(value: Any) -> str:
    """Return a value's type; a number without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value == value and abs(value) != float("inf") and value == int(value) else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def key_of(value: Any, work: WorkLimit) -> Any:
    """Return something hashable that is equal for equal JSON values: 1 is 1.0, and not true.

    Raises:
        FormError: that takes too long.
    """
    match value:
        case bool():
            return ("boolean", value)
        case str():
            work.step(len(value) // 256)  # hashed and compared in one go
        case list():
            work.step(1 + len(value) // 8)
            return ("array", *(key_of(each, work) for each in value))
        case dict():
            work.step(1 + len(value) // 8)
            return ("object", frozenset((name, key_of(each, work)) for name, each in value.items()))
    return value


def _kind(value: Any) -> str:
    return {"array": "an array", "integer": "a number", "null": "null"}.get(type_of(value), f"a {type_of(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
