"""Calls in Python's syntax: [f(x=1), g()]."""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.model.parsers.answer import ParsedAnswer, Script
from serving.model.parsers.json_text import encodable
from serving.model.parsers.schema_types import ToolTypes

_NAME = re.compile(r"[\w.]*")
_INSIDE = {
    "": re.compile(r"[^()\[\]{}'\"]*"),
    "'": re.compile(r"[^'\\]*"),
    '"': re.compile(r'[^"\\]*'),
}
"""What neither opens nor closes anything, outside of strings and in both kinds."""

_CONSTANTS = {"true": True, "false": False, "null": None}
"""Names that models take from JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """A format in which calls are Python expressions; each is passed on when it is complete."""

    start: str = ""
    """What precedes calls, or their list."""
    end: str = ""
    """What follows them."""
    has_lines: bool = False
    """Whether calls stand on lines of their own, and not in a list."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that may be the start of calls."""
        return tuple(filter(None, (self.start, "" if self.has_lines else "[")))

    def read(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read calls, or what looked like their start."""
        answer.hold()
        if self.start:
            yield from answer.expect(self.start)
        yield from answer.space()
        if not self.has_lines and not (yield from answer.expect("[")):
            answer.give_up()
            return
        while (yield from _read_call(answer)):
            answer.hold()
            yield from answer.space()
            if (yield from self._is_over(answer)):
                return
            yield from answer.space()
        answer.give_up()

    def _is_over(self, answer: ParsedAnswer) -> Script[bool]:
        """Read what follows a call; return whether it was the last one."""
        if not self.has_lines:
            separator = yield from answer.expect(",", "]")
            if separator == ",":
                return False
            if separator == "]":
                answer.forget()
                answer.hold()
                yield from answer.space()
        if self.end and (yield from answer.expect(self.end)):
            answer.forget()
            return True
        if not self.has_lines:
            answer.give_up()
        return not self.has_lines

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text in which a model makes these calls."""
        texts = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in json.loads(arguments).items())})"
            for name, arguments in calls
        ]
        if self.has_lines:
            return "\n".join((self.start, *texts, self.end))
        return f"{self.start}[{', '.join(texts)}]{self.end}"


def _read_call(answer: ParsedAnswer) -> Script[bool]:
    """Read a call and pass it on; return False if it is none."""
    name = yield from answer.all_of(_NAME)
    text, at = yield from answer.unread()
    if not name or not text.startswith("(", at):
        return False
    arguments = _arguments(name + (yield from _in_brackets(answer)))
    if arguments is None:
        return False
    answer.start(name)
    answer.arguments(arguments)
    return True


def _in_brackets(answer: ParsedAnswer) -> Script[str]:
    """Read up to the end of an expression in brackets, which comes next."""
    pieces, depth, quote = [], 0, ""
    while True:
        pieces.append((yield from answer.all_of(_INSIDE[quote])))
        text, at = yield from answer.unread()
        if at == len(text):
            return "".join(pieces)
        character = answer.take(at + 1)
        pieces.append(character)
        if character == "\\":
            text, at = yield from answer.unread()
            pieces.append(answer.take(min(at + 1, len(text))))
        elif character in "'\"":
            quote = "" if quote else character
        else:
            depth += 1 if character in "([{" else -1
        if not depth:
            return "".join(pieces)


def _arguments(text: str) -> str | None:
    """Return the arguments of a call with keywords and literals as JSON; None if it is none."""
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {_key(word): _value(word.value) for word in call.keywords}
        return encodable(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _key(word: ast.keyword) -> str:
    if word.arg is None:
        raise ValueError("a mapping is unpacked")
    return word.arg


def _value(node: ast.expr) -> object:
    """Return a literal's value."""
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(_value(key)) if key else "": _value(value) for key, value in zip(node.keys, node.values, strict=True)
        }
    return ast.literal_eval(node)
