"""What other processes say while they rehearse seeds: lines of JSON in a pipe, which they have from their fork."""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from dynabench.rehearsal.checks.invariants import Violation

HEARS_EVERY_S = 0.2
MOST_BYTES = 600
"""Of what did not hold: JSON may need six bytes for each, and lines below PIPE_BUF (4096) are written at once."""


class Item(msgspec.Struct, frozen=True):
    """What is said of a seed: what did not hold, or what is tried next to make it smaller."""

    seed: int
    invariant: str = ""
    what: str = ""
    size: str = ""
    """Of the least that fails so far."""
    number: int = 0
    """Of the try; 0: none."""


class Teller(NamedTuple):
    """Whom a process tells."""

    descriptor: int

    def tell(self, item: Item) -> None:
        """Write it."""
        what = item.what.encode()[:MOST_BYTES].decode(errors="ignore")
        os.write(self.descriptor, msgspec.json.encode(msgspec.structs.replace(item, what=what)) + b"\n")


class News:
    """Calls back with what other processes say, in a thread, or when asked."""

    def __init__(
        self, on_violations: Callable[[int, Violation], object], on_try: Callable[[int, str, int], object]
    ) -> None:
        """Prepare.

        Args:
            on_violations: is told a seed, and the first that did not hold.
            on_try: is told a seed, the size of the least that fails so far, and the number of the next try.
        """
        self._on_violations, self._on_try = on_violations, on_try
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._rest = b""

    @property
    def teller(self) -> Teller:
        """What processes are given."""
        return Teller(self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.hear()
        os.close(self._read)
        os.close(self._write)

    def hear(self) -> None:
        """Call back with what has been said."""
        with self._lock:
            try:
                while said := os.read(self._read, 1 << 16):
                    *lines, self._rest = (self._rest + said).split(b"\n")
                    for line in lines:
                        self._call(msgspec.json.decode(line, type=Item))
            except BlockingIOError:
                return

    def _call(self, item: Item) -> None:
        if item.number:
            self._on_try(item.seed, item.size, item.number)
        else:
            self._on_violations(item.seed, Violation(item.invariant, item.what))

    def _listen(self) -> None:
        while not self._over.wait(HEARS_EVERY_S):
            self.hear()
