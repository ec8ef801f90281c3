"""What a format of calls is."""

from collections.abc import Sequence
from typing import Protocol

from serving.model.parsers.answer import ParsedAnswer, Script
from serving.model.parsers.schema_types import ToolTypes


class CallFormat(Protocol):
    """How models write calls."""

    @property
    def triggers(self) -> tuple[str, ...]:
        """The texts that may be the start of calls."""
        ...

    def read(self, answer: ParsedAnswer, types: ToolTypes) -> Script[None]:
        """Read calls, or what looked like their start; at least some text."""
        ...

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text in which a model makes these calls, of pairs of a name and arguments in JSON."""
        ...
