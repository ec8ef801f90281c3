"""A log that never waits for its reader: a paused terminal, a pipe that nobody reads, or a closed pipe."""

import contextlib
import os
import select
import threading

MAX_PENDING = 1 << 20
"""Characters that may wait for the reader. Further lines are counted and left out."""


class LogWriter:
    """Writes lines to a file descriptor from a separate thread.

    It bypasses `sys.stdout`: a thread that hangs in there holds a lock that Python needs to exit.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._news = threading.Condition()
        self._lines: list[str] = []
        self._num_pending = 0
        self._num_left_out = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def say(self, line: str) -> None:
        """Write a line soon, or leave it out if too much is waiting."""
        with self._news:
            if self._num_pending + len(line) > MAX_PENDING:
                self._num_left_out += 1
                return
            self._note_gap()
            self._lines.append(line + "\n")
            self._num_pending += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._news.notify()

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what is waiting, unless its reader takes longer than this."""
        with self._news:
            self._is_closed = True
            self._news.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._is_closed)
                if not self._lines:
                    return
                text, self._lines = "".join(self._lines), []
            with contextlib.suppress(OSError):  # nobody reads this any more, or the disk is full: the group continues
                self._write(text.encode(errors="replace"))
            with self._news:
                self._num_pending = sum(map(len, self._lines))
                self._note_gap()

    def _note_gap(self) -> None:
        if self._num_left_out:
            self._lines.append(f"({self._num_left_out} lines were left out here: the reader was too slow)\n")
            self._num_left_out = 0

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program made our terminal non-blocking
                select.select([], [self._descriptor], [])
