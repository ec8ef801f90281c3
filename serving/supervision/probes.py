"""A cluster's HTTP probes of a process: `/live`, whether it answers at all, and `/health`, whether it does its work.

    starting --report_ready--> healthy --is asked to end--> draining
      503                        200                          503

A process answers at the port in DYN_SYSTEM_PORT (Dynamo's variable). Without one it does not listen. A process that one
of our parents supervises does not listen either: it reports to the parent.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator

from serving.runtime.ports import RuntimeUnavailableError
from serving.supervision.child import READY, STATUS_BYTES
from serving.supervision.group import STATUS_FD, SUPERVISED

PORT = "DYN_SYSTEM_PORT"
REQUEST_S = 5.0
"""How long a request may take to arrive."""

MAX_CALLERS = 64
REASONS = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


@contextlib.asynccontextmanager
async def probed(stopping: asyncio.Event) -> AsyncIterator[None]:
    """Answer probes while the block lasts, if DYN_SYSTEM_PORT is set.

    Raises:
        ValueError: the value is not a port.
        RuntimeUnavailableError: the port is taken.
    """
    port = probe_port()
    if port is None or os.environ.get(SUPERVISED) == "1":
        yield
        return
    probes = _Probes(stopping)
    try:
        server = await asyncio.start_server(probes.answer, None, port, limit=4096)
    except OSError as error:
        raise RuntimeUnavailableError(f"port {port} cannot be used: {error.strerror}; set another {PORT}") from error
    with probes.hearing():
        try:
            yield
        finally:
            server.close()


def probe_port() -> int | None:
    """Return the port for probes (none: there are no probes).

    Raises:
        ValueError: the environment has something else.
    """
    text = os.environ.get(PORT, "").strip()
    if text in ("", "-1"):  # Dynamo's default is -1
        return None
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 1 << 16:
        raise ValueError(f"{PORT} is {text!r}; expected a port from 1 to 65535")
    return int(text)


class _Probes:
    """Receives reports instead of a process's parent."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._is_ready = False
        self._num_callers = 0

    @contextlib.contextmanager
    def hearing(self) -> Iterator[None]:
        """Receive this process's report."""
        loop = asyncio.get_running_loop()
        ours, theirs = os.pipe()

        def hear() -> None:
            reported = os.read(ours, STATUS_BYTES)  # always: bytes left in the pipe would call this again at once
            self._is_ready = self._is_ready or reported.startswith(READY)

        loop.add_reader(ours, hear)
        os.environ[STATUS_FD] = str(theirs)
        try:
            yield
        finally:
            del os.environ[STATUS_FD]
            loop.remove_reader(ours)
            os.close(ours)
            os.close(theirs)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        self._num_callers += 1
        try:
            if self._num_callers <= MAX_CALLERS:
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._response(head.split(b" ")[1:2]))
                    await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # from a stranger: a real probe asks again
        finally:
            self._num_callers -= 1
            writer.close()

    def _response(self, target: list[bytes]) -> bytes:
        match target:
            case [b"/live"]:
                code, status = 200, "live"
            case [b"/health"]:
                code, status = self._health()
            case _:
                code, status = 404, "unknown; expected /health or /live"
        body = json.dumps({"status": status}).encode()
        head = f"HTTP/1.1 {code} {REASONS[code]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return f"{head}connection: close\r\n\r\n".encode() + body

    def _health(self) -> tuple[int, str]:
        if self._stopping.is_set():
            return 503, "draining"
        return (200, "healthy") if self._is_ready else (503, "starting")
