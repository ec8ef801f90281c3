"""Regular expressions as Python's own parser reads them; that one is private, so only this file knows it."""

import importlib
import math
import re
import threading
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

_parser: Any = importlib.import_module("re._parser")
_turn = threading.Lock()  # warnings are ignored for the whole process at once


class Parsed(NamedTuple):
    """An expression: its parts, each an operation and what that is about."""

    parts: list[tuple[Any, Any]]
    flags: int
    """Those that were set inside the expression."""


def parsed(text: str) -> Parsed:
    """Parse an expression.

    Raises:
        ValueError: it is none.
    """
    try:
        with _turn, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _parser.parse(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    return Parsed(list(found), found.state.flags & ~re.UNICODE)


def operation(part: tuple[Any, Any]) -> str:
    """Return the name of a part's operation, such as LITERAL."""
    return str(part[0])


def repetitions(value: tuple[Any, Any, Iterable[tuple[Any, Any]]]) -> tuple[int, float]:
    """Return how often a part is repeated: at least, and at most."""
    least, most, _ = value
    return int(least), math.inf if most is _parser.MAXREPEAT else int(most)
