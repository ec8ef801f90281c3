"""Values of a schema, drawn at random: a function of the schema, the generator and the wanted size."""

import math
from random import Random
from typing import Any

import msgspec

from serving.engines.mock.forms.check import SchemaCheck
from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.formats import FORMATS, WORDS
from serving.engines.mock.forms.keywords import WorkLimit, key_of
from serving.engines.mock.forms.nodes import (
    MAX_VALUES,
    Alternatives,
    Array,
    Fixed,
    Formatted,
    Matched,
    Number,
    Object,
    Option,
    Property,
    Slot,
    Text,
)
from serving.engines.mock.forms.prose import Prose, Words, prose_of
from serving.engines.mock.forms.schema import Schema

MAX_EXTRA = MAX_VALUES // 2
"""After so many values, only those are added that must be there."""

MAX_NESTED = 48
"""How deep values may be nested."""

TRIES = 24
CHARS_PER_STEP = 8
"""So many characters of a value are about as much work as a value."""


class Drawing:
    """Draws one value."""

    def __init__(self, schema: Schema, rng: Random, words: Words, work: WorkLimit, enough: float = math.inf) -> None:
        """Prepare to draw.

        Args:
            schema: what the value is of.
            rng: makes the choices.
            words: what free texts are made of.
            work: counts the steps.
            enough: how many tokens of the value are read at most.
        """
        self._schema = schema
        self._rng = rng
        self._words = words
        self._enough = max(enough, 1)
        self._num_tokens = 0
        self._num_values = 0
        self._work = work
        self._check = SchemaCheck(schema.raw, work)

    @property
    def _is_cut(self) -> bool:
        """Whether the free texts so far are all that is read: what comes after them may be left out."""
        return self._num_tokens >= self._enough

    @property
    def _is_full(self) -> bool:
        """Whether only what must be there is added."""
        return self._num_values > MAX_EXTRA or self._work.is_half_done

    def draw(self, num_chars: float) -> Any:
        """Return a value of about so many characters, if it can be; free texts are short and may still grow.

        Raises:
            FormError: none is found.
        """
        root = self._schema.root
        return self._value(root, max(num_chars - root.least, 0), 0)[0]

    def _value(self, slot: Slot, spare: float, depth: int) -> tuple[Any, float]:
        """Return a value of about the least length and `spare` more, and its length."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise FormError(f"{slot.where}: the mocker makes no answers of more than {MAX_VALUES:,} values")
        if depth > MAX_NESTED:
            raise FormError(f"{slot.where}: the mocker makes no values that are nested more than {MAX_NESTED} deep")
        spare = 0 if depth > MAX_NESTED // 2 or self._is_full else max(spare, 0)
        match slot.node:
            case Array() as array:
                return self._array(slot, array, spare, depth)
            case Object() as found:
                return self._object(slot, found, spare, depth)
            case Alternatives(options=options):
                return self._choice(slot, options, spare, depth)
        value = self._scalar(slot, spare)
        length = _length(value)
        self._work.step(1 + int(length) // CHARS_PER_STEP)
        if isinstance(value, Prose):
            self._num_tokens += len(value.ids)
        return value, length

    def _scalar(self, slot: Slot, spare: float) -> Any:
        rng = self._rng
        match slot.node:
            case Fixed() as fixed:
                values = fixed.values if spare > 0 else fixed.shortest
                return values[int(rng.random() * len(values))]
            case Number() as number:
                return self._number(number, spare)
            case Text(low=low, high=high):
                count = 1 + int(rng.random() * 3) if spare > 0 else 1
                return prose_of(self._words, rng, low, high, count, spare, self._enough)
            case Matched(patterns=patterns, low=low, high=high):
                more = min(spare, 24) * rng.random()
                for _ in range(TRIES):
                    text = patterns[0].write(rng, more, self._work, is_whole=False, low=low, high=high)
                    if all(other.matches(text, self._work) for other in patterns[1:]):
                        return text
                raise FormError(f"{slot.where}: the mocker finds no text that all its patterns match")
            case Formatted() as formatted:
                return self._formatted(slot, formatted)
        raise AssertionError(slot)

    def _number(self, number: Number, spare: float) -> Any:
        low, high = number.near
        for _ in range(TRIES if spare > 0 else 0):
            self._work.step()
            value = number.at(low + int(self._rng.random() * (high - low + 1)))
            if value is not None:
                return value
        return number.nearest

    def _formatted(self, slot: Slot, node: Formatted) -> str:
        for _ in range(TRIES):
            text = FORMATS[node.name](self._rng)
            if node.low <= len(text) <= node.high and all(
                pattern.matches(text, self._work) for pattern in node.patterns
            ):
                return text
        raise FormError(f"{slot.where}: the mocker finds no {node.name} of that length and pattern")

    def _choice(self, slot: Slot, options: list[Option], spare: float, depth: int) -> tuple[Any, float]:
        most = slot.least + spare
        usable = [option for option in options if option.slot.least <= most]
        refusal = ""
        num_tokens = self._num_tokens
        for _ in range(TRIES):
            option = self._option(usable)
            self._num_tokens = num_tokens
            try:
                value, size = self._value(option.slot, most - option.slot.least, depth + 1)
            except FormError as error:  # another branch may do
                refusal = str(error)
                continue
            if not option.branches or self._is_cut or self._is_only(option, value):
                return value, size
            if not refusal:
                refusal = f"{slot.where}: the mocker finds no value that fits only one branch of its oneOf"
                usable = [each for each in options if each.slot.least < math.inf]
        raise FormError(refusal)

    def _option(self, options: list[Option]) -> Option:
        """Return a branch; null less often than others."""
        self._work.step(len(options))
        rng, others = self._rng, [each for each in options if not _is_null(each.slot)]
        if others and (len(others) == len(options) or rng.random() < 0.8):
            options = others
        return options[int(rng.random() * len(options))]

    def _is_only(self, option: Option, value: Any) -> bool:
        found = without_prose(value)
        return not any(self._check.fits(other, found) for other in option.others)

    def _array(self, slot: Slot, array: Array, spare: float, depth: int) -> tuple[Any, float]:
        room, rng = array.room, self._rng
        most_prose = max(array.low, 1) + int(rng.random() * 3) if spare > 0 else array.low
        values: list[Any] = []
        keys: set[Any] = set()
        size = 2.0
        while len(values) < room and not self._is_cut:
            item, is_extra = array.item(len(values)), len(values) >= array.low
            comma = bool(values)
            if is_extra and (spare < item.least + comma or (item.has_prose and len(values) >= most_prose)):
                break
            if is_extra and self._is_full:
                break
            spare -= (item.least + comma) * is_extra
            share = min(item.wish, spare) if len(values) < most_prose else 0.0
            share = max(share, spare * rng.random() * 0.5) if item.stretches else max(share, min(spare, 4.0))
            value, length = (
                self._distinct(slot, item, share, depth, keys)
                if array.is_unique
                else self._value(item, share, depth + 1)
            )
            if value is _NOTHING:
                if is_extra:
                    break
                raise FormError(f"{slot.where}: the mocker finds no {array.low} elements that differ")
            spare -= max(length - item.least, 0)
            size += length + 1
            values.append(value)
        return values, size - bool(values)

    def _distinct(self, slot: Slot, item: Slot, share: float, depth: int, keys: set[Any]) -> tuple[Any, float]:
        num_tokens = self._num_tokens
        for _ in range(TRIES):
            self._num_tokens = num_tokens
            value, length = self._value(item, share + 1, depth + 1)
            key = key_of(without_prose(value), self._work)
            if key not in keys or self._is_cut:
                keys.add(key)
                return value, length
        for value in _all(item):
            self._work.step(4)
            if (key := key_of(value, self._work)) not in keys:
                keys.add(key)
                return value, _length(value)
        return _NOTHING, 0

    def _object(self, slot: Slot, node: Object, spare: float, depth: int) -> tuple[Any, float]:
        chosen, spare = self._chosen(node, spare)
        rng, size = self._rng, 2.0
        stretchy = sum(each.slot.stretches for each in chosen) + node.is_map
        has_prose = any(each.slot.has_prose for each in chosen)
        found: dict[str, Any] = {}
        wishes = sum(each.slot.wish for each in chosen)
        for each in chosen:
            if self._is_cut:
                break
            wish = min(each.slot.wish, spare * each.slot.wish / wishes) if wishes else 0.0
            wishes -= each.slot.wish
            free = max(spare - wish - wishes, 0)
            if each.slot.stretches:
                free = free if stretchy == 1 and not has_prose else free * (0.4 + rng.random()) / (stretchy + 0.4)
                stretchy -= 1
            else:
                free = min(free, 1.0)
            share = wish + free
            self._work.step(len(each.name) // CHARS_PER_STEP)
            found[each.name], length = self._value(each.slot, share, depth + 1)
            spare = max(spare - (length - each.slot.least), 0)
            size += length + len(each.name) + 4
        size += self._extras(slot, node, found, spare, depth)
        return found, size - bool(found)

    def _chosen(self, node: Object, spare: float) -> tuple[list[Property], float]:
        """Return the properties that a value has, in their order, and what is left to spend."""
        self._work.step(len(node.properties))
        possible = [each for each in node.properties if each.slot.least < math.inf]
        required = {each.name for each in possible if each.is_required}
        missing = node.low - len(required)
        names = set(required)
        for each in possible:
            is_affordable = each.least <= spare and self._rng.random() < 0.8 and not self._is_full
            if each.is_required or len(names) >= node.high or not is_affordable:
                continue
            names.add(each.name)
            spare -= each.least
            missing -= 1
        for each in sorted(possible, key=lambda each: each.least):
            if missing > 0 and each.name not in names and len(names) < node.high:
                names.add(each.name)
                missing -= 1
        return [each for each in possible if each.name in names], spare

    def _extras(self, slot: Slot, node: Object, found: dict[str, Any], spare: float, depth: int) -> float:
        """Add properties that have no schema of their own."""
        rng, size, extra = self._rng, 0.0, node.extra
        declared = {each.name for each in node.properties}
        most = node.low
        if node.is_map and extra.least < math.inf:
            most = len(found) + 1 + int(rng.random() * 4) if extra.has_prose else MAX_EXTRA
        while len(found) < node.high and not self._is_cut:
            is_needed = len(found) < node.low
            if not is_needed and (len(found) >= most or spare < node.extra_least):
                break
            if not is_needed and self._is_full:
                break
            name = self._name(node, {*found, *declared}, depth)
            if name is None:
                if is_needed:
                    raise FormError(f"{slot.where}: the mocker finds no {node.low} names of properties")
                break
            spare -= node.extra_least
            found[name], length = self._value(extra, spare * rng.random() * 0.5, depth + 1)
            spare -= max(length - extra.least, 0)
            size += length + len(name) + 4
        return size

    def _name(self, node: Object, taken: set[str], depth: int) -> str | None:
        self._work.step(1 + len(taken) // CHARS_PER_STEP)
        num_tokens = self._num_tokens  # names are no free texts
        for attempt in range(TRIES):
            if node.names is None:
                count = 1 + (attempt > 1) + (len(taken) > 8)
                name = "_".join(WORDS[int(self._rng.random() * len(WORDS))] for _ in range(count))
                name += str(len(taken)) if attempt > 3 else ""
            else:
                name = without_prose(self._value(node.names, 8, depth + 1)[0])
                self._num_tokens = num_tokens
            if name not in taken:
                return name
        known = () if node.names is None else _all(node.names)
        return next((name for name in known if isinstance(name, str) and name not in taken), None)


_NOTHING = object()


def _is_null(slot: Slot) -> bool:
    return isinstance(slot.node, Fixed) and slot.node.values == [None]


def _all(slot: Slot) -> Any:
    """Return the values of a place that has few."""
    match slot.node:
        case Fixed(values=values):
            return values
        case Number() as number:
            return number.all()
        case Alternatives(options=options) if not any(option.branches for option in options):
            return (
                value
                for option in options
                for value in _all(option.slot)
                if not isinstance(option.slot.node, Alternatives)
            )
    return ()


def _length(value: Any) -> float:
    if isinstance(value, Prose):
        return value.num_chars + 2
    return len(msgspec.json.encode(value))


def without_prose(value: Any) -> Any:
    """Return a value with its free texts as texts."""
    match value:
        case Prose():
            return value.text
        case list():
            return [without_prose(each) for each in value]
        case dict():
            return {name: without_prose(each) for name, each in value.items()}
    return value
