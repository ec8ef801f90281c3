"""Calls with each parameter between tags: <function=f><parameter=p>value</parameter></function> and the like."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.model.parsers.answer import ParsedAnswer, Script, markers
from serving.model.parsers.header_calls import NAME
from serving.model.parsers.schema_types import ToolTypes, to_json

KIND = re.compile(r"""string=["'](true|false)["']\Z""")
"""Whether a value is a string, after its parameter's name."""

QUOTES = ('"', "'")


@dataclass(frozen=True, slots=True, kw_only=True)
class TagCalls:
    """A format in which parameters are plain text between tags, of the types that the tools' schemas say.

    Values that can only be strings are passed on as they arrive, others when they are complete.
    """

    start: str
    """What precedes calls."""
    function: str = ""
    """What precedes a function's name; alone, it starts a call as well."""
    name_end: str = ""
    """What follows the name; without it the first parameter does, or the function's end."""
    parameter: str
    """What precedes a parameter's name."""
    key_end: str
    """What follows the parameter's name."""
    value_start: str = ""
    """What precedes the value."""
    value_end: str
    """What follows the value."""
    function_end: str
    """What follows the last parameter."""
    end: str = ""
    """What follows the last call."""
    quote: str = ""
    """What models put around names of functions and parameters."""
    has_lines: bool = False
    """Whether values stand on lines of their own."""
    has_kinds: bool = False
    """Whether models say of each value whether it is a string."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that may be the start of calls."""
        return (self.start, self.function) if self.function else (self.start,)

    @property
    def _ends(self) -> tuple[str, ...]:
        return tuple(filter(None, {self.function_end, self.end}))

    def read(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read calls, or what looked like their start."""
        answer.hold()
        has_start = yield from answer.expect(self.start)
        yield from answer.space()
        yield from self._read_call(answer, types)
        while not answer.is_held and self.function:
            answer.hold()
            yield from answer.space()
            if has_start and self.end and (yield from answer.expect(self.end)):
                answer.forget()
                return
            yield from self._read_call(answer, types)
        answer.give_up()

    def _read_call(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read a call; if it is none, what was read stays recorded."""
        if self.function and not (yield from answer.expect(self.function)):
            return
        header: list[str] = []
        wanted = (self.name_end,) if self.name_end else (self.parameter, self.function_end)
        found = yield from answer.until(markers(*wanted, *self._ends), header.append)
        match = NAME.match("".join(header).strip().strip("\"'"))
        if not match or found not in wanted:
            return
        yield from answer.expect(self.name_end)
        answer.start(match.group(1))
        yield from self._read_parameters(answer, types, match.group(1))

    def _read_parameters(self, answer: ParsedAnswer, types: ToolTypes, function: str) -> Script[None]:
        separator = "{"
        while True:
            found = yield from answer.until(markers(self.parameter, *self._ends), _ignore)
            if found != self.parameter:
                break
            yield from answer.expect(found)
            key: list[str] = []
            yield from answer.until(markers(self.key_end, *self._ends), key.append)
            if not (yield from answer.expect(self.key_end)):
                continue
            name, wanted = self._parameter("".join(key), types, function)
            answer.arguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if not (yield from self._read_value(answer, wanted)):
                return
        if found:
            yield from answer.expect(self.function_end)
            answer.arguments("{}" if separator == "{" else "}")

    def _parameter(self, key: str, types: ToolTypes, function: str) -> tuple[str, frozenset[str]]:
        """Return a parameter's name, and the types that its value may have."""
        key = key.strip()
        kind = KIND.search(key)
        name = _unquoted(key[: kind.start()].rstrip() if kind else key)
        if not kind or not name:
            return name or key, types.of(function, name or key)
        return name, frozenset({"string"} if kind.group(1) == "true" else {"any"})

    def _read_value(self, answer: ParsedAnswer, types: frozenset[str]) -> Script[bool]:
        """Pass a value on as JSON; return whether it was complete."""
        if self.value_start:
            yield from answer.space()
            yield from answer.expect(self.value_start)
        if self.has_lines:
            yield from answer.expect("\n")
        ends = (self.value_end, self.parameter, *self._ends)
        wanted = markers(*ends, *(f"\n{end}" for end in ends if self.has_lines))
        if types == {"string"}:
            answer.arguments('"')
            found = yield from answer.until(
                wanted, lambda text: answer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            answer.arguments('"' if found else "")
        else:
            pieces: list[str] = []
            found = yield from answer.until(wanted, pieces.append)
            value = to_json("".join(pieces), types if found else frozenset({"string"}))
            answer.arguments(value if found else value[:-1])
        if self.has_lines:
            yield from answer.expect("\n")
        yield from answer.expect(self.value_end)
        return bool(found)

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text in which a model makes these calls."""
        functions = [self._write_call(name, json.loads(arguments)) for name, arguments in calls]
        line = "\n" if self.has_lines else ""
        if not self.function:
            return "\n".join(f"{self.start}{text}" for text in functions)
        return f"{self.start}{line}{line.join(functions)}{line}{self.end}"

    def _write_call(self, name: str, arguments: dict[str, object]) -> str:
        line = "\n" if self.has_lines else ""
        text = f"{self.function}{self.quote}{name}{self.quote}{self.name_end}{line}"
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            kind = f' string="{json.dumps(is_string)}"' if self.has_kinds else ""
            written = value if is_string else json.dumps(value, ensure_ascii=False)
            text += f"{self.parameter}{self.quote}{key}{self.quote}{kind}{self.key_end}{self.value_start}"
            text += f"{line}{written}{line}{self.value_end}{line}"
        return text + self.function_end


def _ignore(text: str) -> None:
    """Read what stands between parameters."""


def _unquoted(name: str) -> str:
    """Return a name without the quotes around it; nothing if it is no name."""
    bare = name[name[:1] in QUOTES : len(name) - (name[-1:] in QUOTES)]
    return "" if any(mark in bare for mark in "\"'>") else bare
