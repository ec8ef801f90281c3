"""A process that prepares requests that may take long: long texts and bodies, and chats, as templates are models' code.

    frontend                                 preparer
    prepare ------- Job(id, kind, body) ---> parse, render, encode, hash; a few jobs at a time, in threads
            <------ Answer(id, outcome) ----

If a job has no answer in time, its client gets an error and the process is killed; its other jobs are sent to the next
process. Each model has its own preparer, so a template that never ends delays only requests to its own model. In virtual
time there are no processes, and the event loop does the jobs.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KindName
from serving.frontend.prepared import Preprocessed
from serving.frontend.preparing.inline import InlinePreparer
from serving.frontend.preparing.messages import (
    LENGTH,
    NUM_JOBS,
    Body,
    Elsewhere,
    Outcome,
    PreparerModel,
    PreparerReady,
    PreparingJob,
    Refusal,
    decode_answer,
    framed,
)
from serving.frontend.reading import ReadingElsewhere
from serving.model.card import ModelCard
from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.runtime.world import world

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""How often a job is sent if its process ends, perhaps because of another job."""

LOAD_S = 60.0
"""How long loading the model may take."""

PIECE_BYTES = 256 * 1024


class _EndedError(Exception):
    """The process has ended."""


class Preparer:
    """One model's preparer; it starts when first needed."""

    def __init__(
        self,
        card: ModelCard,
        files: ModelFiles,
        *,
        timeout_s: float,
        is_strict: bool = False,
        reading: ReadingElsewhere | None = None,
    ) -> None:
        self._model = PreparerModel(card, files.contents, is_strict, reading)
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(NUM_JOBS)
        self._starting = asyncio.Lock()
        self._process: _Process | InlinePreparer | None = None
        self._is_closed = False
        self._jobs: set[asyncio.Task[Outcome]] = set()

    async def start(self) -> None:
        """Start the process, so that the first request does not wait for it.

        Raises:
            ModelError: the model's tokenizer or template cannot be used.
        """
        try:
            await self._running()
        except _EndedError as error:
            raise ModelError("the process that loads its tokenizer and chat template ended early") from error

    async def prepare(
        self, kind: KindName, body: Body, *, name: str | None = None, is_only: bool = True
    ) -> Preprocessed | Elsewhere:
        """Prepare a request.

        Args:
            kind: its kind.
            body: its body.
            name: a name of the model besides the one on its card.
            is_only: whether no other model is served, so that a request that names none is for this one.

        Raises:
            ApiError: it cannot be served, or cannot be prepared in time.
        """
        await self._slots.acquire()  # a client that leaves while it waits for a slot leaves nothing behind
        # A job in progress keeps its deadline when its client leaves: nobody else would notice that it never ends.
        job = asyncio.create_task(self._run(kind, body, name, is_only=is_only))
        self._jobs.add(job)
        job.add_done_callback(self._end)
        outcome = await asyncio.shield(job)
        if isinstance(outcome, Refusal):
            raise ApiError(outcome.status, outcome.message, code=outcome.code, param=outcome.param)
        return outcome

    async def close(self) -> None:
        """End the process; jobs end with an error."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()  # even while it loads, as others may be waiting for that
        async with self._starting:
            if self._process is not None:
                await self._process.close()
        await asyncio.gather(*self._jobs, return_exceptions=True)

    def _end(self, job: asyncio.Task[Outcome]) -> None:
        self._jobs.discard(job)
        self._slots.release()

    async def _run(self, kind: KindName, body: Body, name: str | None, *, is_only: bool) -> Outcome:
        for _ in range(ATTEMPTS):
            if self._is_closed:
                return Refusal(503, "the server shut down before the answer was complete")
            try:
                process = await self._running()
            except _EndedError:
                continue
            except (ModelError, OSError) as error:  # it has loaded before: we are short of memory, processes or files
                log.error("%s: cannot start a preparer: %s", self._model.card.name, error)
                return Refusal(503, "the tokenizer of this model cannot be started at the moment")
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await process.do(kind, body, name, is_only=is_only)
            except TimeoutError:
                log.warning("%s: a request was not prepared in time; ending its preparer", self._model.card.name)
                process.kill()
                return Refusal(
                    400,
                    f"the chat template and the tokenizer took longer than {self._timeout_s:g} s for this request",
                    "preparation_timeout",
                )
            except _EndedError:
                continue
        log.warning("%s: a request crashed its preparer %d times", self._model.card.name, ATTEMPTS)
        return Refusal(400, "the chat template or the tokenizer failed on this request")

    async def _running(self) -> "_Process | InlinePreparer":
        async with self._starting:
            if self._process is None or self._process.has_ended:
                if self._process is not None:
                    await self._process.close()
                self._process = InlinePreparer() if world().is_virtual else await _Process.launch()
                if self._is_closed:
                    self._process.kill()
                await self._process.load(self._model, LOAD_S)
            return self._process


class _Process:
    """A running preparer."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.has_ended = False
        self._process = process
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._writing = asyncio.Lock()
        self._ready: asyncio.Future[PreparerReady] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def launch(cls) -> "_Process":
        """Start a process, which waits for its model."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "serving.frontend.preparing.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=os.setpgrp,  # Ctrl-C reaches only us
        )
        return cls(process)

    async def load(self, model: PreparerModel, timeout_s: float) -> None:
        """Have it load the model; on any other outcome, end it.

        Raises:
            ModelError: it cannot load it.
            _EndedError: the process ended before.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(model)
                ready = await self._ready
        except TimeoutError:
            ready = PreparerReady(f"its tokenizer and chat template were not loaded within {timeout_s:g} s")
        except BaseException:
            self.kill()
            raise
        if ready.error:
            await self.close()
            raise ModelError(ready.error)

    async def do(self, kind: KindName, body: Body, name: str | None, *, is_only: bool) -> Outcome:
        """Do a job.

        Raises:
            _EndedError: the process ended before.
        """
        if self.has_ended:
            raise _EndedError
        id = next(self._ids)
        self._waiting[id] = asyncio.get_running_loop().create_future()
        try:
            await self._write(PreparingJob(id, kind, len(body), name, is_only), body)
            return await self._waiting[id]
        finally:
            del self._waiting[id]

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        self.has_ended = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self.kill()
        await self._process.wait()
        await asyncio.wait([self._reading])
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _write(self, message: msgspec.Struct, body: Body = b"") -> None:
        """Send a message and its body, in pieces, so that a large body is not copied at once.

        Raises:
            _EndedError: the process ended before.
        """
        stdin, rest = self._process.stdin, memoryview(body)
        assert stdin is not None
        try:
            async with self._writing:
                stdin.write(framed(message))
                for start in range(0, len(rest), PIECE_BYTES):
                    await stdin.drain()
                    stdin.write(rest[start : start + PIECE_BYTES])
                await stdin.drain()
        except ConnectionError as error:
            raise _EndedError from error

    async def _read(self) -> None:
        assert self._process.stdout is not None
        stdout = self._process.stdout

        async def message() -> bytes:
            (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
            return await stdout.readexactly(length)

        try:
            self._ready.set_result(msgspec.msgpack.decode(await message(), type=PreparerReady))
            while True:
                answer = decode_answer(await message())
                future = self._waiting.get(answer.id)
                if future is not None and not future.done():
                    future.set_result(answer.outcome)
        except asyncio.IncompleteReadError:
            pass
        except Exception:
            log.exception("a preparer sent an invalid answer; ending it")
        finally:
            self.kill()
            waiting: list[asyncio.Future[Any]] = [self._ready, *self._waiting.values()]
            for future in waiting:
                if not future.done():
                    future.set_exception(_EndedError())
            self._ready.exception()  # mark it retrieved: nobody may be waiting for it
