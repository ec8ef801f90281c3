"""An answer while it is parsed: the text that has arrived, and the parts that are made of it.

A format is a script: a generator that reads as if all text were there, and is suspended where it needs more. Texts are
passed on as they come, so that what is unread when a script is suspended is at most the start of a marker, and the work
for an answer grows with its length only.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from itertools import groupby
from typing import TypeVar

from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning

Result = TypeVar("Result")
Script = Generator[None, None, Result]
Sink = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Texts to look for. One may contain another only as its end, so that the first to begin is the first to be complete."""

    def __init__(self, *texts: str) -> None:
        assert not any(a != b and a in b and not b.endswith(a) for a in texts for b in texts), texts
        starts = {text[:length] for text in texts for length in range(1, len(text))}
        self._whole = _any_of(set(texts))
        self._start = re.compile(rf"(?:{_any_of(starts).pattern})\Z") if starts else None
        self._num_held = max(map(len, texts)) - 1

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Return how far the text holds no marker, nor the start of one at its end; and the marker that follows, if any."""
        found = self._whole.search(text, at)
        if found:
            return found.start(), found.group()
        start = self._start and self._start.search(text, max(at, len(text) - self._num_held))
        return (start.start() if start else len(text)), ""


def _any_of(texts: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


@cache
def markers(*texts: str) -> Markers:
    """Return the markers, compiled once."""
    return Markers(*texts)


class ParsedAnswer:
    """Reads text as it arrives and collects parts.

    What may turn out to be a call is read with a record (`hold`), until it is one (`start`) or is not (`give_up`): then
    it is content. White space beside calls is markup.
    """

    def __init__(self) -> None:
        self._text, self._at, self._is_ended = "", 0, False
        self._parts: list[Part] = []
        self._record: list[str] | None = None
        self._space: list[str] = []  # content that is only white space so far
        self._has_content = self._has_calls = False
        self.is_thinking = False
        """Whether what comes next is reasoning."""

    # What is read.

    def add(self, text: str) -> None:
        """Append text that has arrived."""
        self._text, self._at = self._text[self._at :] + text, 0

    def close(self) -> None:
        """No more text will arrive."""
        self._is_ended = True

    def take(self, end: int) -> str:
        """Read up to a place in the unread text."""
        piece, self._at = self._text[self._at : end], end
        if self._record is not None:
            self._record.append(piece)
        return piece

    def unread(self) -> Script[tuple[str, int]]:
        """Wait for text; return it and the place of the first unread character, which is its end if the answer ended."""
        while self._at == len(self._text) and not self._is_ended:
            yield
        return self._text, self._at

    def until(self, wanted: Markers, sink: Sink) -> Script[str]:
        """Pass text on up to a marker, which stays unread; return it, or nothing at the end."""
        while True:
            end, found = wanted.find(self._text, self._at)
            end = len(self._text) if self._is_ended and not found else end
            if end > self._at:
                sink(self.take(end))
            if found or self._is_ended:
                return found
            yield

    def expect(self, *texts: str) -> Script[str]:
        """Read one of these texts if it comes next, and return it; none may be the start of another."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._at):
                    return self.take(self._at + len(text))
            num_unread = len(self._text) - self._at
            is_open = any(len(t) > num_unread and self._text.startswith(t[:num_unread], self._at) for t in texts)
            if self._is_ended or not is_open:
                return ""
            yield

    def space(self) -> Script[str]:
        """Read white space, and return it."""
        return self.all_of(SPACE)

    def all_of(self, pattern: re.Pattern[str]) -> Script[str]:
        """Read as long as characters match, and return them; the pattern matches any number of them."""
        pieces: list[str] = []
        while True:
            text, at = yield from self.unread()
            end = pattern.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
            pieces.append(self.take(end))
            if end < len(text) or end == at:
                return "".join(pieces)

    # What is made of it.

    def hold(self) -> None:
        """Record what is read from here on."""
        self._record = []

    @property
    def is_held(self) -> bool:
        """Whether what is read is recorded."""
        return self._record is not None

    def forget(self) -> None:
        """Drop the record: it was markup."""
        self._record = None

    def give_up(self, sink: Sink | None = None) -> None:
        """Pass what was recorded on, by default as content."""
        text, self._record = "".join(self._record or ()), None
        if text:
            (sink or self.content)(text)

    def start(self, name: str, id: str = "") -> None:
        """What was recorded is the start of a call."""
        self.forget()
        self._space.clear()
        self._has_content, self._has_calls = False, True
        self._parts.append(CallStart(name, id))

    def arguments(self, text: str) -> None:
        """Add text of the call's arguments."""
        self._parts.append(Arguments(text))

    def reasoning(self, text: str) -> None:
        """Add text that the model thought."""
        self._parts.append(Reasoning(text))

    def content(self, text: str) -> None:
        """Add text for the reader; white space waits for what is none."""
        self._space.append(text)
        self._has_content = self._has_content or not text.isspace()
        if self._has_content:
            self._parts += map(Content, self._space)
            self._space.clear()

    def finish(self) -> None:
        """White space at the end is content, unless it follows a call."""
        if not self._has_calls:
            self._parts += map(Content, self._space)

    def pop(self) -> list[Part]:
        """Return the parts since the last time, neighbours of one kind as one."""
        parts, self._parts = self._parts, []
        return [part for kind, group in groupby(parts, type) for part in _joined(kind, list(group))]


def _joined(kind: type[Part], parts: list[Part]) -> list[Part]:
    if isinstance(parts[0], CallStart):
        return parts
    text = "".join(part.text for part in parts if not isinstance(part, CallStart))
    return [kind(text)] if text else []


class ScriptParser:
    """Splits an answer's text into parts as a script says, in pieces of any length; what follows its end is content.

    The parts do not depend on how the text was cut, except that texts of one kind may come in several parts.
    """

    def __init__(self, answer: ParsedAnswer, script: Script[object]) -> None:
        self._answer = answer
        self._script = self._run(script)

    def _run(self, script: Script[object]) -> Script[None]:
        yield from script
        yield from self._answer.until(_NEVER, self._answer.content)
        self._answer.finish()

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is still in its reasoning, after what has been pushed."""
        return self._answer.is_thinking

    def push(self, text: str) -> list[Part]:
        """Return what the next text settles; what may be the start of a marker is held back."""
        self._answer.add(text)
        next(self._script, None)
        return self._answer.pop()

    def end(self) -> list[Part]:
        """Return what was held back: the answer has ended."""
        self._answer.close()
        next(self._script, None)
        return self._answer.pop()


class _Never(Markers):
    def __init__(self) -> None:
        pass

    def find(self, text: str, at: int) -> tuple[int, str]:
        return len(text), ""


_NEVER = _Never()
