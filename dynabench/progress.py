"""How far a command is, while it simulates: in this process, or in several at once."""

import threading
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dynabench.interrupt import Interrupt
from dynabench.terminal import Terminal

MOVES_EVERY_S = 0.2
LINE_EVERY_S = 5.0


class Display:
    """A bar that moves on a terminal; elsewhere a line every few seconds, on stderr."""

    def __init__(self, what: str, unit: str, interrupt: Interrupt, console: Terminal) -> None:
        """Show how far the calls under this interrupt are.

        Args:
            what: is going on; it may be changed on the way.
            unit: what a call does one of, in the plural; it may be changed, too.
            interrupt: what the calls report to.
            console: where the bar is shown, if it is a terminal.
        """
        self.what = what
        self.unit, self._interrupt, self._console = unit, interrupt, console
        self._started = time.monotonic()
        self._bar = _bar(console) if console.is_terminal else None
        self._every_s = MOVES_EVERY_S if self._bar is not None else console.line_every_s or LINE_EVERY_S
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self.what, total=1.0)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print what is to stay on the screen."""
        self._console.say(f"{self._elapsed()}  {text}", indent=" " * 8)

    def line(self) -> str:
        """Say how far it is."""
        shares = self._interrupt.shares.each()
        text = f"{self.what}: {sum(share >= 1 for share in shares):,} of {len(shares):,} {self.unit}"
        num_begun = sum(0 < share < 1 for share in shares)
        return f"{text}, {num_begun} under way" if num_begun else text

    def show(self) -> None:
        """Show how far it is now."""
        share = self._interrupt.shares.together()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=self.line(), completed=share, refresh=True)
        else:
            self._console.report(f"{self._elapsed()}  {self.line()} ({share:.0%})")

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self.show()

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:4.0f} s"


def _bar(console: Terminal) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:.0f}%", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    )
