"""What a model's text consists of: what its reader is meant to read, what the model thought, and the tools that it calls."""

from typing import NamedTuple


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
