"""Ctrl-C and SIGTERM: whatever runs ends within a second, and keeps what it has if it can.

    signal --> the flag is raised: a file is gone, for all processes that work for us
               what asks for the flag ends at its next good moment: a simulation between two events
               all else ends where it stands, with InterruptError: at once here, half a second later in other processes

A second signal is obeyed at once everywhere. Unlike `serving.supervision.process.run_process` this needs no event loop.
Processes write their progress to a second file (`shares.py`).
"""

import _thread
import contextlib
import platform
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

from dynabench.shares import CallProgress, Shares

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask to end; the last comes from a terminal that is closed, unless `nohup` ignores it."""

TOGETHER_S = 0.1
"""Within which signals count as one: `timeout` sends its signal to the process, and then to the group."""
LOOK_EVERY_S = 0.1
PATIENCE_S = 0.5
"""How long a call in another process may take to notice the flag by itself."""


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function with its arguments, to be carried out here or in another process."""


class InterruptError(KeyboardInterrupt):
    """The user wants no more of what was running."""


class SecondInterruptError(KeyboardInterrupt):
    """The user asks again, and waits for nothing."""


class Flag(NamedTuple):
    """Whether to end, and where a call writes its progress, between processes of this host.

    The flag is raised when its file is gone: a full disk cannot prevent deleting a file.
    """

    file: Path
    host: str
    """Where the file is; elsewhere, on a cluster, nothing is known of it, and all goes on."""
    place: int = 0
    """Of the call among those that are carried out."""

    def is_raised(self) -> bool:
        """Return whether to end."""
        return not self.file.exists() and platform.node() == self.host

    def raise_(self) -> None:
        """Say that all is to end."""
        self.file.unlink(missing_ok=True)

    def among(self, args: tuple[Any, ...]) -> Iterator[Any]:
        """Yield a call's arguments with this flag, which has the call's place, instead of another."""
        return (self if isinstance(arg, Flag) else arg for arg in args)

    @contextlib.contextmanager
    def obeyed(self) -> Iterator[None]:
        """End this block where it stands, with InterruptError, if it goes on although the flag is raised.

        Only a process's main thread can be interrupted.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(LOOK_EVERY_S):
                if self.is_raised():
                    if not over.wait(PATIENCE_S):
                        _thread.interrupt_main(signal.SIGTERM)
                    return

        def end(number: int, frame: FrameType | None) -> None:
            if not over.is_set():
                raise InterruptError

        watching = threading.Thread(target=watch, daemon=True)
        with _handled(dict.fromkeys(ASKING, end)):
            watching.start()
            try:
                yield
            finally:
                over.set()
                watching.join()

    @property
    def progress(self) -> CallProgress:
        """How far the call is."""
        return CallProgress(self.file.with_name("shares"), self.place)


class Interrupt:
    """Whether the user asked to end; a file says so to processes that simulate for us, wherever they run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynabench-")
        self.flag = Flag(Path(self._folder.name) / "goes-on", platform.node())
        self.flag.file.touch()
        self.shares = Shares(self.flag.progress.file)
        self.is_asked = False
        self._asked_s = 0.0
        self._listeners: list[Callable[[], object]] = []
        self._handled = self.obeyed()

    def __enter__(self) -> Self:
        self._handled.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handled.__exit__(None, None, None)
        self._folder.cleanup()

    def obeyed(self) -> contextlib.AbstractContextManager[None]:
        """Let a first signal end this block where it stands again, within one of `noted`."""
        return _handled(dict.fromkeys(ASKING, self._on_signal))

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call a listener at each signal, instead of ending what runs; it answers the second one, too."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        if self.is_asked and now - self._asked_s <= TOGETHER_S:
            return
        is_second, self.is_asked, self._asked_s = self.is_asked, True, now
        self.flag.raise_()
        for listener in self._listeners:
            listener()
        if not self._listeners:
            raise SecondInterruptError if is_second else InterruptError


@contextlib.contextmanager
def noted() -> Iterator[None]:
    """Let no first signal end this block where it stands: it asks for the flag, and ends at its next good moment."""

    def noting(before: Any) -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(InterruptError):
                before(number, frame)

        return note

    is_main = threading.current_thread() is threading.main_thread()
    known = {number: signal.getsignal(number) for number in ASKING if is_main}
    with _handled({number: noting(before) for number, before in known.items() if callable(before)}):
        yield


@contextlib.contextmanager
def recognized() -> Iterator[None]:
    """Let Ctrl-C raise InterruptError in this block where Python itself handles it, which other code may raise, too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise InterruptError

    is_pythons = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _handled({signal.SIGINT: end} if is_pythons else {}):
        yield


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Handle signals in this way, unless somebody changes that meanwhile, or `nohup` ignores them.

    Only a process's main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    before = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if not (is_ignored and number == signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handlers[number]:
                signal.signal(number, handler)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Start processes to which the signals of a whole group, such as a terminal's Ctrl-C, never come: the parent ends them."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it unblocks signals when it starts, with the first process otherwise
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
