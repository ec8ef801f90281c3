"""Calls as a header with the name of a function, then the arguments as JSON, with markers around each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.model.parsers.answer import ParsedAnswer, Script, markers
from serving.model.parsers.json_calls import pass_rest, read_array, read_call
from serving.model.parsers.json_text import read_value
from serving.model.parsers.schema_types import ToolTypes

NAME = re.compile(r"\s*([\w.:/-]+)\s*\Z")
"""A name where no quotes delimit it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderCalls:
    """A format in which a function's name precedes its arguments."""

    starts: tuple[str, ...]
    """What precedes calls."""
    call: str = ""
    """What precedes each call."""
    kind: str = ""
    """What precedes each name and is no part of it."""
    separators: tuple[str, ...]
    """What separates names and arguments; models write the first. A brace belongs to the arguments."""
    call_end: str = ""
    """What follows each call."""
    end: str = ""
    """What follows calls."""
    name: re.Pattern[str] = NAME
    """Finds the name in what is between."""
    template: str = "{name}"
    """How models write the name of call number `index`."""
    has_id: bool = False
    """Whether what is between is the call's id as well."""
    has_objects: bool = False
    """Whether calls may be JSON objects instead."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that may be the start of calls."""
        return self.starts

    @property
    def _stops(self) -> tuple[str, ...]:
        return tuple({*self.starts, *filter(None, [self.call, self.call_end.strip(), self.end])})

    def read(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read calls, or what looked like their start."""
        answer.hold()
        yield from answer.expect(*self.starts)
        yield from answer.space()
        if self.has_objects and (yield from _read_objects(answer, self._stops)):
            return
        yield from self._read_call(answer)
        while not answer.is_held and self.call:
            answer.hold()
            yield from answer.space()
            if self.end and (yield from answer.expect(self.end)):
                answer.forget()
                return
            yield from self._read_call(answer)
        answer.give_up()

    def _read_call(self, answer: ParsedAnswer) -> Script[None]:
        """Read a call; if it is none, what was read stays recorded."""
        if self.call and not (yield from answer.expect(self.call)):
            return
        header: list[str] = []
        found = yield from answer.until(markers(*self.separators, *self._stops), header.append)
        text = "".join(header).removeprefix(self.kind)
        match = self.name.match(text)
        if found not in self.separators or not match:
            return
        if found != "{":
            yield from answer.expect(found)
        answer.start(match.group(1), text.strip() if self.has_id else "")
        yield from answer.space()
        yield from self._read_arguments(answer)

    def _read_arguments(self, answer: ParsedAnswer) -> Script[None]:
        text, at = yield from answer.unread()
        if not text.startswith("{", at):
            yield from self._pass_other(answer)
        elif not (yield from read_value(answer, answer.arguments)):
            yield from pass_rest(answer, self._stops)
        if self.call_end:
            answer.hold()
            yield from answer.space()
            found = yield from answer.expect(self.call_end.strip())
            answer.forget() if found else answer.give_up()

    def _pass_other(self, answer: ParsedAnswer) -> Script[None]:
        """Pass on what is no object; nothing at all is the empty object."""
        pieces: list[str] = []
        found = yield from answer.until(markers(*self._stops), pieces.append)
        answer.arguments("".join(pieces) or ("{}" if found else ""))

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text in which a model makes these calls."""
        separator = self.separators[0].removesuffix("{")
        texts = [
            f"{self.call or self.starts[0]}{self.kind}{self.template.format(name=name, index=index)}{separator}{arguments}"
            f"{self.call_end}"
            for index, (name, arguments) in enumerate(calls)
        ]
        return f"{self.starts[0] if self.call else ''}{''.join(texts)}{self.end}"


def _read_objects(answer: ParsedAnswer, stops: tuple[str, ...]) -> Script[bool]:
    """Read calls that are JSON objects; return whether there were any, or something like it."""
    text, at = yield from answer.unread()
    if not text.startswith(("[", "{"), at):
        return False
    yield from read_array(answer, stops) if text.startswith("[", at) else read_call(answer, stops)
    answer.give_up()
    return True
