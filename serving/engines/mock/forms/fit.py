"""Values in tokens: about as many as asked for, and at most that many if it can be."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from random import Random
from typing import Any

import msgspec

from serving.engines.mock.forms.check import SchemaCheck
from serving.engines.mock.forms.draw import Drawing, without_prose
from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.keywords import MAX_WORK, WorkLimit
from serving.engines.mock.forms.prose import Prose
from serving.engines.mock.forms.regex import pattern_of
from serving.engines.mock.forms.schema import Schema, schema_from
from serving.engines.mock.forms.writer import Writer

ATTEMPTS = 8
ENOUGH = 0.95
"""An answer of so much of the wanted length is long enough."""

MAX_USUAL = 1_000
"""The most tokens of a value if the request sets no limit."""

Piece = list[int] | Prose
"""Tokens, or a free text, which may still grow."""


def json_tokens(raw: Any, seed: int, target: int, writer: Writer, *, enough: float = math.inf) -> list[int]:
    """Return a value of a JSON schema in tokens, as compact JSON; a pure function.

    Args:
        raw: the schema.
        seed: makes the choices.
        target: how many tokens there should be; there are more only if no value is that short.
        writer: writes texts in the model's tokens.
        enough: how many tokens are read at most; after them, a value may be incomplete.

    Raises:
        FormError: the mocker can make no value of it.
    """
    schema = schema_from(raw)

    def attempt(num_chars: float, number: int, work: WorkLimit) -> list[int]:
        value = Drawing(schema, Random(seed * ATTEMPTS + number), writer.words, work, enough).draw(num_chars)
        pieces = _pieces(value, writer)
        tokens = _joined(pieces)
        if len(tokens) >= target or not _grow(pieces, Random(seed), target - len(tokens)):
            return tokens
        return _joined(pieces) if not schema.needs_check or _still_fits(schema, value, work) else tokens

    try:
        return _fitted(attempt, target, writer.rate)
    except RecursionError as error:  # within a constant
        raise FormError("the schema is nested too deep") from error


def usual_tokens(raw: Any, writer: Writer) -> int:
    """Return how many tokens a value has that looks like one of an application, at most 1,000.

    Raises:
        FormError: see `json_tokens`.
    """
    root = schema_from(raw).root
    return int(min((root.least + root.wish) * writer.rate, MAX_USUAL))


def check_json(raw: Any, writer: Writer) -> None:
    """Refuse a schema of which no value can be made; a value of each is made once.

    Raises:
        FormError: see `json_tokens`.
    """
    schema = schema_from(raw)
    if not schema.has_values:
        json_tokens(raw, 0, 0, writer)
        schema.has_values = True


def _still_fits(schema: Schema, value: Any, work: WorkLimit) -> bool:
    """Return whether a value fits whose texts grew: one may equal another now, or fit a second branch of a `oneOf`."""
    try:
        return SchemaCheck(schema.raw, work).fits(schema.raw, without_prose(value))
    except FormError:  # it takes too long to know
        return False


def regex_tokens(pattern: str, seed: int, target: int, writer: Writer) -> list[int]:
    """Return a text that a regular expression matches as a whole; otherwise like `json_tokens`."""
    found = pattern_of(pattern)

    def attempt(num_chars: float, number: int, work: WorkLimit) -> list[int]:
        spare = max(num_chars - found.tree.least, 0)
        return writer.tokens(found.write(Random(seed * ATTEMPTS + number), spare, work, is_whole=True))

    return _fitted(attempt, target, writer.rate)


def choice_tokens(choices: Sequence[str], seed: int, writer: Writer) -> list[int]:
    """Return one of some texts in tokens.

    Raises:
        FormError: there are none.
    """
    if not choices:
        raise FormError("choice is empty; expected texts to choose from")
    return writer.tokens(choices[int(Random(seed).random() * len(choices))])


def _fitted(attempt: Callable[[float, int, WorkLimit], list[int]], target: int, rate: float) -> list[int]:
    """Return the longest attempt that is not too long, or the shortest one of all; few attempts are made.

    Once they took as many steps together as one may, what there is must do.
    """
    best: list[int] | None = None
    shortest: list[int] | None = None
    num_chars, too_many = target / rate, math.inf
    num_steps = 0
    for number in range(ATTEMPTS):
        if num_steps > MAX_WORK:
            break
        work = WorkLimit()
        tokens = attempt(num_chars, number, work)
        num_steps += work.num_steps
        count = len(tokens)
        if shortest is None or count < len(shortest):
            shortest = tokens
        if count > target:
            if not num_chars:
                break
            too_many = min(too_many, num_chars)
            num_chars *= 0 if best is None and number >= 2 else 0.97 * target / count
            continue
        if best is not None and count <= len(best) and number >= ATTEMPTS // 2:
            break
        if best is None or count > len(best):
            best = tokens
        if count >= min(ENOUGH * target, target - 2):
            break
        wanted = max(num_chars, count / rate) * min(1.03 * target / max(count, 1), 4.0)
        num_chars = min(wanted, (num_chars + too_many) / 2)
    assert shortest is not None
    return shortest if best is None else best


def _pieces(value: Any, writer: Writer) -> list[Piece]:
    """Return a value as tokens, with its free texts apart."""
    pieces: list[Piece] = []
    texts: list[str] = []
    for part in _parts(value, writer):
        if isinstance(part, str):
            texts.append(part)
        else:
            pieces += [writer.tokens("".join(texts)), part]
            texts = []
    pieces.append(writer.tokens("".join(texts)))
    return pieces


def _parts(value: Any, writer: Writer) -> list[str | Prose]:
    """Return the texts and free texts of a value's compact JSON."""
    parts: list[str | Prose] = []
    _append(value, writer, parts)
    return parts


def _append(value: Any, writer: Writer, parts: list[str | Prose]) -> None:
    match value:
        case Prose():
            parts += ['"', value, '"']
        case str():
            parts.append(writer.quoted(value))
        case list():
            parts.append("[")
            for place, each in enumerate(value):
                if place:
                    parts.append(",")
                _append(each, writer, parts)
            parts.append("]")
        case dict():
            parts.append("{")
            for place, (name, each) in enumerate(value.items()):
                parts.append(f"{',' if place else ''}{writer.quoted(name)}:")
                _append(each, writer, parts)
            parts.append("}")
        case _:
            parts.append(msgspec.json.encode(value).decode())


def _joined(pieces: list[Piece]) -> list[int]:
    return list(chain.from_iterable(piece.ids if isinstance(piece, Prose) else piece for piece in pieces))


def _grow(pieces: list[Piece], rng: Random, count: int) -> bool:
    """Give the longest free text `count` tokens more, or all if their lengths have bounds; return whether any grew."""
    found = [piece for piece in pieces if isinstance(piece, Prose)]
    free = [text for text in found if text.high == math.inf]
    texts = [max(free, key=lambda text: text.num_chars)] if free else sorted(found, key=lambda text: text.high)
    weights = [0.2 + rng.random() for _ in texts]
    total, left = sum(weights), count
    for text, weight in zip(texts, weights, strict=True):
        is_last = text is texts[-1]
        share = left if is_last else min(math.floor(left * weight / total), left)
        left -= text.grow(rng, share)
        total -= weight
    for text in texts if left else ():  # all are of bounded length, and some have room left
        left -= text.grow(rng, left)
    return left < count
