"""Where progress is shown: on a terminal, in a notebook's cell, or nowhere. Nothing is ever printed to stdout."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from dynabench.terminal import Terminal

EVERY_S = 0.5
"""How often a cell is updated."""


class Cell(Terminal):
    """A line below a notebook's cell, which is replaced as a command goes on, and is gone when it is done."""

    line_every_s = EVERY_S

    def __init__(self) -> None:
        super().__init__(quiet=True, force_jupyter=False)
        self._handle: Any = None

    def report(self, text: str) -> None:
        """Show how far a command is."""
        from IPython.display import display

        content = {"text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(content, raw=True)

    def end(self) -> None:
        """Take the line away."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


@contextlib.contextmanager
def terminal(progress: bool | None) -> Iterator[Terminal]:
    """Yield where progress is shown.

    Args:
        progress: whether to show it (None: on a terminal and in a notebook).
    """
    if progress is not False and is_notebook():
        cell = Cell()
        try:
            yield cell
        finally:
            cell.end()
    else:
        yield Terminal(stderr=True, quiet=not (sys.stderr.isatty() if progress is None else progress))


def is_notebook() -> bool:
    """Return whether a notebook's kernel runs this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
