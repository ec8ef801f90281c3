"""JSON as it arrives."""

import json
import re
from collections.abc import Callable

from serving.model.parsers.answer import SPACE, ParsedAnswer, Script, Sink

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_WHOLE_SCALAR = re.compile(r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null)\Z", re.ASCII)
_HEX = re.compile(r"[0-9a-fA-F]")


class JsonScanner:
    """Follows one JSON value through pieces of text.

    It is as strict as JSON, but for line breaks and other control characters in strings, which models do write: they are
    escaped in the text that it returns.
    """

    def __init__(self) -> None:
        self.is_done = self.is_wrong = False
        self._open: list[str] = []  # the brackets that will close what is open
        self._scalar: list[str] = []
        self._num_hex = 0
        self._step: Callable[[str, int, list[str]], int] = self._value
        self._after_string: Callable[[str, int, list[str]], int] = self._after

    def push(self, text: str, at: int) -> tuple[int, str]:
        """Read text from a place on; return where the value ends in it, or ceases to be JSON, and the value's text."""
        valid: list[str] = []
        while at < len(text) and not self.is_done and not self.is_wrong:
            at = self._step(text, at, valid)
        return at, "".join(valid)

    def _structure(self, text: str, at: int, valid: list[str]) -> tuple[str, int]:
        """Pass white space on; return the next character, if there is one, and its place."""
        end = SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        valid.append(text[at:end])
        return text[end : end + 1], end

    def _value(self, text: str, at: int, valid: list[str]) -> int:
        character, at = self._structure(text, at, valid)
        if character == "":
            return at
        if character in "{[":
            self._open.append("}" if character == "{" else "]")
            self._step = self._first_key if character == "{" else self._first_item
        elif character == '"':
            self._step, self._after_string = self._string, self._after
        else:
            self._step = self._in_scalar
            return at
        valid.append(character)
        return at + 1

    def _first_item(self, text: str, at: int, valid: list[str]) -> int:
        character, at = self._structure(text, at, valid)
        if character not in ("", "]"):
            self._step = self._value
        return self._close(at, valid) if character == "]" else at

    def _first_key(self, text: str, at: int, valid: list[str]) -> int:
        character, at = self._structure(text, at, valid)
        if character not in ("", "}"):
            self._step = self._key
        return self._close(at, valid) if character == "}" else at

    def _key(self, text: str, at: int, valid: list[str]) -> int:
        self._after_string = self._colon
        return self._one(text, at, valid, '"', self._string)

    def _colon(self, text: str, at: int, valid: list[str]) -> int:
        return self._one(text, at, valid, ":", self._value)

    def _one(
        self, text: str, at: int, valid: list[str], wanted: str, step: Callable[[str, int, list[str]], int]
    ) -> int:
        character, at = self._structure(text, at, valid)
        if character != wanted:
            self.is_wrong = character != ""
            return at
        self._step = step
        valid.append(character)
        return at + 1

    def _after(self, text: str, at: int, valid: list[str]) -> int:
        character, at = self._structure(text, at, valid)
        if character == self._open[-1]:
            return self._close(at, valid)
        step = self._key if self._open[-1] == "}" else self._value
        return self._one(text, at, valid, ",", step)

    def _close(self, at: int, valid: list[str]) -> int:
        valid.append(self._open.pop())
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._step = self._after
        self.is_done = not self._open

    def _string(self, text: str, at: int, valid: list[str]) -> int:
        end = _PLAIN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        valid.append(text[at:end])
        character = text[end : end + 1]
        if character == '"':
            valid.append(character)
            if self._after_string == self._after:
                self._end_value()
            else:
                self._step = self._after_string
        elif character == "\\":
            valid.append(character)
            self._step = self._escape
        elif character:
            valid.append(json.dumps(character)[1:-1])
        return end + 1 if character else end

    def _escape(self, text: str, at: int, valid: list[str]) -> int:
        if text[at] not in '"\\/bfnrtu':
            self.is_wrong = True
            return at
        self._num_hex = 4 if text[at] == "u" else 0
        self._step = self._hex if self._num_hex else self._string
        valid.append(text[at])
        return at + 1

    def _hex(self, text: str, at: int, valid: list[str]) -> int:
        if not _HEX.match(text, at):
            self.is_wrong = True
            return at
        self._num_hex -= 1
        self._step = self._hex if self._num_hex else self._string
        valid.append(text[at])
        return at + 1

    def _in_scalar(self, text: str, at: int, valid: list[str]) -> int:
        end = _SCALAR.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        self._scalar.append(text[at:end])
        valid.append(text[at:end])
        if end < len(text):
            self.is_wrong = not _WHOLE_SCALAR.match("".join(self._scalar))
            self._scalar.clear()
            self._end_value()
        return end


def read_value(answer: ParsedAnswer, sink: Sink) -> Script[bool]:
    """Pass one JSON value on as it arrives; return whether it was complete."""
    scanner = JsonScanner()
    while not scanner.is_done:
        text, at = yield from answer.unread()
        end, valid = scanner.push(text, at)
        answer.take(end)
        if valid:
            sink(valid)
        if scanner.is_wrong or at == len(text):
            return False
    return True


def read_string(answer: ParsedAnswer) -> Script[str | None]:
    """Read a JSON string; return None if there is none."""
    text, at = yield from answer.unread()
    pieces: list[str] = []
    if not text.startswith('"', at) or not (yield from read_value(answer, pieces.append)):
        return None
    return encodable(json.loads("".join(pieces)))


def encodable(text: str) -> str:
    """Return a text that was escaped, as text can be: halves of surrogate pairs are joined, single ones replaced."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_object(answer: ParsedAnswer, sink: Sink) -> Script[bool]:
    """Pass one JSON object on as it arrives; return whether it was complete."""
    text, at = yield from answer.unread()
    return text.startswith("{", at) and (yield from read_value(answer, sink))
