"""A process with the scheduler of an installed engine, asked over two pipes."""

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dynabench.deployment.core import CoreConfig
from dynabench.installed.compared import Release, refuse_unknown
from foundation.errors import UserError
from mocker.config import EngineType
from mocker.installed.scheduler import Asked, InstalledScheduler, NewScheduler, Scheduled, Updated

TITLES: dict[EngineType, str] = {"vllm": "vLLM", "sglang": "SGLang"}
"""Engines whose schedulers can be run. Each has a program, `*_program.py`."""
START_S = 300.0
"""How long a process may take to import an engine (s)."""
PATIENCE_S = 10.0
"""How long a process may take to end once its pipe is closed."""
T = TypeVar("T")


class Failed(msgspec.Struct):
    """What an installed scheduler raised."""

    error: str


class SchedulerProcess:
    """The process, and the engines in it."""

    def __init__(self, python: str, engine: EngineType = "vllm") -> None:
        """Start it; `close` ends it.

        Raises:
            UserError: the Python cannot be run, or it does not have that engine.
        """
        if engine not in TITLES:
            raise UserError(
                f"no installed scheduler of engine_type {engine} can be run yet; expected {' or '.join(TITLES)}"
            )
        self.python = python
        self.engine = engine
        program = Path(__file__).with_name(f"{engine}_program.py")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        read_fd, their_write = os.pipe()
        their_read, write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 (the program is ours)
                [python, program, str(their_read), str(their_write)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=(their_read, their_write),
            )
        except OSError as error:
            os.close(read_fd)
            os.close(write_fd)
            self._log.close()
            raise UserError(f"{python} cannot be run: {error.strerror}") from error
        finally:
            os.close(their_read)
            os.close(their_write)
        self._answers, self._asked = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            self.release = Release(engine, *self._version())
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, kind: type[T], name: str, engine: int = 0, argument: Any = None) -> T:
        """Ask for something and return the answer.

        Raises:
            UserError: the scheduler failed, or its process ended.
        """
        self._send(name, engine, argument)
        return self._answer(kind)

    def _send(self, name: str, engine: int = 0, argument: Any = None) -> None:
        frame = self._encode((name, engine, argument))
        with suppress(BrokenPipeError):  # it has ended: then no answer comes
            self._asked.write(len(frame).to_bytes(4, "little") + frame)
            self._asked.flush()

    def _answer(self, kind: type[T]) -> T:
        head = self._answers.read(4)
        length = int.from_bytes(head, "little")
        answer = self._answers.read(length)
        if len(head) < 4 or len(answer) < length:
            title = TITLES[self.engine]
            raise UserError(
                f"the scheduler of {self.python} ended: {self._last_line()}; expected a Python that has {title} "
                "(--engine-python)"
            )
        if answer[:1] == b"\x81":  # a map of one entry: nothing else is
            raise UserError(
                f"the scheduler of {self.python} failed: {msgspec.msgpack.decode(answer, type=Failed).error}"
            )
        return msgspec.msgpack.decode(answer, type=kind)

    def _version(self) -> tuple[str, str]:
        """Ask which release it is; a program that is no Python may never answer."""
        self._send("version")
        answers = select.poll()  # unlike select, it takes descriptors above 1023
        answers.register(self._answers, select.POLLIN)
        if not answers.poll(START_S * 1e3):
            self._process.kill()
            raise UserError(
                f"{self.python} did not answer within {START_S:g} s; expected a Python that has {TITLES[self.engine]} (--engine-python)"
            )
        return self._answer(tuple[str, str])

    def _last_line(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.returncode}")

    def new_scheduler(self, settings: dict[str, Any]) -> InstalledScheduler:
        """See `NewScheduler`."""
        return RemoteScheduler(self, self.ask(int, "new", argument=settings))

    def forget(self) -> None:
        """End the schedulers that were made so far, which nobody needs any more."""
        self.ask(bool, "forget")

    def close(self) -> None:
        """End it."""
        for pipe in (self._asked, self._answers):
            with suppress(BrokenPipeError):
                pipe.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class RemoteScheduler:
    """One engine's scheduler in that process: an `InstalledScheduler`."""

    def __init__(self, process: SchedulerProcess, engine: int) -> None:
        self._process = process
        self._engine = engine

    def add(self, asked: Asked) -> int:
        """Queue a request; return the most output tokens that it is allowed."""
        return self._process.ask(int, "add", self._engine, asked)

    def abort(self, number: int) -> int:
        """Remove a request, or let it end with its next token (SGLang); return how many blocks are free."""
        return self._process.ask(int, "abort", self._engine, number)

    def schedule(self) -> Scheduled:
        """Close a batch."""
        return self._process.ask(Scheduled, "schedule", self._engine)

    def update(self, accepted: list[tuple[int, int]]) -> Updated:
        """End the oldest batch."""
        return self._process.ask(Updated, "update", self._engine, accepted)

    def reset(self) -> bool:
        """Forget all cached blocks, or return False if any is in use."""
        return self._process.ask(bool, "reset", self._engine)


@contextmanager
def schedulers_of(config: CoreConfig) -> Iterator[NewScheduler | None]:
    """Run the schedulers of an installed engine for a while, if they are to decide; else there are none.

    Raises:
        UserError: that engine cannot be run, or its scheduler was never compared with ours.
    """
    if config.engine_core == "mocker":
        yield None
        return
    with scheduler_process(config.engine_python, config.engine_core) as process:
        refuse_unknown(process.release, process.python)
        yield process.new_scheduler


@contextmanager
def scheduler_process(python: str | None, engine: EngineType = "vllm") -> Iterator[SchedulerProcess]:
    """Run the schedulers of an environment's engine for a while, given its Python (None: this one)."""
    process = SchedulerProcess(python or sys.executable, engine)
    try:
        yield process
    finally:
        process.close()
