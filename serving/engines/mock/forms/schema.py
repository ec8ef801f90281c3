"""A JSON schema understood: `$ref`, `allOf` and neighbours of `anyOf` are put together, place by place.

What the mocker cannot honour makes its place a dead one. A value is made without it if the schema allows one: another
branch of an `anyOf`, no such optional property. Only if there is none, the schema is refused with the reason.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from serving.engines.mock.forms.check import SchemaCheck
from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.formats import FORMATS
from serving.engines.mock.forms.keywords import (
    Raw,
    WorkLimit,
    count_of,
    flat,
    items_of,
    key_of,
    listed,
    mapped,
    names_of,
    prefix_length,
    schema_of,
    text_of,
    types_of,
)
from serving.engines.mock.forms.nodes import (
    MAX_VALUES,
    Alternatives,
    Array,
    Dead,
    Fixed,
    Formatted,
    Matched,
    Node,
    Object,
    Option,
    Property,
    Slot,
    Text,
    settle,
    wish,
)
from serving.engines.mock.forms.numbers import number_node
from serving.engines.mock.forms.regex import MAX_TEXT, pattern_of

MAX_SLOTS = 2_000
"""The most places of a schema, and the most alternatives."""

TOO_MANY = f"the schema has more than {MAX_SLOTS:,} places or alternatives"

MAX_WORK = 40_000
"""The most steps that it may take to understand a schema."""

MAX_ENUM = 1_000
"""How many values of an enum are considered."""

MAX_BYTES = 1 << 19
MAX_SHOWN = 80
"""How many characters of a name messages show."""

ANY = ("string", "integer", "boolean")
"""Types of a value that may be anything."""

NAME: Raw = {"type": "string"}
"""What any property's name is."""

HINTS = {
    "object": ("properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that suggest a type if none is named."""


class Schema:
    """A schema, ready for making values."""

    def __init__(self, raw: Raw) -> None:
        """Understand it.

        Raises:
            FormError: the mocker can make no value of it.
        """
        self.raw = raw
        self._work = WorkLimit(MAX_WORK)
        self._check = SchemaCheck(raw, self._work)
        self._slots: dict[Any, Slot] = {}
        self._queue: list[Slot] = []
        self._num_options = 0
        self.needs_check = False
        """Whether a value that grew must be checked."""
        self.has_values = False
        """Whether a value was made."""
        self.root = self._slot([raw], "#")
        while self._queue:
            slot = self._queue.pop()
            try:
                slot.node = self._node(slot)
            except FormError as error:
                reason = str(error)
                slot.node = Dead(reason if reason.startswith("#") else f"{slot.where}: {reason}")
        settle(list(self._slots.values()), WorkLimit())
        wish(self.root, set())
        if self.root.least == math.inf:
            raise FormError(_reason(self.root, set()) or "# contains itself without end")

    def _slot(
        self, raws: Sequence[Raw], where: str, chosen: frozenset[tuple[int, str]] = frozenset(), type: str = ""
    ) -> Slot:
        """Return the place at which all these schemas hold."""
        together: list[dict[str, Any]] = []
        for raw in raws:
            try:
                found = flat(self.raw, raw, self._work)
            except FormError as error:
                return Slot(where, [], node=Dead(f"{where}: {error}"))
            if found is None:
                return Slot(where, [], node=Dead(f"{where}: nothing is allowed"))
            together += found
        unique = list({id(each): each for each in together}.values())
        key = (frozenset(map(id, unique)), chosen, type)
        if key not in self._slots:
            if len(self._slots) >= MAX_SLOTS:
                raise TooLargeError(TOO_MANY)
            slot = self._slots[key] = Slot(where, unique, chosen, type)
            self._queue.append(slot)
        return self._slots[key]

    def _node(self, slot: Slot) -> Node:
        if any("const" in raw or "enum" in raw for raw in slot.together):
            return self._fixed(slot)
        for raw in slot.together:
            for name in ("anyOf", "oneOf"):
                if name in raw and (id(raw), name) not in slot.chosen:
                    return self._alternatives(slot, raw, name)
        types = [slot.type] if slot.type else self._types(slot)
        if not types:
            return Dead(f"{slot.where} allows no type")
        if len(types) > 1:
            slots = [self._slot(slot.together, slot.where, slot.chosen, type) for type in types]
            return Alternatives([Option(each, [], place) for place, each in enumerate(slots)])
        return self._typed(slot, types[0])

    def _fixed(self, slot: Slot) -> Node:
        """Return those values of the first enum that fit everything."""
        first = next(raw for raw in slot.together if "const" in raw or "enum" in raw)
        values = [first["const"]] if "const" in first else listed(first, "enum")[:MAX_ENUM]
        found = {
            key_of(value, self._work): value
            for value in values
            if all(self._check.fits(raw, value) for raw in slot.together)
        }
        return Fixed(list(found.values())) if found else Dead(f"{slot.where}: no value of its enum fits")

    def _alternatives(self, slot: Slot, raw: dict[str, Any], name: str) -> Node:
        branches = [schema_of(branch, name) for branch in listed(raw, name)]
        self._num_options += len(branches)
        if self._num_options > MAX_SLOTS:
            raise TooLargeError(TOO_MANY)
        chosen = slot.chosen | {(id(raw), name)}
        single = branches if name == "oneOf" and len(branches) > 1 else []
        self.needs_check |= bool(single)
        options = [
            Option(self._branch(slot, branch, f"{slot.where}/{name}/{place}", chosen), single, place)
            for place, branch in enumerate(branches)
        ]
        return Alternatives(options) if options else Dead(f'{slot.where}: "{name}" is empty')

    def _branch(self, slot: Slot, branch: Raw, where: str, chosen: frozenset[tuple[int, str]]) -> Slot:
        try:
            own = flat(self.raw, branch, self._work) or []
        except FormError as error:
            return Slot(where, [], node=Dead(f"{where}: {error}"))
        # A branch that leads back to a choice that was made would make that choice its own reason.
        if any((id(raw), name) in chosen for raw in own for name in ("anyOf", "oneOf")):
            return Slot(where, [], node=Dead(f"{where} contains itself"))
        return self._slot([*slot.together, branch], where, chosen)

    def _types(self, slot: Slot) -> list[str]:
        allowed: set[str] | None = None
        for raw in slot.together:
            types = types_of(raw)
            if types is not None:
                allowed = types if allowed is None else allowed & types
        if allowed is None:
            used = {name for raw in slot.together for name in raw}
            allowed = {type for type, hints in HINTS.items() if not used.isdisjoint(hints)} or set(ANY)
        if "number" in allowed:
            allowed = allowed - {"integer"}
        return sorted(allowed)

    def _typed(self, slot: Slot, type: str) -> Node:
        match type:
            case "null":
                return Fixed([None])
            case "boolean":
                return Fixed([True, False])
            case "integer" | "number":
                return number_node(slot.together, type == "integer", slot.where, self._work)
            case "string":
                return _text(slot.together, slot.where, self._work)
            case "array":
                return self._array(slot)
        return self._object(slot)

    def _array(self, slot: Slot) -> Node:
        raws = slot.together
        low, high = _room(raws, "minItems", "maxItems", slot.where)
        length = max((prefix_length(raw) for raw in raws), default=0)
        prefix = [
            self._slot([items_of(raw, place) for raw in raws], f"{slot.where}/prefixItems/{place}")
            for place in range(int(min(length, high)))
        ]
        rest = self._slot([items_of(raw, length) for raw in raws], f"{slot.where}/items")
        is_unique = any(raw.get("uniqueItems") is True for raw in raws)
        self.needs_check |= is_unique
        return Array(prefix, rest, low, high, is_unique)

    def _object(self, slot: Slot) -> Node:
        raws = slot.together
        required = dict.fromkeys([name for raw in raws for name in names_of(raw, "required")])
        named = dict.fromkeys([name for raw in raws for name in mapped(raw, "properties")])
        names = [*named, *(name for name in required if name not in named)]
        properties = [
            Property(name, self._slot(self._member(raws, name), _path(slot.where, name)), name in required)
            for name in names
        ]
        low, high = _room(raws, "minProperties", "maxProperties", slot.where)
        extras = [schema_of(raw.get("additionalProperties", True), "additionalProperties") for raw in raws]
        spoken = [raw["propertyNames"] for raw in raws if "propertyNames" in raw]
        return Object(
            properties,
            self._slot(extras, f"{slot.where}/additionalProperties"),
            self._slot([*(schema_of(name, "propertyNames") for name in spoken), NAME], f"{slot.where}/propertyNames")
            if spoken
            else None,
            is_map=not any("properties" in raw for raw in raws)
            or any(isinstance(extra, dict) and extra for extra in extras),
            low=low,
            high=high,
        )

    def _member(self, raws: list[dict[str, Any]], name: str) -> list[Raw]:
        """Return the schemas of a named member."""
        found: list[Raw] = []
        self._work.step(len(raws))
        for raw in raws:
            known = mapped(raw, "properties")
            own = known[name] if name in known else raw.get("additionalProperties", True)
            found.append(schema_of(own, name))
            names = schema_of(raw.get("propertyNames", True), "propertyNames")
            if names is not True and not self._check.fits(names, name):
                found.append(False)
        return found


class TooLargeError(Exception):
    """A schema with too many places."""


def _path(where: str, name: str) -> str:
    """Return the JSON pointer to a property."""
    return f"{where}/properties/{name.replace('~', '~0').replace('/', '~1')[:MAX_SHOWN]}"


def _range(raws: list[dict[str, Any]], least: str, most: str, where: str) -> tuple[int, float]:
    """Return the bounds of a count that hold together.

    Raises:
        FormError: they contradict each other.
    """
    lows = [found for raw in raws if (found := count_of(raw, least)) is not None]
    highs = [found for raw in raws if (found := count_of(raw, most)) is not None]
    low, high = max(lows, default=0), min(highs, default=math.inf)
    if low > high:
        raise FormError(f'{where}: "{least}" is {low} and "{most}" is {high}, so nothing fits')
    return low, high


def _room(raws: list[dict[str, Any]], least: str, most: str, where: str) -> tuple[int, float]:
    """Return the bounds of a number of values.

    Raises:
        FormError: they contradict each other, or are more than the mocker makes.
    """
    low, high = _range(raws, least, most, where)
    if low > MAX_VALUES:
        raise FormError(f'{where}: "{least}" is {low:,}; the mocker makes at most {MAX_VALUES:,} values')
    return low, high


def _text(raws: list[dict[str, Any]], where: str, work: WorkLimit) -> Node:
    low, high = _range(raws, "minLength", "maxLength", where)
    if low > MAX_TEXT:
        raise FormError(f'{where}: "minLength" is {low:,}; the mocker makes texts of up to {MAX_TEXT:,} characters')
    try:
        texts = _texts(raws, "pattern")
        work.step(2 * sum(map(len, texts)))
        patterns = [pattern_of(text) for text in texts]
        formats = [name for name in _texts(raws, "format") if name in FORMATS]
    except FormError as error:
        raise FormError(f"{where}: {error}") from error
    if len(formats) > 1:
        raise FormError(f"{where}: formats {' and '.join(formats)} together are not supported by the mocker")
    if formats:
        return Formatted(formats[0], patterns, low, high)
    if not patterns:
        return Text(low, high)
    if patterns[0].tree.least > high:
        raise FormError(f'{where}: "maxLength" is {high}, and pattern {texts[0]!r} needs more')
    return Matched(patterns, low, high)


def _texts(raws: list[dict[str, Any]], name: str) -> list[str]:
    """Return what a keyword is in some schemas, each text once."""
    return list(dict.fromkeys(text for raw in raws if (text := text_of(raw, name)) is not None))


def _reason(slot: Slot, seen: set[int]) -> str:
    """Return why a place is dead, "" if only because it contains itself."""
    if id(slot) in seen:
        return ""
    seen.add(id(slot))
    parts: list[Slot] = []
    match slot.node:
        case Dead(reason=reason):
            return reason
        case Array() as array:
            if array.low > array.room and array.room == array.high:
                return f"{slot.where} has too few elements"
            parts = [array.item(place) for place in range(min(array.low, len(array.prefix) + 1))]
        case Object() as found:
            parts = [each.slot for each in found.properties if each.is_required] + [found.extra]
            if sum(each.is_required for each in found.properties) > found.high:
                return f'{slot.where}: "maxProperties" is {found.high}, and more are required'
        case Alternatives(options=options):
            parts = [option.slot for option in options]
    reasons = [reason for part in parts if part.least == math.inf and (reason := _reason(part, seen))]
    return reasons[0] if reasons else ""


@lru_cache(128)
def _of_text(text: bytes) -> Schema | str:
    """Return a schema, or why it is refused: hostile ones are cached, too."""
    try:
        return Schema(msgspec.json.decode(text))
    except (FormError, TooLargeError) as error:
        return str(error)
    except RecursionError:
        return "the schema is nested too deep"


def schema_from(raw: Any) -> Schema:
    """Return a schema understood; equal schemas are understood once.

    Raises:
        FormError: the mocker can make no value of it.
    """
    schema_of(raw, "the schema")
    try:
        text = msgspec.json.encode(raw)
    except RecursionError as error:
        raise FormError("the schema is nested too deep") from error
    except (OverflowError, TypeError, ValueError) as error:
        raise FormError(f"the schema cannot be sent as JSON: {error}") from error
    if len(text) > MAX_BYTES:
        raise FormError(f"the schema has {len(text):,} bytes; the mocker supports {MAX_BYTES:,}")
    found = _of_text(text)
    if isinstance(found, str):
        raise FormError(found)
    return found
