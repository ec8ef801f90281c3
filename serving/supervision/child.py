"""A process of a group: its pipes, its log, and what it reports."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import IO, Protocol

READY = b"ready"
"""Starts the first line of a report that a process is ready; the rest is the name by which others know it."""

STATUS_BYTES = 4096


class Process(Protocol):
    """A process as its parent sees it: asyncio's, or one that is simulated."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code."""

    def send_signal(self, signal: int) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """End it at once."""


class Started(Protocol):
    """A process that a group has started: a `Child`, or one that is simulated."""

    last_line: str
    """The last line of its log."""

    @property
    def process(self) -> Process:
        """The process."""

    @property
    def log(self) -> IO[bytes] | None:
        """Its output, unless it is nobody's or our own."""

    @property
    def is_ready(self) -> bool:
        """Whether it has reported that it is ready."""

    @property
    def cause(self) -> str:
        """Why it ended."""

    def listen(self, on_ready: Callable[[str], None]) -> None:
        """Call back with the name by which others know it once it reports that it is ready."""

    def close(self) -> None:
        """Release what its parent keeps of it."""


class Child:
    """A process, its log, and what it reported."""

    def __init__(
        self,
        process: Process,
        status: IO[bytes],
        log: IO[bytes] | None,
        pipes: contextlib.ExitStack,
    ) -> None:
        self.process = process
        self.log = log
        self.last_line = ""
        self._status = status
        self._pipes = pipes
        self._reported = b""
        self._is_over = False
        os.set_blocking(status.fileno(), False)

    def listen(self, on_ready: Callable[[str], None]) -> None:
        """Call back once it reports that it is ready."""
        loop, descriptor = asyncio.get_running_loop(), self._status.fileno()

        def hear() -> None:
            if self.is_ready:
                on_ready(self._reported.partition(b"\n")[0].removeprefix(READY).decode(errors="replace").strip())
            if self.is_ready or self._is_over:
                loop.remove_reader(descriptor)

        loop.add_reader(descriptor, hear)
        self._pipes.callback(loop.remove_reader, descriptor)  # runs before the pipe is closed: last in, first out

    @property
    def is_ready(self) -> bool:
        """Whether it has reported that it is ready."""
        first, end, _ = self._read_report().partition(b"\n")
        return bool(end) and first.startswith(READY)

    @property
    def cause(self) -> str:
        """Why it ended."""
        report = self._read_report()
        reported = (report.partition(b"\n")[2] if self.is_ready else report).decode(errors="replace").strip()
        code = self.process.returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return reported or (f"{how}; its last line was: {self.last_line}" if self.last_line else how)

    def close(self) -> None:
        """Read what is left of its report, and close its pipes."""
        self._read_report()
        self._pipes.close()

    def _read_report(self) -> bytes:
        """Return its report; a pipe has room for all that a process may report, so nobody needs to read it earlier."""
        if not self._status.closed:
            data = self._status.read(STATUS_BYTES)
            self._is_over = data == b""
            self._reported = (self._reported + (data or b""))[:STATUS_BYTES]
        return self._reported


def pipe(ends: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    """Make a pipe whose ends are closed with the rest."""
    reading, writing = os.pipe()
    return (
        ends.enter_context(os.fdopen(reading, "rb", buffering=0)),
        ends.enter_context(os.fdopen(writing, "wb", buffering=0)),
    )
