"""Blocking work in threads, and the way back from a thread into the event loop."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, TypeVar

from serving.runtime.world import world

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], *, until: threading.Event | None = None) -> Result:
    """Run something in a new thread, which does not keep the process from ending when nobody is waiting any more.

    In virtual time it runs at once, in the event loop. Processes that it starts do not see Ctrl-C: we end them once
    requests in progress are done.

    Args:
        work: what to run.
        until: keeps the thread alive after the work; on Linux a process may have asked to die with the thread that
            started it, as SGLang's do.
    """
    if world().is_virtual:
        return work()
    loop, context = asyncio.get_running_loop(), copy_context()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by child processes
        try:
            outcome: tuple[Result | None, BaseException | None] = (context.run(work), None)
        except BaseException as error:
            outcome = (None, error)
        post(loop, settle, *outcome)
        if until is not None:
            until.wait()

    threading.Thread(target=run, daemon=True).start()
    return await future


def post(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> None:
    """Schedule a call in the loop; do nothing if the loop is gone, as when the process ends."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)
