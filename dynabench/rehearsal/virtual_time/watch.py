"""Ends code that computes without end at one instant of virtual time."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from dynabench.rehearsal.virtual_time.errors import StuckError

LOOKS_S = 5.0
"""How often is looked whether time has passed (s of CPU)."""
STUCK_S = 60.0
"""After so long without virtual time passing, a callback is ended (s of CPU)."""


@contextlib.contextmanager
def watched(now: Callable[[], float], tear: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """End this block with StuckError if `now` stands still for too long. Only a process's main thread can be watched.

    Servers catch whatever their handlers raise, so `tear` hears of it, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last_s, spent_s = now(), 0.0

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal last_s, spent_s
        last_s, spent_s = (last_s, spent_s + LOOKS_S) if now() == last_s else (now(), 0.0)
        if spent_s < STUCK_S:
            return
        where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        said = f"code runs without end: {STUCK_S:g} s of CPU, and time stands still, at {where}"
        if spent_s > 2 * STUCK_S:  # somebody catches whatever is raised
            sys.stderr.write(f"dynabench: {said}; it catches KeyboardInterrupt\n")
            sys.stderr.flush()
            signal.raise_signal(signal.SIGKILL)
        raise tear(StuckError(said))

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, LOOKS_S, LOOKS_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
