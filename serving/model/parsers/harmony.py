"""Harmony, the format of gpt-oss: messages on channels, to readers or to functions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from serving.model.parsers.answer import ParsedAnswer, Script, Sink, markers
from serving.model.parsers.schema_types import ToolTypes

START, CHANNEL, MESSAGE, KIND = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FUNCTION = re.compile(r"\bto=functions\.([\w.:/-]+)")
THOUGHTS = re.compile(r"<\|channel\|>\s*analysis\b")


@dataclass(frozen=True, slots=True)
class Harmony:
    """Both a format of calls and one of reasoning: a message is one or the other by its header.

    The prompt may have ended after any part of the first header.
    """

    has_tools: bool = True
    """Whether functions may be called; otherwise messages to them are content."""

    triggers = (START, CHANNEL, "to=functions.")
    noise = (MESSAGE, KIND, *ENDS)

    def read(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read a message."""
        header: list[str] = []
        answer.hold()
        found = yield from answer.until(markers(MESSAGE, *ENDS), header.append)
        if found != MESSAGE:
            answer.give_up()
            return
        yield from answer.expect(MESSAGE)
        answer.forget()
        yield from answer.until(markers(START, *ENDS), self._sink(answer, "".join(header)))

    def _sink(self, answer: ParsedAnswer, header: str) -> Sink:
        function = FUNCTION.search(header)
        if function and self.has_tools:
            answer.start(function.group(1))
            return answer.arguments
        return answer.reasoning if THOUGHTS.search(header) else answer.content

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text in which a model makes these calls, after a prompt that ends with its role."""
        texts = [
            f"{CHANNEL}commentary to=functions.{name} {KIND}json{MESSAGE}{arguments}{ENDS[1]}"
            for name, arguments in calls
        ]
        return f"{START}assistant".join(texts)
