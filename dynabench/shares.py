"""How far calls in several processes are: a file holds the share of each that is done, and each writes its own.

If the file cannot be written, because the disk is full, nothing is known, and all goes on.
"""

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SHARE = struct.Struct("d")


class CallProgress(NamedTuple):
    """How far one call is, which writes it."""

    file: Path
    place: int
    """Of the call among those that are carried out."""

    def note(self, share: float) -> None:
        """Write how far the call is."""
        with contextlib.suppress(OSError), self.file.open("r+b") as file:
            file.seek(SHARE.size * self.place)
            file.write(SHARE.pack(share))

    def of(self, total: int, *, run: int = 0, runs: int = 1) -> Callable[[int], None]:
        """Return what takes the number of requests done, of one of several runs, and notes now and then how far that is."""
        stride, due = max(total // 100, 1), 1

        def progressed(done: int) -> None:
            nonlocal due
            if done >= due:
                due = done + stride
                self.note((run + done / total) / runs)

        return progressed


class Shares:
    """How far each of several calls is, for the process that waits for them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._num_calls = 0

    def begin(self, count: int) -> None:
        """Take note that so many calls are to be carried out, none of which has begun."""
        self._num_calls = count
        with contextlib.suppress(OSError):
            self._file.write_bytes(bytes(SHARE.size * count))

    def each(self) -> list[float]:
        """Return how far each call is."""
        try:
            known = self._file.read_bytes()
        except OSError:
            known = b""
        shares = [share for (share,) in SHARE.iter_unpack(known[: len(known) // SHARE.size * SHARE.size])]
        return shares + [0.0] * (self._num_calls - len(shares))

    def together(self) -> float:
        """Return how far all calls together are."""
        return sum(self.each()) / self._num_calls if self._num_calls else 0.0
