"""A row of a workload file: every access checks the value, and errors name its place."""

import math
from typing import Any

from workloads.blocks import wrong_count
from workloads.request import WorkloadError

MAX_TOKENS = 10**7
"""The limit for a prompt or an answer: the longest context of any model."""
MAX_S = 1e11
"""The limit for times: the year 5138, if they count from 1970."""
MAX_PRIORITY = (1 << 31) - 1
"""The limit for priorities of either sign: they are whole numbers of 32 bits."""
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""Units of time: how many make a second."""


def check_span(name: str, last_s: float) -> None:
    """Refuse times that no clock has, from a rate that is too low.

    Raises:
        WorkloadError: the last one is later than any time in a file may be.
    """
    if last_s > MAX_S:
        raise WorkloadError(
            f"{name}: the last request would arrive after {last_s:.3g} s; the limit is {MAX_S:g} s (is the rate right?)"
        )


class Row:
    """An object of a file and its place; every access checks the value."""

    __slots__ = ("place", "values")

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def fail(self, problem: str) -> WorkloadError:
        """Return an error that names the place."""
        return WorkloadError(f"{self.place}: {problem}")

    def has(self, name: str) -> bool:
        """Return whether there is a value under this name: null and an empty cell are none."""
        return self.values.get(name) not in (None, "")

    def number(self, *names: str, least: float | None = None, default: float | None = None) -> float:
        """Return the number under the first of these names that exists."""
        for name in names:
            if not self.has(name):
                continue
            value = self.values[name]
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                raise self.fail(f"{name} must be a number, not {short(value)}") from None
            if not math.isfinite(number) or isinstance(value, bool):
                raise self.fail(f"{name} must be a finite number, not {short(value)}")
            if least is not None and number < least:
                raise self.fail(f"{name} must be at least {least:g}, not {value}")
            return number
        if default is None:
            raise self.fail(f"{' or '.join(names)} is missing")
        return default

    def seconds(self, *names: str, unit: str = "ms", least: float | None = 0.0, default: float | None = None) -> float:
        """Return a time, which is written in this unit, in seconds."""
        number = self.number(*names, least=least, default=default)
        if abs(number) > MAX_S * PER_SECOND[unit]:
            most = f"{MAX_S * PER_SECOND[unit]:g} {unit}, the year 5138 if it counts from 1970"
            raise self.fail(f"{self._first(names)} must be at most {most}, not {number:g}")
        return number / PER_SECOND[unit]

    def count(self, *names: str, least: int = 1, default: int | None = None) -> int:
        """Return a whole number of tokens; 1e3 and 1000.0 are whole, too."""
        number = self.number(*names, least=least, default=default)
        if number != int(number):
            raise self.fail(f"{self._first(names)} must be a whole number, not {number:g}")
        if number > MAX_TOKENS:
            raise self.fail(f"{self._first(names)} must be at most {MAX_TOKENS:,}, not {number:g}")
        return int(number)

    def priority(self, name: str = "priority") -> int:
        """Return the request's priority: the smallest goes first; 0 if the row has none."""
        number = self.number(name, least=-MAX_PRIORITY, default=0)
        if number > MAX_PRIORITY:
            raise self.fail(f"{name} must be at most {MAX_PRIORITY:,}, not {number:g}")
        if number != int(number):
            raise self.fail(f"{name} must be a whole number, not {number:g}")
        return int(number)

    def adapter(self, name: str = "adapter") -> str:
        """Return the LoRA adapter that the request asks for; empty if the row has none."""
        return "" if self.values.get(name) is None else self.text(name)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string; a number becomes its digits."""
        value = self.values.get(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            raise self.fail(f"{name} must be text, not {short(value)}" if name in self.values else f"{name} is missing")
        return value

    def object(self, name: str) -> "Row":
        """Return an object inside this one."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.fail(f"{name} must be an object")
        return Row(value, f"{self.place}, {name}")

    def items(self, name: str) -> list["Row"]:
        """Return a list of objects."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.fail(f"{name} must be a list of objects")
        return [Row(item, f"{self.place}, {name}[{place}]") for place, item in enumerate(value)]

    def ids(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or not {int}.issuperset(map(type, value)):
            raise self.fail(f"{name} must be a list of whole numbers")
        return tuple(value)

    def block_ids(self, num_tokens: int, block_size: int, name: str = "hash_ids") -> tuple[int, ...]:
        """Return the ids of a prompt, one for each of its blocks."""
        ids = self.ids(name)
        if (problem := wrong_count(num_tokens, ids, block_size, name)) is not None:
            raise self.fail(f"{problem} (is --trace-block-size right?)")
        return ids

    def _first(self, names: tuple[str, ...]) -> str:
        """Return the name under which a value was found."""
        return next((name for name in names if self.has(name)), names[0])


def short(value: Any) -> str:
    """Show the beginning of a value."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
