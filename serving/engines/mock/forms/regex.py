"""Regular expressions read backwards: texts that they match.

Python parses an expression; what it means is the same in ECMA's dialect, as far as it is supported here. A text that was
made is matched again, over sets of positions, so the time is bounded whatever the expression is.
"""

import math
from functools import lru_cache
from random import Random
from typing import Any

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.keywords import WorkLimit
from serving.engines.mock.forms.regex_trees import At, Chars, Concatenation, Either, Look, Repeat, Tree, is_of
from serving.engines.parsed_regex import operation, parsed, repetitions

MAX_PATTERN = 4096
"""The most characters of an expression."""

MAX_DEPTH = 40
MAX_TEXT = 65_536
"""The most characters of a text that must be longer than asked for."""

TRIES = 20
"""Texts that are made and matched before an expression with anchors or lookarounds inside is refused."""


class Pattern:
    """An expression, ready to write texts."""

    def __init__(self, text: str) -> None:
        """Parse it.

        Raises:
            FormError: it is not understood, or not supported.
        """
        self.text = text
        if len(text) > MAX_PATTERN:
            raise FormError(f"a pattern has {len(text):,} characters; the mocker supports {MAX_PATTERN:,}")
        try:
            parts, flags = parsed(text)
        except ValueError as error:
            raise FormError(f"pattern {_short(text)} is not understood: {error}") from error
        self._is_checked = False
        if flags:
            raise FormError(f"pattern {_short(text)}: flags ({flags:#x}) are not supported by the mocker")
        self.tree = self._row(parts, 0)
        if max(self.tree.least, self.tree.steps) > MAX_TEXT:
            raise FormError(f"pattern {_short(text)} needs texts that are longer than {MAX_TEXT:,} characters")

    def _row(self, parts: Any, depth: int) -> Concatenation:
        if depth > MAX_DEPTH:
            raise FormError(f"pattern {_short(self.text)} is nested more than {MAX_DEPTH} deep")
        return Concatenation([self._part(operation(part), part[1], depth) for part in parts])

    def _part(self, op: str, value: Any, depth: int) -> Tree:
        match op:
            case "LITERAL":
                return Chars([(value, value)], [], False)
            case "NOT_LITERAL":
                return Chars([(value, value)], [], True)
            case "ANY":
                return Chars([(10, 10)], [], True)
            case "IN":
                return self._chars(value)
            case "BRANCH":
                return Either([self._row(branch, depth + 1) for branch in value[1]])
            case "SUBPATTERN" if not (value[1] or value[2]):
                return self._row(value[3], depth + 1)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return Repeat(self._row(value[2], depth + 1), *repetitions(value))
            case "AT":
                self._is_checked = True
                return At(str(value).removeprefix("AT_"))
            case "ASSERT" | "ASSERT_NOT" if value[0] > 0:
                self._is_checked = True
                return Look(self._row(value[1], depth + 1), op == "ASSERT_NOT")
        name = {"ASSERT": "lookbehind", "ASSERT_NOT": "lookbehind", "GROUPREF": "backreference"}.get(op, op.lower())
        raise FormError(f"pattern {_short(self.text)}: a {name} is not supported by the mocker")

    def _chars(self, items: list[tuple[Any, Any]]) -> Chars:
        ranges: list[tuple[int, int]] = []
        categories: list[str] = []
        for op, value in items:
            if str(op) == "LITERAL":
                ranges.append((value, value))
            elif str(op) == "RANGE":
                ranges.append(value)
            elif str(op) == "CATEGORY":
                categories.append(str(value))
        return Chars(ranges, categories, bool(items) and str(items[0][0]) == "NEGATE")

    def write(
        self, rng: Random, spare: float, work: WorkLimit, *, is_whole: bool, low: int = 0, high: float = math.inf
    ) -> str:
        """Return a text that it matches, about `spare` characters longer than the shortest one.

        Args:
            rng: makes the choices.
            spare: how much longer than necessary the text should be.
            work: counts the steps.
            is_whole: whether the whole text must match; otherwise a part of it may.
            low: the fewest characters.
            high: the most.

        Raises:
            FormError: no text is found, or not in time.
        """
        most = max(min(high, MAX_TEXT) - self.tree.least, 0)
        for attempt in range(TRIES):
            more = min(max(spare, low - self.tree.least, 0) + attempt, most)
            writing = Writing(rng, work, is_wide=attempt > 1)
            writing.write(self.tree, more)
            text = writing.text
            if not low <= len(text) <= high:
                spare = spare / 2 if len(text) > high else spare + low - len(text)
                continue
            if not self._is_checked or self.matches(text, work, is_whole=is_whole):
                return text
        bounds = f" of {low} to {high} characters" if low or high < math.inf else ""
        raise FormError(f"pattern {_short(self.text)}: the mocker finds no text{bounds} that it matches")

    def matches(self, text: str, work: WorkLimit, *, is_whole: bool = False) -> bool:
        """Return whether it matches a text, or a part of it.

        Raises:
            FormError: that would take too long.
        """
        matching = Matching(text, self.text, work)
        ends = matching.ends(self.tree, {0} if is_whole else set(range(len(text) + 1)))
        return len(text) in ends if is_whole else bool(ends)


@lru_cache(256)
def pattern_of(text: str) -> Pattern:
    """Return an expression, parsed.

    Raises:
        FormError: see `Pattern`.
    """
    return Pattern(text)


class Writing:
    """Writes one text."""

    def __init__(self, rng: Random, work: WorkLimit, *, is_wide: bool) -> None:
        self._rng = rng
        self._work = work
        self._is_wide = is_wide
        self._written: list[str] = []

    @property
    def text(self) -> str:
        """What was written."""
        return "".join(self._written)

    def write(self, tree: Tree, spare: float) -> int:
        """Write a text of about the least length and `spare` more; return its length.

        Raises:
            FormError: that takes too long.
        """
        rng = self._rng
        self._work.step()
        match tree:
            case Chars():
                return self._chars(tree, 1)
            case Concatenation():
                shares = _shares(tree.parts, rng, spare)
                return sum(self.write(part, share) for part, share in zip(tree.parts, shares, strict=True))
            case Either():
                self._work.step(len(tree.branches))
                open_branches = [branch for branch in tree.branches if branch.least <= tree.least + spare]
                wanted = [branch for branch in open_branches if branch.most >= tree.least + spare] or open_branches
                chosen = wanted[int(rng.random() * len(wanted))]
                return self.write(chosen, tree.least + spare - chosen.least)
            case Repeat():
                return self._repeat(tree, spare)
        return 0

    def _chars(self, tree: Chars, count: int) -> int:
        self._work.step(count // 16)  # all in one go: quick
        self._written += self._rng.choices(tree.wide if self._is_wide else tree.choices, k=count)
        return count

    def _repeat(self, tree: Repeat, spare: float) -> int:
        item = tree.item
        room = min(tree.high - tree.low, spare // max(item.least, 1))
        is_fixed = item.most == item.least
        more = int(room) if is_fixed or room < 1 else 1 + int(self._rng.random() * min(room, 8))
        count = tree.low + min(more, int(room)) if item.most else 0
        match item:
            case Concatenation(parts=[Chars() as chars]) if count:
                return self._chars(chars, count)
        left = max(spare - (count - tree.low) * item.least, 0)
        total = 0
        for place in range(count):
            length = self.write(item, 0.0 if is_fixed else left / (count - place))
            left -= max(length - item.least, 0)
            total += length
        return total


def _shares(parts: list[Tree], rng: Random, spare: float) -> list[float]:
    """Divide what is to be added among the parts that can be longer, at random, each within its bounds."""
    rooms = [part.most - part.least if part.most > part.least else 0.0 for part in parts]
    shares = [0.0] * len(parts)
    open_places = [place for place, room in enumerate(rooms) if room]
    if len(open_places) == 1:
        shares[open_places[0]] = min(spare, rooms[open_places[0]])
        return shares
    weights = {place: 0.2 + rng.random() for place in open_places}
    total = sum(weights.values())
    for place in sorted(open_places, key=rooms.__getitem__):  # what the bounded leave goes to the others
        shares[place] = min(math.floor(spare * weights[place] / total), rooms[place])
        total -= weights[place]
        spare -= shares[place]
        if total <= 1e-9:
            shares[place] = min(shares[place] + spare, rooms[place])
    return shares


class Matching:
    """Matches one text by sets of positions: from each set of starts, the set of ends."""

    def __init__(self, text: str, pattern: str, work: WorkLimit) -> None:
        self._text = text
        self._pattern = pattern
        self._work = work

    def ends(self, tree: Tree, starts: set[int]) -> set[int]:
        """Return where a part may end that begins at any of the starts."""
        self._work.step(len(starts) + 1)
        text = self._text
        match tree:
            case Chars():
                return {place + 1 for place in starts if place < len(text) and tree.accepts(text[place])}
            case Concatenation():
                for part in tree.parts:
                    if not starts:
                        break
                    starts = self.ends(part, starts)
                return starts
            case Either():
                return set().union(*(self.ends(branch, starts) for branch in tree.branches))
            case Repeat():
                return self._repeated(tree, starts)
            case Look():
                return {place for place in starts if bool(self.ends(tree.item, {place})) != tree.negated}
            case At():
                return {place for place in starts if self._is_at(place, tree.kind)}
        raise AssertionError(tree)

    def _repeated(self, tree: Repeat, starts: set[int]) -> set[int]:
        for _ in range(tree.low):
            starts = self.ends(tree.item, starts)
            if not starts:
                return starts
        found, fresh, count = set(starts), starts, tree.low
        while fresh and count < tree.high:
            fresh = self.ends(tree.item, fresh) - found
            found |= fresh
            count += 1
        return found

    def _is_at(self, place: int, kind: str) -> bool:
        match kind:
            case "BEGINNING" | "BEGINNING_STRING":
                return place == 0
            case "END" | "END_STRING":  # Python's `$` also matches before a last newline; ECMA's does not
                return place == len(self._text)
            case "BOUNDARY" | "NON_BOUNDARY":
                before, after = self._text[max(place - 1, 0) : place], self._text[place : place + 1]
                words = [bool(side) and is_of(side, "WORD") for side in (before, after)]
                return (words[0] != words[1]) == (kind == "BOUNDARY")
        raise FormError(f"pattern {_short(self._pattern)}: {kind.lower()} is not supported by the mocker")


def _short(text: str) -> str:
    """Return a pattern as messages show it."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
