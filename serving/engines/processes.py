"""Processes that an engine starts: they live as long as the worker and end with it, however it ends.

Run as a program, this file is the reaper. It reads which processes there are, and when its input ends, as it does when the
worker is killed, it ends those that are left. vLLM's processes would not notice, and would keep their memory forever.
"""

import asyncio
import contextlib
import json
import multiprocessing.resource_tracker
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

POLL_S = 0.5
PROC = Path("/proc")
SHARED_MEMORY = re.compile(r" (/dev/shm/(?:psm_|sem\.|ucx_shm_)[^/ ]+)$", re.M)
"""Names in a process's maps that Python, semaphores and UCX chose. Anything else there may be the user's."""
MAX_EXIT_S = 5.0


class EngineProcesses:
    """Starts an engine and looks after its processes (on Linux)."""

    def __init__(self, name: str = "the engine", memory_argument: str = "") -> None:
        self._name = name
        self._memory_argument = memory_argument
        self._is_over = threading.Event()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._others: dict[int, int] = {}  # processes below ours that were there before the engine
        # Shared memory that the engine had after its start: in the end, its processes may be gone.
        self._mapped: set[str] = set()

    async def start(self, work: Callable[[], Any]) -> Any:
        """Run `work`, which starts the engine, in a thread that lives as long as the engine; return its result.

        Raises:
            EngineError: it does not start; the message names the cause and, for lack of memory, the remedy.
        """
        from serving.engines.engine_log import EngineLog, cause_of, remedy
        from serving.runtime.threads import in_thread
        from serving.worker.engine import EngineError

        if PROC.is_dir():
            self._others = descendants(os.getpid())
            command = [sys.executable, "-I", __file__]
            self._reaper = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)  # noqa: S603
            self._watching = asyncio.create_task(self._watch(self._reaper))
        # It is there before the engine's processes: its start ends the blocking of Ctrl-C that they inherit (`in_thread`).
        # It ends with them: shared memory is removed here, so it has no leak to complain of.
        multiprocessing.resource_tracker.ensure_running()
        engine_log = EngineLog()
        try:
            with engine_log.caught():
                made = await in_thread(work, until=self._is_over)
        except EngineError:
            raise
        except Exception as error:
            cause = cause_of(error, await asyncio.to_thread(engine_log.last)).rstrip(".")
            advice = remedy(cause, self._memory_argument)
            raise EngineError(f"{self._name} does not start: {cause}{advice}") from error
        if self._reaper is not None:
            self._mapped = await asyncio.to_thread(lambda: shared_memory(self._own()))
        return made

    async def close(self, stop: Callable[[], Any] | None = None) -> None:
        """Stop the engine, then remove what is left, including the shared memory of processes that it killed itself."""
        mapped = self._mapped | (shared_memory(self._own()) if self._reaper is not None else set())
        if stop is not None:
            from serving.runtime.threads import in_thread

            await in_thread(stop)
        self._is_over.set()
        if self._watching is not None and self._reaper is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            _tell(self._reaper, self._own())
            with contextlib.suppress(BrokenPipeError):
                assert self._reaper.stdin is not None
                self._reaper.stdin.close()
            await asyncio.to_thread(self._reaper.wait)
            remove_unmapped(mapped)
            with warnings.catch_warnings(action="ignore"):  # that the engine's tracker is gone
                multiprocessing.resource_tracker.ensure_running()  # for whoever uses shared memory next

    async def _watch(self, reaper: "subprocess.Popen[bytes]") -> None:
        told: dict[int, int] = {}
        while True:
            found = self._own()
            if found != told:
                told = found
                _tell(reaper, found)
            await asyncio.sleep(POLL_S)

    def _own(self) -> dict[int, int]:
        found = descendants(os.getpid())
        return {pid: started for pid, started in found.items() if self._others.get(pid) != started}


def _tell(reaper: "subprocess.Popen[bytes]", found: dict[int, int]) -> None:
    assert reaper.stdin is not None
    ours = {pid: started for pid, started in found.items() if pid != reaper.pid}
    with contextlib.suppress(
        BrokenPipeError
    ):  # someone ended the reaper: the safety net is gone, but no harm is done yet
        reaper.stdin.write(json.dumps(ours).encode() + b"\n")
        reaper.stdin.flush()


def descendants(pid: int) -> dict[int, int]:
    """Return the processes below one, with their start times (clock ticks since boot)."""
    children: dict[int, list[tuple[int, int]]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (facts := _facts(int(entry.name))) is not None:
            parent, started = facts
            children.setdefault(parent, []).append((int(entry.name), started))
    found: dict[int, int] = {}
    waiting = [pid]
    while waiting:
        for child, started in children.get(waiting.pop(), ()):
            found[child] = started
            waiting.append(child)
    return found


def _facts(pid: int) -> tuple[int, int] | None:
    """Return a process's parent and start time, None if it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19])


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that processes map."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # gone, or another user's
            found.update(SHARED_MEMORY.findall((PROC / str(pid) / "maps").read_text()))
    return found


def remove_unmapped(files: set[str]) -> None:
    """Remove shared memory that no process maps any more."""
    if not files:
        return
    used = shared_memory(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    for file in files - used:
        Path(file).unlink(missing_ok=True)


def reap(told: IO[bytes]) -> None:
    """Read the list of processes until the input ends, then end those that are left."""
    last = b"{}"
    for line in told:
        last = line
    # A number may belong to another process by now.
    left = {int(pid): started for pid, started in json.loads(last).items() if _started(int(pid)) == started}
    mapped = shared_memory(left)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + MAX_EXIT_S
    while mapped & shared_memory(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    remove_unmapped(mapped)


def _started(pid: int) -> int | None:
    facts = _facts(pid)
    return None if facts is None else facts[1]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reap(sys.stdin.buffer)
