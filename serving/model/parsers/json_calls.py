"""Calls as JSON objects: {"name": ..., "arguments": {...}}, alone or in arrays, after a marker or bare."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.model.parsers.answer import ParsedAnswer, Script, markers
from serving.model.parsers.json_text import read_object, read_string, read_value
from serving.model.parsers.schema_types import ToolTypes

ARGUMENTS = ("arguments", "parameters")
_CLOSING = re.compile(r"[\s}\]]*")
"""What may stand between calls and their end: models write a bracket too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """A format in which calls are JSON objects."""

    starts: tuple[str, ...] = ()
    """What may precede calls; models write the first."""
    ends: tuple[str, ...] = ()
    """What may follow calls; models write the first."""
    bare: str = ""
    """The character with which calls start if no marker precedes them."""
    is_array: bool = False
    """Whether models write all calls into one array; either is read."""
    between: str = ""
    """What separates calls that stand alone, other than white space."""
    key: str = "arguments"
    """What models call the arguments; either name is read."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that may be the start of calls."""
        return self.starts + ((self.bare,) if self.bare else ())

    @property
    def _stops(self) -> tuple[str, ...]:
        """Return what ends faulty arguments."""
        return (*self.ends, *(start for start in self.starts if not any(end in start for end in self.ends)))

    def read(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read calls, or what looked like their start."""
        answer.hold()
        yield from answer.expect(*self.starts)
        yield from answer.space()
        text, at = yield from answer.unread()
        if text.startswith("[", at):
            yield from read_array(answer, self._stops)
        else:
            yield from read_call(answer, self._stops)
        yield from self._close(answer)

    def _close(self, answer: ParsedAnswer) -> Script[None]:
        if answer.is_held:  # what was read last was no call
            answer.give_up()
            return
        answer.hold()
        yield from answer.all_of(_CLOSING) if self.ends else answer.space()
        found = yield from answer.expect(*self.ends, *filter(None, [self.between]))
        answer.forget() if found else answer.give_up()

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text in which a model makes these calls."""
        objects = [f'{{"name": {json.dumps(name)}, "{self.key}": {arguments}}}' for name, arguments in calls]
        start = self.starts[0] if self.starts and not self.bare else ""
        end = self.ends[0] if self.ends and not self.bare else ""
        if self.is_array:
            return f"{start}[{', '.join(objects)}]{end}"
        return (self.between or "\n").join(f"{start}{text}{end}" for text in objects)


def read_array(answer: ParsedAnswer, stops: tuple[str, ...]) -> Script[None]:
    """Read an array of calls; afterwards is recorded what was none."""
    yield from answer.expect("[")
    while True:
        yield from answer.space()
        if not (yield from read_call(answer, stops)):
            return
        answer.hold()
        yield from answer.space()
        separator = yield from answer.expect(",", "]")
        if separator == "]":
            answer.forget()
        if separator != ",":
            return


def read_call(answer: ParsedAnswer, stops: tuple[str, ...]) -> Script[bool]:
    """Read a call, and return whether it was a sound one; while it may be none, it is recorded.

    What follows a fault in the arguments belongs to them, up to one of the stops.
    """
    name, arguments = "", ""
    if not (yield from answer.expect("{")):
        return False
    while True:
        key = yield from _key(answer)
        if key == "name" and not name:
            name = (yield from read_string(answer)) or ""
            is_sound = bool(name)
        elif key in ARGUMENTS and name and not arguments and answer.is_held:
            is_sound = yield from _pass_arguments(answer, name, stops)
        elif key in ARGUMENTS and not arguments and answer.is_held:
            arguments = yield from _arguments(answer)
            is_sound = bool(arguments)
        else:
            is_sound = key is not None and (yield from read_value(answer, _ignore))
        if name and arguments and answer.is_held:
            answer.start(name)
            answer.arguments(arguments)
        yield from answer.space()
        separator = is_sound and (yield from answer.expect(",", "}"))
        if separator != ",":
            return separator == "}" and not answer.is_held


def _key(answer: ParsedAnswer) -> Script[str | None]:
    yield from answer.space()
    key = yield from read_string(answer)
    yield from answer.space()
    is_key = yield from answer.expect(":")
    yield from answer.space()
    return key if is_key else None


def _pass_arguments(answer: ParsedAnswer, name: str, stops: tuple[str, ...]) -> Script[bool]:
    text, at = yield from answer.unread()
    if text.startswith("{", at):
        answer.start(name)
        return (yield from read_value(answer, answer.arguments)) or (yield from pass_rest(answer, stops))
    arguments = yield from _arguments(answer)
    if arguments:
        answer.start(name)
        answer.arguments(arguments)
    return bool(arguments)


def _arguments(answer: ParsedAnswer) -> Script[str]:
    """Read arguments as a whole: an object, or a string that holds one, as some models write."""
    pieces: list[str] = []
    if (yield from read_object(answer, pieces.append)):
        return "".join(pieces)
    text = yield from read_string(answer)
    return text if text and _is_object(text) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def pass_rest(answer: ParsedAnswer, stops: tuple[str, ...]) -> Script[bool]:
    """Pass the rest of spoilt arguments on."""
    if stops:
        yield from answer.until(markers(*stops), answer.arguments)
    return False


def _ignore(text: str) -> None:
    """Read something that is no part of the answer."""
