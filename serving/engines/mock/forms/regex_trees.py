"""The parts of a regular expression: what they match, and how long their texts are."""

import math
from bisect import bisect
from dataclasses import dataclass, field

from serving.engines.mock.forms.errors import FormError

PLAIN = "abcdefghijklmnopqrstuvwxyz"
PRINTABLE = PLAIN + "".join(chr(code) for code in range(32, 127) if chr(code) not in PLAIN)


class Tree:
    """A part of an expression."""

    least: float = 0
    """The length of its shortest text; infinite if it has none."""
    most: float = 0
    steps: float = 1
    """How many parts are visited to write its shortest text."""


@dataclass(slots=True)
class Chars(Tree):
    """One character of a class."""

    ranges: list[tuple[int, int]]
    categories: list[str]
    negated: bool
    choices: str = ""
    """Those to write: letters and spaces if they are allowed."""
    wide: str = ""
    """Those to write if lookarounds may want others."""
    least: float = 1
    most: float = 1
    steps: float = 1
    _lows: list[int] = field(default_factory=list)
    _highs: list[int] = field(default_factory=list)
    """The ranges in order, without overlaps."""

    def __post_init__(self) -> None:
        """Choose characters to write."""
        for low, high in sorted(self.ranges):
            if self._highs and low <= self._highs[-1]:
                self._highs[-1] = max(high, self._highs[-1])
            else:
                self._lows.append(low)
                self._highs.append(high)
        match self.ranges:
            case [(low, high)] if low == high < 0xD800 and not self.negated and not self.categories:
                self.choices = self.wide = chr(low)  # as most parts of most expressions
                return
        self.choices = self.wide = "".join(filter(self.accepts, PRINTABLE)) or "".join(map(chr, self._first()))
        if self.choices.startswith(PLAIN):
            self.choices = PLAIN + " " * 5 * self.accepts(" ")
        if not self.choices:
            self.least = math.inf

    def _first(self) -> list[int]:
        if self.negated:
            return [code for code in (*range(0xA1, 0x250), *range(32)) if self.accepts(chr(code))][:64]
        found = [low for low, _ in self.ranges if not 0xD800 <= low <= 0xDFFF]
        return found or [code for code in range(32) if self.accepts(chr(code))]

    def accepts(self, character: str) -> bool:
        """Return whether it is of the class."""
        code = ord(character)
        place = bisect(self._lows, code) - 1
        is_in = place >= 0 and code <= self._highs[place]
        return (is_in or any(is_of(character, name) for name in self.categories)) != self.negated


def is_of(character: str, category: str) -> bool:
    """Return whether a character is of a category, in Python's words.

    Raises:
        FormError: the category is not supported.
    """
    name = category.removeprefix("CATEGORY_")
    kind = name.removeprefix("NOT_")
    if kind == "DIGIT":
        found = character.isdecimal()
    elif kind == "SPACE":
        found = character.isspace()
    elif kind == "WORD":
        found = character.isalnum() or character == "_"
    else:
        raise FormError(f"a character class {category.lower()} is not supported by the mocker")
    return found != name.startswith("NOT_")


@dataclass(slots=True)
class Concatenation(Tree):
    """Parts one after another."""

    parts: list[Tree]
    least: float = field(init=False)
    most: float = field(init=False)
    steps: float = field(init=False)

    def __post_init__(self) -> None:
        """Add the lengths up."""
        self.least = sum(part.least for part in self.parts)
        self.most = sum(part.most for part in self.parts)
        self.steps = 1 + sum(part.steps for part in self.parts)


@dataclass(slots=True)
class Either(Tree):
    """One of several parts."""

    branches: list[Tree]
    least: float = field(init=False)
    most: float = field(init=False)
    steps: float = field(init=False)

    def __post_init__(self) -> None:
        """Find the shortest and the longest."""
        self.least = min(branch.least for branch in self.branches)
        self.most = max(branch.most for branch in self.branches)
        self.steps = 1 + max(branch.steps for branch in self.branches)


@dataclass(slots=True)
class Repeat(Tree):
    """A part several times."""

    item: Tree
    low: int
    high: float
    least: float = field(init=False)
    most: float = field(init=False)
    steps: float = field(init=False)

    def __post_init__(self) -> None:
        """Multiply the lengths; a part without texts may be left out."""
        if self.item.least == math.inf and not self.low:
            self.high = 0
        self.least = self.low * self.item.least if self.low else 0
        self.most = self.high * self.item.most if self.high and self.item.most else 0
        self.steps = 1 + self.low * self.item.steps


@dataclass(slots=True)
class At(Tree):
    """A position: `^`, `$` and the like."""

    kind: str


@dataclass(slots=True)
class Look(Tree):
    """Whether something follows."""

    item: Tree
    negated: bool
