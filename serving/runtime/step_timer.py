"""Waiting to a fraction of a millisecond: event loops count whole milliseconds, and a decode step takes six."""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


MONOTONIC, NONBLOCK, CLOEXEC = 1, 0o4000, 0o2000000


class StepTimer:
    """Waits for points in time: on Linux with a kernel timer, elsewhere and in virtual time with the loop's own."""

    def __init__(self, now: Callable[[], float], *, is_virtual: bool = False) -> None:
        """Take a timer of the running loop for points in time on a clock (s), which is the kernel's unless virtual."""
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._fired: asyncio.Future[None] | None = None
        self._fd = -1
        if sys.platform == "linux" and not is_virtual:
            self._libc = ctypes.CDLL(None, use_errno=True)
            self._fd = self._libc.timerfd_create(MONOTONIC, NONBLOCK | CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._on_fired)

    async def until(self, when: float) -> None:
        """Return at `when` (s); if that has passed, give other tasks a turn first."""
        delay = when - self._now()
        if self._fd < 0 or delay <= 0:
            await asyncio.sleep(max(delay, 0))
            return
        nanoseconds = max(int(delay * 1e9), 1)
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(*divmod(nanoseconds, 1_000_000_000)))
        self._fired = self._loop.create_future()
        self._libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None)
        await self._fired

    def close(self) -> None:
        """Release the timer."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it has been set again in the meantime
        if self._fired is not None and not self._fired.done():
            self._fired.set_result(None)
