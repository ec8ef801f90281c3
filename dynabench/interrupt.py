"""Ctrl-C and SIGTERM, noted rather than obeyed: what runs ends at its next good moment and keeps what it has.

A second one is obeyed. Unlike `serving.supervision.process.run` this needs no event loop: simulations have none, and the
processes that run them learn of it from a file.
"""

import contextlib
import platform
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self


class InterruptError(Exception):
    """The user wants no more of what was running."""


class Flag(NamedTuple):
    """Whether to end, for other processes of this host: a file says so by not being there any more.

    One could not be made when the disk is full.
    """

    file: Path
    host: str
    """Where the file is; elsewhere, on a cluster, nothing is known of it, and all goes on."""

    def is_raised(self) -> bool:
        """Return whether to end."""
        return not self.file.exists() and platform.node() == self.host

    def raise_(self) -> None:
        """Say that all is to end."""
        self.file.unlink(missing_ok=True)


class Interrupt:
    """Whether the user asked to end; a file says so to processes that simulate for us, wherever they run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynabench-")
        self.flag = Flag(Path(self._folder.name) / "goes-on", platform.node())
        self.flag.file.touch()
        self.is_asked = False
        self._listeners: list[Callable[[], object]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._folder.cleanup()

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call a listener at each signal; it answers the second one, too."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_second, self.is_asked = self.is_asked, True
        self.flag.raise_()
        for listener in self._listeners:
            listener()
        if is_second and not self._listeners:
            raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Start processes to which a terminal's Ctrl-C, which reaches the whole group, is never delivered: the parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
