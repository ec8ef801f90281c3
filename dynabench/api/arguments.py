"""Arguments that Python's users give: what they may be, and one line if they are something else."""

import functools
import inspect
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from dynabench.api.wording import plain_errors
from foundation.errors import UserError
from foundation.settings import expected, kinds

P = ParamSpec("P")
T = TypeVar("T")
PLAIN = {str, int, float, bool, type(None)}


def checked(call: Callable[P, T]) -> Callable[P, T]:
    """Let a function raise UserError for what its user can mend, such as an argument that is no text, number or switch it expects."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    @plain_errors()
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> T:
        given: Any = tuple(map(plain, args))
        named: Any = {name: plain(value) for name, value in kwargs.items()}
        for name, value in signature.bind(*given, **named).arguments.items():
            hint = _plain_hints(call).get(name)
            try:
                msgspec.convert(value, hint) if hint is not None else None
            except msgspec.ValidationError:
                raise UserError(f"{name} is {_shown(value)}; expected {expected(hint)}") from None
        return call(*given, **named)

    return checked_call


def plain(value: Any) -> Any:
    """Return numbers and arrays of numpy as Python's own, also within mappings, lists and tuples; anything else as it is."""
    match value:
        case Mapping():
            return {name: plain(its) for name, its in value.items()}
        case list():
            return [plain(its) for its in value]
        case tuple():
            return tuple(map(plain, value))
    return value.tolist() if hasattr(value, "shape") and hasattr(value, "tolist") else value


@functools.cache
def _plain_hints(call: Callable[..., object]) -> dict[str, Any]:
    """Return the annotations of parameters that take texts, numbers and switches alone, by name."""
    several = {
        each.name
        for each in inspect.signature(call).parameters.values()
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    }
    hints = typing.get_type_hints(call, include_extras=True)
    return {name: hint for name, hint in hints.items() if name not in several and kinds(hint) <= PLAIN}


def path_of(name: str, value: object) -> Path:
    """Return a path.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UserError(f"{name} is {_shown(value)}; expected a path")
    return Path(value)


def texts_of(name: str, value: object, example: str) -> tuple[str, ...]:
    """Return texts of which there may be one or several.

    Raises:
        UserError: they are something else.
    """
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(one, str) for one in found):
        raise UserError(f"{name} is {_shown(value)}; expected text such as {example!r}, or a list of such texts")
    return found


def mapping_of(name: str, value: object, example: str) -> Mapping[str, Any]:
    """Return a mapping of names; None is an empty one.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, Mapping | None) or not all(isinstance(each, str) for each in value or ()):
        raise UserError(f"{name} is {_shown(value)}; expected values by name, such as {example}")
    return value or {}


def listed(value: Any) -> Any:
    """Return numbers as the text that lists them, such as `1,1.5,2`; a text as it is."""
    if isinstance(value, str):
        return value
    return ",".join(map(str, value)) if isinstance(value, Iterable) else str(value)


def _shown(value: object) -> str:
    """Return a value as a message shows it, in one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."
