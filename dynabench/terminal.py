"""The terminal of every command: it shows text as it is."""

import os
import sys
import textwrap
from typing import Any, ClassVar

from rich.console import Console
from rich.text import Text

from foundation.text import printable


class Terminal(Console):
    """A console that takes no text for markup, and lets none command the terminal.

    Nearly all that is printed holds a name or a message that somebody else chose, so no call has to remember to escape it.
    """

    line_every_s: ClassVar[float | None] = None
    """How often progress is reported where nothing moves, if not as seldom as in a pipe."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Let the command line end as with any output that nobody reads; rich would end it itself, with 1."""
        raise BrokenPipeError

    def say(self, text: str, *, indent: str = "", **options: Any) -> None:
        """Print prose, in a pipe, too, between words in lines no wider than this (80 in a pipe; COLUMNS changes it).

        Lines after the first begin with `indent`. A longer word, such as a path, is never broken.
        """
        self.verbatim("\n".join(_wrapped(part, self.width, indent) for part in text.split("\n")), **options)

    def verbatim(self, text: str, **options: Any) -> None:
        """Print what is read by programs or copied, such as a command or where the report is: a line at any width."""
        self.print(text, soft_wrap=True, **options)

    def item(self, text: str, *, indent: str = "", **options: Any) -> None:
        """Print a finding, or an item of a list: as prose where there is a width, on a terminal or by COLUMNS; else a line.

        A line in a pipe is for `grep` and the like.
        """
        if self.is_terminal or "COLUMNS" in os.environ:
            self.say(text, indent=indent, **options)
        else:
            self.verbatim(text, **options)

    def entry(self, name: str, text: str, *, width: int = 20) -> None:
        """Print an item of a list: a name, and beside it what it is."""
        self.item(f"{name:{width}} {text}", indent=" " * min(width + 1, self.width // 2))

    def report(self, text: str) -> None:
        """Say how far a command is, where nothing moves: on stderr; a quiet terminal says nothing."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string, control characters spelled out."""
        return super().render_str(printable(text), **options)


def _wrapped(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
