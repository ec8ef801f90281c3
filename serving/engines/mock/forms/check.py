"""Whether a value fits a schema, for what is decided by trying: enums, `oneOf`, and values that grew."""

from fractions import Fraction
from typing import Any

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.keywords import (
    MAX_DEPTH,
    Raw,
    WorkLimit,
    bounds_of,
    count_of,
    flat,
    items_of,
    key_of,
    listed,
    mapped,
    names_of,
    number_of,
    prefix_length,
    schema_of,
    text_of,
    type_of,
    types_of,
)
from serving.engines.mock.forms.regex import pattern_of


class SchemaCheck:
    """Checks values against the schemas of one document."""

    def __init__(self, root: Raw, work: WorkLimit) -> None:
        self._root = root
        self._work = work
        self._listed: dict[int, list[set[Any]]] = {}
        self._depth = 0

    def fits(self, raw: Raw, value: Any) -> bool:
        """Return whether a value fits.

        Raises:
            FormError: the schema has something that the mocker does not support, or takes too long.
        """
        if self._depth > MAX_DEPTH:
            raise FormError(f"the schema is nested more than {MAX_DEPTH} deep, or contains itself without end")
        self._depth += 1
        try:
            together = flat(self._root, raw, self._work)
            return together is not None and all(self._fits(each, value) for each in together)
        finally:
            self._depth -= 1

    def _fits(self, raw: dict[str, Any], value: Any) -> bool:
        self._work.step()
        types = types_of(raw)
        kind = type_of(value)
        if types is not None and kind not in types:
            return False
        if ("const" in raw or "enum" in raw) and not self._is_listed(raw, key_of(value, self._work)):
            return False
        if "anyOf" in raw and not any(self.fits(schema_of(each, "anyOf"), value) for each in listed(raw, "anyOf")):
            return False
        if "oneOf" in raw and sum(self.fits(schema_of(each, "oneOf"), value) for each in listed(raw, "oneOf")) != 1:
            return False
        match kind:
            case "integer" | "number":
                return number_fits(raw, value)
            case "string":
                return self._text_fits(raw, value)
            case "array":
                return self._array_fits(raw, value)
            case "object":
                return self._object_fits(raw, value)
        return True

    def _is_listed(self, raw: dict[str, Any], key: Any) -> bool:
        """Return whether a value is the constant, and one of the enum."""
        if id(raw) not in self._listed:
            lists = [[raw["const"]]] if "const" in raw else []
            self._listed[id(raw)] = [
                self._keys(each) for each in [*lists, *([listed(raw, "enum")] if "enum" in raw else [])]
            ]
        return all(key in keys for keys in self._listed[id(raw)])

    def _keys(self, values: list[Any]) -> set[Any]:
        self._work.step(len(values))
        return {key_of(value, self._work) for value in values}

    def _text_fits(self, raw: dict[str, Any], value: str) -> bool:
        """Formats are annotations."""
        if not _is_between(raw, "minLength", "maxLength", len(value)):
            return False
        pattern = text_of(raw, "pattern")
        return pattern is None or pattern_of(pattern).matches(value, self._work)

    def _array_fits(self, raw: dict[str, Any], value: list[Any]) -> bool:
        if not _is_between(raw, "minItems", "maxItems", len(value)):
            return False
        if raw.get("uniqueItems") is True and len(self._keys(value)) < len(value):
            return False
        if "items" not in raw and not prefix_length(raw):
            return True
        return all(self.fits(items_of(raw, place), each) for place, each in enumerate(value))

    def _object_fits(self, raw: dict[str, Any], value: dict[str, Any]) -> bool:
        if not _is_between(raw, "minProperties", "maxProperties", len(value)):
            return False
        required = names_of(raw, "required")
        self._work.step(len(required) // 8)
        if any(name not in value for name in required):
            return False
        known, others = mapped(raw, "properties"), schema_of(raw.get("additionalProperties", True), "properties")
        names = schema_of(raw.get("propertyNames", True), "propertyNames")
        for name, each in value.items():
            if names is not True and not self.fits(names, name):
                return False
            if not self.fits(schema_of(known[name], name) if name in known else others, each):
                return False
        return True


def _is_between(raw: dict[str, Any], low: str, high: str, count: int) -> bool:
    least, most = count_of(raw, low), count_of(raw, high)
    return (least is None or count >= least) and (most is None or count <= most)


def number_fits(raw: dict[str, Any], value: float) -> bool:
    """Return whether a number is within its bounds, and a multiple of what it must be a multiple of."""
    if not is_within(raw, value):
        return False
    step = number_of(raw, "multipleOf")
    if step is not None and step <= 0:
        raise FormError(f'"multipleOf" is {step:g}; a number above 0 was expected')
    return step is None or is_multiple(value, step)


def is_within(raw: dict[str, Any], value: float) -> bool:
    """Return whether a number is within its bounds."""
    return not any(
        (value < bound if is_low else value > bound) or (is_excluded and value == bound)
        for is_low, bound, is_excluded in bounds_of(raw)
    )


def is_multiple(value: float, step: float) -> bool:
    """Return whether a number is a multiple of another, both exactly and in floats, as some validators compute."""
    if Fraction(str(value)) % Fraction(str(step)):
        return False
    if isinstance(step, int) and isinstance(value, int):
        return True
    try:
        return (value / step) == int(value / step)
    except OverflowError:  # a float has no such quotient
        return False
