"""Groups of processes: started, watched, restarted and stopped together, with one log stream.

A child reads its standard input and ends when that does, so that even a killed parent leaves no process behind. Over a
separate pipe it reports that it is ready, or why it is ending:

    starting --ready--> running --ends--> starting again, after a pause
        |                  |
        |                  +--`end`--> draining --ends--> forgotten
        +--ends with USAGE_ERROR, or for the MAX_STARTS-th time--> the whole group has failed, unless the program is retried
"""

import asyncio
import codecs
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

from foundation.exit_codes import USAGE_ERROR
from serving.runtime.stopping import cancel_all, until_stopped
from serving.supervision.child import Child, Started, pipe

SUPERVISED = "DYNABENCH_SUPERVISED"
SETTINGS = "DYNABENCH_SETTINGS"
"""A child's settings as JSON. Every user of the host could read arguments, and the settings include keys."""

STATUS_FD = "DYNABENCH_STATUS_FD"
"""The descriptor on which a child reports."""

MAX_STARTS = 3
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
STABLE_S = 30.0
"""A process that lived this long is restarted without delay."""

LINE_CHARACTERS = 16 * 1024
"""Longer lines are split into several."""

HURRY_S = 10.0
"""How long a process may take to end after the second request."""

RELAY_S = 0.5
"""How long the rest of a log may take once its process has ended: processes below it may hold the pipe open."""


class GroupError(Exception):
    """A process of a group that cannot run; the message names it and says why."""


@dataclass(frozen=True)
class Program:
    """A process of a group."""

    name: str
    arguments: Sequence[str]
    """Arguments of this Python: `-m module flags`."""
    settings: Sequence[Any] = ()
    """Settings (dataclasses, lists), in the order in which the module expects them."""
    environment: dict[str, str] = field(default_factory=dict)
    file_descriptors: tuple[int, ...] = ()
    is_needed_by_others: bool = False
    """Whether it is asked to end only after all others have ended."""
    is_retried: bool = False
    """Whether it is always restarted, even in a group that does not restart; it never makes the group fail."""


class ProcessReady(NamedTuple):
    """A process is ready and does its work from now on."""

    name: str
    known_as: str
    """The name by which others know it, as it reported."""


class ProcessEnded(NamedTuple):
    """A process has ended without being asked to end."""

    name: str
    was_ready: bool
    is_kept: bool
    """Whether it is restarted."""


Event = ProcessReady | ProcessEnded

Launch = Callable[[Program, bool], Awaitable[Started]]
"""Starts a process; the flag says whether its parent reads its log. It may raise OSError."""


class ProcessGroup:
    """Processes that belong together; leaving the `async with` block ends the remaining ones at once."""

    def __init__(
        self,
        *,
        restart: bool,
        say: Callable[[str], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        launch: Launch | None = None,
    ) -> None:
        """Create an empty group.

        Args:
            restart: whether to restart a process that ends unasked.
            say: is called with the log lines, prefixed with names (default: the children write to our standard error).
            on_event: is called when a process becomes ready, or ends unasked.
            launch: starts a process (default: as a child of this one).
        """
        self._restart = restart
        self._say = say
        self._on_event = on_event or (lambda _: None)
        self._launch = launch or _launch
        self._children: dict[str, Started] = {}
        self._keepers: dict[asyncio.Task[None], Program] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        """By name: set once a process was asked to end and will not be restarted."""
        self._stopping = asyncio.Event()
        self._failure: str | None = None
        self._failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0)

    async def start(self, *programs: Program) -> None:
        """Start processes, and keep them if the group restarts."""
        for program in programs:
            self._leaving[program.name] = asyncio.Event()
            try:
                child = await self._spawn(program)
            except OSError:
                del self._leaving[program.name]
                raise
            keeper = asyncio.create_task(self._keep(program, child, COLOURS[len(self._keepers) % len(COLOURS)]))
            self._keepers[keeper] = program

    async def end(self, name: str, timeout_s: float) -> None:
        """Ask one process to end; once it has, forget it and return.

        After the time is over, it is asked to end at once, and killed `HURRY_S` later. If the caller is cancelled, the
        process continues to end.
        """
        keeper = next(keeper for keeper, program in self._keepers.items() if program.name == name)
        self._leaving[name].set()
        self._signal(signal.SIGTERM, [name])
        done, _ = await asyncio.wait([keeper], timeout=timeout_s)
        if not done:
            await self._hurry([name], keeper)
        del self._keepers[keeper], self._children[name], self._leaving[name]

    @property
    def dead(self) -> list[str]:
        """Names of processes that have ended, except for those that are retried."""
        retried = {program.name for program in self._keepers.values() if program.is_retried}
        ended = [name for name, child in self._children.items() if child.process.returncode is not None]
        return [name for name in ended if name not in retried]

    @property
    def processes(self) -> dict[str, int]:
        """Process ids by name."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.returncode is None}

    def returncode(self, name: str) -> int | None:
        """Return the exit code of a process, or none while it runs."""
        return self._children[name].process.returncode

    def cause(self, name: str) -> str:
        """Return why a process ended, in its own words if it reported any."""
        return self._children[name].cause

    async def wait(self, stopping: asyncio.Event) -> None:
        """Wait until an event is set.

        Raises:
            GroupError: a process failed for good before that.
        """
        await until_stopped(stopping, self._failed.wait())
        if self._failure is not None and not stopping.is_set():
            raise GroupError(self._failure)

    async def stop(self, timeout_s: float) -> None:
        """Ask all to end, in reverse order of their start, those that others need last; return once all have ended.

        After that time, or if the caller is cancelled, they are asked to end at once, and killed `HURRY_S` later.
        """
        self._stopping.set()
        leaving = {name for name, event in self._leaving.items() if event.is_set()}
        for event in self._leaving.values():
            event.set()
        ended = asyncio.ensure_future(asyncio.gather(*self._keepers, return_exceptions=True))
        try:
            await self._ask(timeout_s, leaving)
        finally:
            await self._hurry(self._children, ended)

    async def _hurry(self, names: Collection[str], ended: asyncio.Future[Any]) -> None:
        try:
            self._signal(signal.SIGINT, names)  # not SIGTERM: two equal signals at once may arrive as one
            await asyncio.wait([ended], timeout=HURRY_S)
        finally:
            self._signal(signal.SIGKILL, names)
            await ended

    async def _ask(self, timeout_s: float, leaving: Container[str]) -> None:
        """Ask all to end except those that are already ending: a second signal would end them at once."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        for is_needed in (False, True):
            asked = {
                keeper: program.name
                for keeper, program in self._keepers.items()
                if program.is_needed_by_others is is_needed
            }
            self._signal(signal.SIGTERM, [name for name in asked.values() if name not in leaving])
            if asked:
                await asyncio.wait(asked, timeout=max(deadline - asyncio.get_running_loop().time(), 0))

    def _signal(self, number: signal.Signals, names: Container[str]) -> None:
        for name, child in reversed(self._children.items()):
            if name in names and child.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    async def _spawn(self, program: Program) -> Started:
        child = self._children[program.name] = await self._launch(program, self._say is not None)
        child.listen(lambda known_as: self._on_event(ProcessReady(program.name, known_as)))
        if self._leaving[program.name].is_set() or self._stopping.is_set():  # while it was being started
            child.process.kill()
        return child

    async def _keep(self, program: Program, child: Started, colour: int) -> None:
        loop, leaving = asyncio.get_running_loop(), self._leaving[program.name]
        is_kept = self._restart or program.is_retried
        failures = num_starts = 0
        was_ready = False
        while True:
            started = loop.time()
            code = await self._watch(child, program.name, colour)
            was_ready = was_ready or child.is_ready
            if leaving.is_set() or self._stopping.is_set():
                return
            self._on_event(ProcessEnded(program.name, child.is_ready, is_kept))
            if not is_kept:
                return
            num_starts += 1
            if not was_ready and not program.is_retried and (code == USAGE_ERROR or num_starts == MAX_STARTS):
                self._failure = self._failure or f"{program.name} does not start: {child.cause}"
                self._failed.set()
                return
            failures = 0 if loop.time() - started > STABLE_S else failures + 1
            why, again = f"ended with code {code}", None
            if program.is_retried and not child.is_ready:
                why = f"does not start: {child.cause}"
            while again is None:
                delay = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
                self._note(program.name, colour, f"{why}; restarting it in {delay:g} s")
                if await _is_set_within(leaving, delay):
                    return
                try:
                    again = await self._spawn(program)
                except OSError as error:  # the host lacks files, memory or processes
                    why, failures = f"could not be started ({error.strerror})", failures + 1
            child = again

    def _note(self, name: str, colour: int, text: str) -> None:
        if self._say is not None:
            self._say(_labelled(name, colour, text))

    async def _watch(self, child: Started, name: str, colour: int) -> int:
        """Pass on a process's log until it ends; return its exit code."""
        relaying = asyncio.create_task(self._relay(child, name, colour))
        try:
            code = await child.process.wait()
            await asyncio.wait([relaying], timeout=RELAY_S)
        finally:
            await cancel_all(relaying)
            child.close()
        return code

    async def _relay(self, child: Started, name: str, colour: int) -> None:
        if child.log is None or self._say is None:
            return
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), child.log)
        try:
            async for line in _lines(reader):
                child.last_line = line.strip() or child.last_line
                self._say(_labelled(name, colour, line))
        finally:
            transport.close()


async def _launch(program: Program, is_read: bool) -> Child:
    settings = json.dumps([_plain(part) for part in program.settings], default=str)
    # Pipes of our own: asyncio's would keep `wait` from returning while a process below the child holds one open.
    with contextlib.ExitStack() as ends:
        lifeline, _ = pipe(ends)  # we never write: the child's read ends when we are gone
        status, theirs = pipe(ends)
        log, output = pipe(ends) if is_read else (None, None)
        facts = {SUPERVISED: "1", SETTINGS: settings, STATUS_FD: str(theirs.fileno()), "PYTHONUNBUFFERED": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *program.arguments,
            stdin=lifeline,
            stdout=output or asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT if output else None,
            env=os.environ | program.environment | facts,
            pass_fds=(*program.file_descriptors, theirs.fileno()),
            # Ctrl-C reaches only us, and we stop the others in order. A separate session would do that too, but
            # Linux divides the CPU by session, and an engine's spinning threads would starve its others.
            preexec_fn=os.setpgrp,
        )
        for end in (lifeline, theirs, output):
            if end is not None:
                end.close()
        return Child(process, status, log, ends.pop_all())


async def _is_set_within(event: asyncio.Event, delay_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await event.wait()
    return event.is_set()


def _plain(part: Any) -> Any:
    return dataclasses.asdict(part) if dataclasses.is_dataclass(part) and not isinstance(part, type) else part


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield what comes line by line, long lines in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending, is_over = "", False
    while not is_over:
        data = await reader.read(LINE_CHARACTERS)
        is_over = not data
        *lines, pending = (pending + decoder.decode(data, final=is_over)).split("\n")
        if pending and (is_over or len(pending) >= LINE_CHARACTERS):
            lines, pending = [*lines, pending], ""
        for line in lines:
            for start in range(0, len(line) or 1, LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]


def _labelled(name: str, colour: int, line: str) -> str:
    label = f"{name:>10}"
    return f"\x1b[{colour}m{label}\x1b[0m {line}" if sys.stdout.isatty() else f"{label} {line}"
