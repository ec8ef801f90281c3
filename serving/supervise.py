"""Groups of processes: started, watched, restarted and stopped together, with one log stream.

A child reads its standard input and ends when that does, so that even a killed parent leaves no process.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

SUPERVISED = "DYNABENCH_SUPERVISED"
SETTINGS = "DYNABENCH_SETTINGS"
"""Holds a child's settings as JSON: arguments could be read by every user of the host, and there are keys among them."""

COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
STABLE_S = 30.0
"""A process that lived so long starts again without delay."""


@dataclass(frozen=True)
class Program:
    """A process of a group."""

    name: str
    arguments: Sequence[str]
    """Of this Python: `-m module flags`."""
    settings: Sequence[Any] = ()
    """Settings (dataclasses, lists), in the order in which the module takes them."""
    environment: dict[str, str] = field(default_factory=dict)
    file_descriptors: tuple[int, ...] = ()


class Group:
    """Processes that belong together."""

    def __init__(self, *, restart: bool, say: Callable[[str], None] | None = None) -> None:
        """Make an empty group.

        Args:
            restart: start a process again when it ends by itself.
            say: is given the log lines, with names in front (default: the children write to our standard error).
        """
        self._restart = restart
        self._say = say
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def start(self, program: Program) -> None:
        """Start a process, and keep it if the group restarts."""
        await self._spawn(program)
        keeper = asyncio.create_task(self._keep(program, COLOURS[len(self._keepers) % len(COLOURS)]))
        self._keepers.append(keeper)

    @property
    def dead(self) -> list[str]:
        """Names of processes that have ended."""
        return [name for name, process in self._processes.items() if process.returncode is not None]

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: process.pid for name, process in self._processes.items() if process.returncode is None}

    async def stop(self, timeout_s: float) -> None:
        """Ask all to end, in reverse order of their start, and kill what has not ended in time."""
        self._is_stopping = True
        live = [process for process in self._processes.values() if process.returncode is None]
        for process in reversed(live):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        if live:
            await asyncio.wait([asyncio.ensure_future(process.wait()) for process in live], timeout=timeout_s)
        for process in live:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _spawn(self, program: Program) -> asyncio.subprocess.Process:
        settings = json.dumps([_plain(part) for part in program.settings], default=str)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *program.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if self._say else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT if self._say else None,
            env=os.environ | program.environment | {SUPERVISED: "1", SETTINGS: settings, "PYTHONUNBUFFERED": "1"},
            pass_fds=program.file_descriptors,
            # Ctrl-C reaches us alone, and we stop the others in order. A session of its own would do that too, but Linux
            # shares the CPU out by sessions, and an engine whose threads spin would starve its own process's others.
            preexec_fn=os.setpgrp,
        )
        self._processes[program.name] = process
        return process

    async def _keep(self, program: Program, colour: int) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            process, started = self._processes[program.name], loop.time()
            await self._relay(process, program.name, colour)
            code = await process.wait()
            if self._is_stopping or not self._restart:
                return
            failures = 0 if loop.time() - started > STABLE_S else failures + 1
            delay = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            if self._say is not None:
                self._say(_labelled(program.name, colour, f"ended with code {code}; starting it again in {delay:g} s"))
            await asyncio.sleep(delay)
            await self._spawn(program)

    async def _relay(self, process: asyncio.subprocess.Process, name: str, colour: int) -> None:
        if process.stdout is None or self._say is None:
            return
        while line := await process.stdout.readline():
            self._say(_labelled(name, colour, line.decode(errors="replace").rstrip("\n")))


def _plain(part: Any) -> Any:
    return dataclasses.asdict(part) if dataclasses.is_dataclass(part) and not isinstance(part, type) else part


def _labelled(name: str, colour: int, line: str) -> str:
    label = f"{name:>10}"
    return f"\x1b[{colour}m{label}\x1b[0m {line}" if sys.stdout.isatty() else f"{label} {line}"


async def end_with_parent(stopping: asyncio.Event) -> None:
    """In a supervised process: set an event once the parent is gone."""
    if os.environ.get(SUPERVISED) != "1":
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    stopping.set()
