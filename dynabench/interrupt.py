"""Ctrl-C and SIGTERM, noted rather than obeyed: what runs ends at its next good moment and keeps what it has.

A second one is obeyed. Unlike `serving.supervision.process.run` this needs no event loop: simulations have none, and the
processes that run them learn of it from a file. By another file they say how far they are: a share for each call.
"""

import contextlib
import platform
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

SHARE = struct.Struct("d")
ASKING = (signal.SIGINT, signal.SIGTERM)
"""Signals that ask to end."""


TOGETHER_S = 0.1
"""Within which signals count as one: `timeout` sends its signal to the process, and then to the group."""


class InterruptError(Exception):
    """The user wants no more of what was running."""


class Flag(NamedTuple):
    """Whether to end, and how far a call is, between processes of this host.

    A file says that all is to end by not being there any more.

    One could not be made when the disk is full.
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

    @property
    def shares(self) -> Path:
        """The file that holds how far each call is."""
        return self.file.with_name("shares")

    def note(self, share: float) -> None:
        """Say how far the call is, where anybody can learn of it."""
        with contextlib.suppress(OSError), self.shares.open("r+b") as file:
            file.seek(SHARE.size * self.place)
            file.write(SHARE.pack(share))

    def on_progress(self, total: int, *, run: int = 0, runs: int = 1) -> Callable[[int], None]:
        """Return what takes the number of requests done, of one of several runs, and says now and then how far that is."""
        stride, due = max(total // 100, 1), 1

        def progressed(done: int) -> None:
            nonlocal due
            if done >= due:
                due = done + stride
                self.note((run + done / total) / runs)

        return progressed


class Interrupt:
    """Whether the user asked to end; a file says so to processes that simulate for us, wherever they run."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynabench-")
        self.flag = Flag(Path(self._folder.name) / "goes-on", platform.node())
        self.flag.file.touch()
        self._num_calls = 0
        self.is_asked = False
        self._asked_s = 0.0
        self._listeners: list[Callable[[], object]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in ASKING}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._folder.cleanup()

    def begin(self, count: int) -> None:
        """Take note that so many calls are to be carried out, none of which has begun."""
        self._num_calls = count
        with contextlib.suppress(OSError):  # a full disk: nothing is known of how far they are
            self.flag.shares.write_bytes(bytes(SHARE.size * count))

    def shares(self) -> list[float]:
        """Return how far each call is."""
        try:
            known = self.flag.shares.read_bytes()
        except OSError:
            known = b""
        shares = [share for (share,) in SHARE.iter_unpack(known[: len(known) // SHARE.size * SHARE.size])]
        return shares + [0.0] * (self._num_calls - len(shares))

    def share(self) -> float:
        """Return how far all calls together are."""
        return sum(self.shares()) / self._num_calls if self._num_calls else 0.0

    @contextlib.contextmanager
    def heard_by(self, listener: Callable[[], object]) -> Iterator[None]:
        """Call a listener at each signal; it answers the second one, too."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        is_second = self.is_asked and now - self._asked_s > TOGETHER_S
        if not self.is_asked:
            self.is_asked, self._asked_s = True, now
        self.flag.raise_()
        for listener in self._listeners:
            listener()
        if is_second and not self._listeners:
            raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Start processes to which the signals of a whole group, such as a terminal's Ctrl-C, never come: the parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
