"""What a model's text consists of: what its reader is meant to read, what the model thought, and the tools that it calls."""

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """What the model thought before it answered."""

    text: str


class CallStart(NamedTuple):
    """The start of the next call of a tool."""

    name: str
    id: str = ""
    """The model's own id for it; most models have none."""


class Arguments(NamedTuple):
    """The next text of the last call's arguments; all of it together is a JSON object."""

    text: str


Part = Content | Reasoning | CallStart | Arguments


class AnswerParser(Protocol):
    """Splits one answer's text into parts while it arrives, in pieces of any length.

    The parts do not depend on how the text was cut, except that texts of one kind may come in several parts.
    """

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is still in its reasoning, after what has been pushed."""
        ...

    def push(self, text: str) -> list[Part]:
        """Return what the next text settles; what may be the start of a marker is held back."""
        ...

    def end(self) -> list[Part]:
        """Return what was held back: the answer has ended."""
        ...
