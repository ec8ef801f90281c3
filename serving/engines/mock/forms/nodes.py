"""A schema as a graph of what may stand at a place; `$ref` cycles are cycles of the graph."""

import math
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec

from serving.engines.mock.forms.check import is_within, number_fits
from serving.engines.mock.forms.keywords import Raw, WorkLimit
from serving.engines.mock.forms.regex import Pattern

MAX_VALUES = 4_000
"""The most values of an answer."""

EXACT = 1 << 53
"""Up to here, floats tell whole numbers apart."""

MAX_WISHES = 24
"""How deep places may be that wish for more than they must have."""

SPREAD = 999
"""How far from its nearest bound a number may be, in steps; numbers are short that way."""


class Node:
    """What may stand at a place."""


@dataclass(slots=True)
class Slot:
    """A place of the schema: the schemas that hold there together, and what follows from them."""

    where: str
    together: list[dict[str, Any]]
    chosen: frozenset[tuple[int, str]] = frozenset()
    """The `anyOf` and `oneOf` of these schemas for which a branch is among them."""
    type: str = ""
    """The type that was chosen of several."""
    node: Node | None = None
    least: float = math.inf
    """The fewest characters of a value, about; infinite if there is none."""
    wish: float = 0
    """How many characters more a value has that looks like one of an application."""
    has_prose: bool = False
    """Whether values may have texts of any length."""
    stretches: bool = False
    """Whether values may have more parts than they must."""


@dataclass(slots=True)
class Dead(Node):
    """Nothing."""

    reason: str


@dataclass(slots=True)
class Fixed(Node):
    """One of some values."""

    values: list[Any]
    shortest: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        """Find the shortest values."""
        sizes = [len(msgspec.json.encode(value)) for value in self.values]
        least = min(sizes)
        self.shortest = [value for value, size in zip(self.values, sizes, strict=True) if size == least]


@dataclass(slots=True)
class Number(Node):
    """Multiples of a step; `first` to `last`, of which `low` to `high` are near the bounds."""

    step: Fraction
    first: int | None
    last: int | None
    integral: bool
    raws: list[dict[str, Any]]
    is_exact: bool = field(init=False)
    """Whether no float is involved."""
    nearest: Any = field(init=False, default=None)
    """The first value, None if none was found."""

    def find(self, work: WorkLimit) -> bool:
        """Look for the first value.

        Raises:
            FormError: that takes too long.
        """
        for place in self._places():
            work.step(1 if self.is_exact else 8)
            self.nearest = self.at(place)
            if self.nearest is not None:
                return True
        return False

    def __post_init__(self) -> None:
        """Look for steps that are floats."""
        self.is_exact = self.integral and not any(isinstance(raw.get("multipleOf"), float) for raw in self.raws)

    @property
    def near(self) -> tuple[int, int]:
        """The multiples to draw from: nearest to zero within the bounds."""
        first, last = self.first, self.last
        if first is not None and first > 0:
            return first, first + SPREAD if last is None else min(last, first + SPREAD)
        if last is not None and last < 0:
            return last - SPREAD if first is None else max(first, last - SPREAD), last
        return 0, SPREAD if last is None else min(last, SPREAD)

    def at(self, place: int) -> Any:
        """Return a multiple, None if validators that compute with floats may refuse it."""
        exact = self.step * place
        if self.is_exact and abs(exact) <= EXACT:
            return int(exact)
        if abs(exact) > sys.float_info.max:
            return None
        value: Any = int(exact) if self.integral else float(exact)
        is_right = all(number_fits(raw, value) and is_within(raw, float(value)) for raw in self.raws)
        return value if is_right else None

    def all(self) -> Iterator[Any]:
        """Yield values, not all if there are very many."""
        yield from (value for place in self._places() if (value := self.at(place)) is not None)

    def _places(self) -> range:
        start, _ = self.near
        return range(start, start + 4096 if self.last is None else min(start + 4096, self.last + 1))


@dataclass(slots=True)
class Text(Node):
    """Any text of so many characters."""

    low: int
    high: float


@dataclass(slots=True)
class Matched(Node):
    """A text that patterns match; the first one writes it."""

    patterns: list[Pattern]
    low: int
    high: float


@dataclass(slots=True)
class Formatted(Node):
    """A text of a format."""

    name: str
    patterns: list[Pattern]
    low: int
    high: float


@dataclass(slots=True)
class Array(Node):
    """A list; the first elements have schemas of their own."""

    prefix: list[Slot]
    rest: Slot
    low: int
    high: float
    is_unique: bool

    def item(self, place: int) -> Slot:
        """Return the place of an element."""
        return self.prefix[place] if place < len(self.prefix) else self.rest

    @property
    def room(self) -> float:
        """The most elements, given those that can be."""
        for place, slot in enumerate((*self.prefix, self.rest)):
            if slot.least == math.inf:
                return min(self.high, place)
        return self.high


@dataclass(slots=True)
class Property:
    """A named member of an object."""

    name: str
    slot: Slot
    is_required: bool

    @property
    def least(self) -> float:
        """Its fewest characters, with its name, a colon and a comma."""
        return len(self.name) + 4 + self.slot.least


@dataclass(slots=True)
class Object(Node):
    """An object: named properties, and perhaps others."""

    properties: list[Property]
    extra: Slot
    names: Slot | None
    """What the names of the others must be."""
    is_map: bool
    """Whether others are expected; otherwise they are only there if there must be that many properties."""
    low: int
    high: float

    @property
    def least(self) -> float:
        """The fewest characters."""
        least, count = 2.0, 0
        for each in self.properties:
            if each.is_required:
                least, count = least + each.least, count + 1
        if count > self.high:
            return math.inf
        optional = sorted(each.least for each in self.properties if not each.is_required)
        for cost in optional[: max(self.low - count, 0)]:
            if cost < math.inf:
                least, count = least + cost, count + 1
        missing = max(self.low - count, 0)
        if missing:
            least += missing * self.extra_least
        return least - bool(count + missing)  # no comma after the last

    @property
    def extra_least(self) -> float:
        """The fewest characters of another property."""
        return self.extra.least + 4 + (4 if self.names is None else self.names.least)


@dataclass(slots=True)
class Option:
    """A branch, and those that must not fit as well (`oneOf`)."""

    slot: Slot
    branches: list[Raw]
    """All branches; none if others may fit, too. They are one list for all options."""
    place: int
    """Which of them this one is."""

    @property
    def others(self) -> Iterator[Raw]:
        """Those that must not fit."""
        return (branch for place, branch in enumerate(self.branches) if place != self.place)


@dataclass(slots=True)
class Alternatives(Node):
    """One of several."""

    options: list[Option]


def settle(slots: list[Slot], work: WorkLimit) -> None:
    """Compute what depends on other places, until nothing changes.

    Raises:
        FormError: that takes too long.
    """
    parents: dict[int, list[Slot]] = {}
    for slot in slots:
        for part in _parts(slot, is_all=True):
            parents.setdefault(id(part), []).append(slot)
    waiting = deque(reversed(slots))  # what a place consists of mostly came after it
    queued = set(map(id, slots))
    while waiting:
        slot = waiting.popleft()
        queued.discard(id(slot))
        work.step(1 + sum(1 for _ in _parts(slot, is_all=True)))
        before = slot.least, slot.has_prose, slot.stretches
        slot.least = min(_least(slot), slot.least)
        slot.has_prose, slot.stretches = _has_prose(slot), _stretches(slot)
        if before != (slot.least, slot.has_prose, slot.stretches):
            affected = [parent for parent in parents.get(id(slot), ()) if id(parent) not in queued]
            queued |= set(map(id, affected))
            waiting += affected


WORDS = 14
"""The characters of a few words."""


def wish(slot: Slot, seen: set[int], depth: int = 0) -> float:
    """Find what a place wishes for, and those inside; places that contain themselves wish for nothing more."""
    if id(slot) in seen or slot.least == math.inf or depth > MAX_WISHES:
        return slot.wish
    seen.add(id(slot))
    parts = [(part, wish(part, seen, depth + 1)) for part in _parts(slot) if part.least < math.inf]
    match slot.node:
        case Text(low=low, high=high):
            slot.wish = max(min(high, WORDS) - max(low, 4), 0)
        case Number():
            slot.wish = 2
        case Array() as array:
            more = max(int(min(array.room, 2)) - array.low, 0)
            slot.wish = sum(extra for _, extra in parts) + sum(part.least + 1 for part, _ in parts[:1] * more)
        case Object() as found:
            optional = sum(each.least for each in found.properties if not each.is_required and each.least < math.inf)
            slot.wish = sum(extra for _, extra in parts) + optional
        case Alternatives():
            slot.wish = max((part.least + extra - slot.least for part, extra in parts), default=0)
    return slot.wish


def _least(slot: Slot) -> float:
    match slot.node:
        case Fixed(shortest=shortest):
            return float(len(msgspec.json.encode(shortest[0])))
        case Number():
            return 1 if slot.node.integral else 3
        case Text(low=low):
            return 2 + max(low, 4)
        case Matched(patterns=patterns, low=low):
            return 2.0 + max(low, patterns[0].tree.least)
        case Formatted(low=low):
            return 2 + max(low, 12)
        case Array() as array:
            if array.low > array.room:
                return math.inf
            prefix = sum(item.least + 1 for item in array.prefix[: array.low])
            rest = max(array.low - len(array.prefix), 0)
            return 2.0 + prefix + (rest * (array.rest.least + 1) if rest else 0)
        case Object() as found:
            return found.least
        case Alternatives(options=options):
            return min((option.slot.least for option in options), default=math.inf)
    return math.inf


def _parts(slot: Slot, *, is_all: bool = False) -> Iterator[Slot]:
    """Yield the places inside that values may have, or all that they depend on."""
    match slot.node:
        case Array() as array:
            room = math.inf if is_all else array.room
            yield from array.prefix[: int(min(room, len(array.prefix)))]
            if room > len(array.prefix):
                yield array.rest
        case Object() as found:
            yield from (each.slot for each in found.properties)
            if is_all or found.is_map:
                yield found.extra
            if is_all and found.names is not None:
                yield found.names
        case Alternatives(options=options):
            yield from (option.slot for option in options)


def _has_prose(slot: Slot) -> bool:
    if isinstance(slot.node, Text):
        return slot.node.high == math.inf
    return any(part.has_prose for part in _parts(slot) if part.least < math.inf)


def _stretches(slot: Slot) -> bool:
    match slot.node:
        case Matched(patterns=patterns):
            return patterns[0].tree.most > patterns[0].tree.least
        case Array() as array if array.room > array.low:
            return True
        case Object() as found if found.is_map or not all(each.is_required for each in found.properties):
            return True
    return any(part.stretches for part in _parts(slot) if part.least < math.inf)
