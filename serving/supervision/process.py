"""A process's own side: it runs until it is asked to end, and reports to its parent or to probes."""

import asyncio
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

import uvloop

from serving.runtime.stopping import stop_on_signals
from serving.runtime.tls import expect_lost_connections
from serving.runtime.world import world
from serving.supervision.child import READY, STATUS_BYTES
from serving.supervision.group import STATUS_FD, SUPERVISED
from serving.supervision.probes import probed

Result = TypeVar("Result")

COLLECT_AFTER = 20_000
"""Objects made and not released after which Python looks for cycles among them, instead of 700: hundreds of requests in
flight have more, and each look visits them all."""

PARENT: ContextVar[Callable[[str], object]] = ContextVar("PARENT", default=lambda _: None)
"""To whom a simulated process reports that it is ready."""


def run_process(main: Callable[[asyncio.Event], Coroutine[Any, Any, Result]]) -> Result:
    """Run a process's coroutine until it returns.

    SIGTERM, SIGINT or the end of the parent set the event that it is called with. A second signal cancels it: it
    releases its resources and finishes nothing.

    Raises:
        KeyboardInterrupt: a second signal arrived.
    """

    async def whole() -> Result:
        expect_lost_connections()
        _keep_report_private()
        stopping = asyncio.Event()
        async with probed(stopping):
            work = asyncio.create_task(main(stopping))
            stop_on_signals(stopping, again=work.cancel)
            watching = asyncio.create_task(_end_with_parent(stopping))
            try:
                return await work
            finally:
                watching.cancel()

    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    try:
        return uvloop.run(whole())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def report_ready(known_as: str = "") -> None:
    """Report to our parent, or to probes, that this process does its work now, and the name by which others know it.

    What it has loaded until now stays: cycles are not looked for there. A simulated process reports to its `PARENT`.
    """
    if world().is_virtual:
        PARENT.get()(known_as)
        return
    gc.collect()
    gc.freeze()
    _report(b" ".join(filter(None, (READY, known_as.encode()))) + b"\n")


def report_failure(message: str) -> None:
    """Report to the parent, if it supervises us, why this process is ending."""
    _report(message.encode(errors="replace")[: STATUS_BYTES // 2])


def _keep_report_private() -> None:
    """Keep the pipe on which we report from processes that we start: it should end when we do."""
    if (descriptor := os.environ.get(STATUS_FD)) is not None:
        with contextlib.suppress(OSError):  # a process that our parent's child started has the variable, not the pipe
            os.set_inheritable(int(descriptor), False)


def _report(data: bytes) -> None:
    if (descriptor := os.environ.get(STATUS_FD)) is not None:
        with contextlib.suppress(OSError):  # the parent is gone, and we will be soon
            os.write(int(descriptor), data)


async def _end_with_parent(stopping: asyncio.Event) -> None:
    """Set an event once the parent that supervises us is gone."""
    if os.environ.get(SUPERVISED) != "1":
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()
    stopping.set()
