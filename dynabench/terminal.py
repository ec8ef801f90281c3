"""The terminal of every command: it shows text as it is."""

from typing import Any

from rich.console import Console
from rich.text import Text

from foundation.text import printable


class Terminal(Console):
    """A console that takes no text for markup, and lets none command the terminal.

    Nearly all that is printed holds a name or a message that somebody else chose, so no call has to remember to escape it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Let the command line end as with any output that nobody reads; rich would end it itself, with 1."""
        raise BrokenPipeError

    def say(self, text: str, **options: Any) -> None:
        """Print a sentence: a line in a pipe, for other programs; on a terminal as many as its width makes of it."""
        self.print(text, soft_wrap=not self.is_terminal, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string, control characters spelled out."""
        return super().render_str(printable(text), **options)
