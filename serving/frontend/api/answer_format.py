"""What every API's answers share: how parts of an answer become bytes.

                 streamed                              not streamed
    first(usage) ----------.
    parts(...)   (often)    >  the body's events       whole(parts, reason, usage)
    last(...) or failed()  /

One value serves one answer, in one of the two ways.
"""

from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec

from serving.frontend.api.errors import ApiError
from serving.model.parts import Arguments, Content, Part, Reasoning

_encode = msgspec.json.encode


class Usage(NamedTuple):
    """Numbers of tokens."""

    num_prompt: int
    num_completion: int = 0
    num_cached: int = 0
    """Those of the prompt that were in a cache."""
    num_reasoning: int = 0
    """Those of the completion that the model thought with."""


class AnswerFormat(Protocol):
    """The form of one answer, as its API wants it.

    Reasons are "length" (the answer was cut off), "tool_calls" and "stop". If a stop string ended the answer, it is
    passed with the reason.
    """

    def first(self, usage: Usage) -> bytes:
        """Return the events before the first part; the usage is that of the prompt."""
        ...

    def parts(self, parts: list[Part]) -> bytes:
        """Return the events of the next parts."""
        ...

    def last(self, reason: str, usage: Usage, *, stop: str | None = None) -> bytes:
        """Return the events that end the stream."""
        ...

    def whole(self, parts: list[Part], reason: str, usage: Usage, *, stop: str | None = None) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream that fails."""
        ...


class Spaces:
    """Leaves out white space between what a model thought, said and called, as it says nothing by itself.

    White space within a text stays, also in front of it.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def without(self, parts: list[Part]) -> list[Part]:
        """Return the next parts; white space that may be the start of a text comes with the rest of it."""
        found: list[Part] = []
        for part in parts:
            if not isinstance(part, Content):
                self._held, self._is_text = "", False
                found.append(part)
            elif self._is_text or part.text.strip():
                found.append(Content(self._held + part.text))
                self._held, self._is_text = "", True
            else:
                self._held += part.text
        return found


class CallIds:
    """The ids of an answer's calls: the model's own, as its template may want them back, unless it repeats itself.

    The others are the same whenever the same answer is made, as a template may put them into the next prompt.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._used: set[str] = set()

    def next(self, own: str) -> str:
        """Return the id of the next call; `own` is the model's, empty if it has none."""
        id = own if own and own not in self._used else f"{self._prefix}{len(self._used):02d}"
        self._used.add(id)
        return id


def named_event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event that is named after its type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), _encode(value))


def joined(parts: list[Part]) -> list[Part]:
    """Return the same parts with neighbours of one kind joined."""
    result: list[Part] = []
    for kind, group in groupby(parts, type):
        if kind in (Content, Reasoning, Arguments):
            result.append(kind("".join(part.text for part in group)))  # type: ignore[union-attr]
        else:
            result += group
    return result
