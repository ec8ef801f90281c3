"""Settings: frozen dataclasses whose annotations say what each field may hold.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class CacheConfig(CheckedSettings):
        num_blocks: Count = 16
        policy: Literal["lru", "fifo"] = "lru"

The help, settings files and `check_settings` read ranges and choices from the annotations. A class with more to check has
its own `__post_init__`, and calls `check_settings` there.
"""

import dataclasses
import functools
import sys
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from foundation.text import instead_of

T = TypeVar("T")

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
"""A number of things, possibly zero."""
FINITE = sys.float_info.max
Positive = Annotated[float, Meta(gt=0, le=FINITE)]
NotNegative = Annotated[float, Meta(ge=0, le=FINITE)]
Share = Annotated[float, Meta(ge=0, le=1)]
Wait = Annotated[float, Meta(ge=0, le=86_400)]
"""How long something may take (s), up to a day."""

SWITCHES = {"on": True, "off": False}


class Unit(NamedTuple):
    """The unit of a number, which users may give explicitly, or replace by another: `Annotated[float, Unit("GiB")]`."""

    name: str


def check_settings(settings: Any) -> None:
    """Refuse a value that its field's annotation excludes.

    Raises:
        ValueError: the message names the field, the value and what was expected.
    """
    kind: Any = type(settings)
    for name, hint in _hints(kind).items():
        value = getattr(settings, name)
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError:
            raise ValueError(f"{name} must be {expected(hint, value)}, not {value!r}") from None


class CheckedSettings:
    """Settings that have no more to check than their annotations say."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Reject invalid values."""
        check_settings(self)


def settings_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """Make settings of what a user of Python gives by name; a list is as good as a tuple, and so is one value.

    Raises:
        ValueError: there is no such setting, or its value is invalid.
    """
    hints, names = _hints(typing.cast(Any, kind)), [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            raise ValueError(f"{name} is unknown; {instead_of(name, names)}")
    return kind(**{name: _as_tuple(value, hints.get(name)) for name, value in given.items()})


def _as_tuple(value: Any, hint: Any) -> Any:
    """Return a list, or the one value of a setting that has several, as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if typing.get_origin(hint) is tuple and not isinstance(value, tuple) else value


def changed(settings: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    default = type(settings)()
    names = [field.name for field in dataclasses.fields(settings)]
    return {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(default, name)}


def short_value(value: Any) -> str:
    """Return a setting's value as the names of arms and tables show it."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def kinds(hint: Any) -> set[Any]:
    """Return the types that an annotation allows, without their ranges."""
    parts = _alternatives(hint)
    return {typing.get_args(part)[0] if typing.get_origin(part) is Annotated else part for part in parts}


def plain_value(value: Any, hint: Any) -> Any:
    """Return a value as its type reads it: on and off, as the help prints them, are true and false."""
    return SWITCHES.get(value, value) if isinstance(value, str) and bool in kinds(hint) else value


def expected(hint: Any, value: Any = None) -> str:
    """Say in words what an annotation allows: a range, choice or type; a range's type only if the value has another."""
    parts = [part for part in _alternatives(hint) if part is not type(None)]
    return " or ".join(_words(part, value) for part in parts)


def _words(hint: Any, value: Any) -> str:
    if typing.get_origin(hint) is Literal:
        choices = [str(choice) for choice in typing.get_args(hint)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if typing.get_origin(hint) is tuple:
        return f"a list; of each, {expected(typing.get_args(hint)[0])}"
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        ranges = [_range(note) for note in notes if isinstance(note, Meta)]
        unit = "".join(f" ({note.name})" for note in notes if isinstance(note, Unit))
        if not ranges or not ranges[0]:
            return _words(kind, value) + unit
        is_of_kind = type(value) is kind or (kind is float and type(value) is int)
        return (ranges[0] if is_of_kind else f"{_words(kind, value)} {_joined(ranges[0])}") + unit
    name = getattr(hint, "__name__", str(hint))
    return _TYPES.get(name, name)


def _joined(words: str) -> str:
    """Join a range to the noun before it."""
    return f"of {words}" if words.startswith("at ") else words


def _range(meta: Meta) -> str:
    """Say in words which numbers a range includes."""
    most = None if meta.le == FINITE else meta.le
    low = f"at least {meta.ge}" if meta.ge is not None else f"greater than {meta.gt}" if meta.gt is not None else ""
    high = f"at most {most}" if most is not None else f"less than {meta.lt}" if meta.lt is not None else ""
    if meta.ge is not None and most is not None:
        return f"from {meta.ge} to {most}"
    return " and ".join(filter(None, (low, high)))


_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "Path": "a path"}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of fields with plain values; nested settings have already checked themselves."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if not _holds_settings(hint)}


def _holds_settings(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_holds_settings(part) for part in typing.get_args(hint))
