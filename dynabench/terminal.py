"""The terminal of every command: it shows text as it is."""

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

    def say(self, text: str, **options: Any) -> None:
        """Print a sentence: a line in a pipe, for other programs; on a terminal as many as its width makes of it."""
        self.print(text, soft_wrap=not self.is_terminal, **options)

    def fact(self, text: str, indent: str = "") -> None:
        """Print what was run, and what to know of it: longer than a line, and for readers only, so it is wrapped in a pipe, too."""
        self.print(
            textwrap.fill(text, self.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False),
            soft_wrap=True,
        )

    def report(self, text: str) -> None:
        """Say how far a command is, where nothing moves: on stderr; a quiet terminal says nothing."""
        if not self.quiet:
            print(printable(text), file=sys.stderr, flush=True)

    def entry(self, name: str, text: str, *, width: int = 20) -> None:
        """Print a line of a list: a name and what it is; on a terminal, in as many lines as it takes, between words."""
        line = f"{name:{width}} {text}"
        if self.is_terminal:
            beside = " " * min(width + 1, self.width // 2)
            line = textwrap.fill(
                line, self.width, subsequent_indent=beside, break_long_words=False, break_on_hyphens=False
            )
        self.print(line, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string, control characters spelled out."""
        return super().render_str(printable(text), **options)
