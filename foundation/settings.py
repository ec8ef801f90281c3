"""Settings: frozen dataclasses whose annotations say what each field may hold.

@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
num_blocks: Count = 16
policy: Literal["lru", "fifo"] = "lru"

def __post_init__(self) -> None:
check(self)
"""

import dataclasses
import functools
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
"""A number of things that may be none."""
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


def check(settings: Any) -> None:
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
            raise ValueError(f"{name} must be {expected(hint)}, not {value!r}") from None


def expected(hint: Any) -> str:
    """Say in words what an annotation allows: a range, a choice, a type."""
    parts = [part for part in _alternatives(hint) if part is not type(None)]
    return " or ".join(_words(part) for part in parts)


def _words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        choices = [str(choice) for choice in typing.get_args(hint)]
        return f"one of {', '.join(choices)}"
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
        ranges = [_range(note) for note in notes if isinstance(note, Meta)]
        return ranges[0] if ranges and ranges[0] else _words(kind)
    return _TYPES.get(hint, getattr(hint, "__name__", str(hint)))


def _range(meta: Meta) -> str:
    """Say in words which numbers a range holds."""
    low = f"at least {meta.ge}" if meta.ge is not None else f"greater than {meta.gt}" if meta.gt is not None else ""
    high = f"at most {meta.le}" if meta.le is not None else f"less than {meta.lt}" if meta.lt is not None else ""
    if meta.ge is not None and meta.le is not None:
        return f"from {meta.ge} to {meta.le}"
    return " and ".join(filter(None, (low, high)))


_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the annotations of the fields that hold plain values; settings within settings have checked themselves."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint for name, hint in hints.items() if not _holds_settings(hint)}


def _holds_settings(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) or any(_holds_settings(part) for part in typing.get_args(hint))
