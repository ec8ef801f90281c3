"""Being asked to stop: a signal sets an event, which ends every wait for work."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def until_stopped(stopping: asyncio.Event, work: Awaitable[object]) -> bool:
    """Wait for work until it is done or the event is set, which cancels it; return whether it is done.

    Pass work that should continue in `asyncio.shield`.
    """
    working = asyncio.ensure_future(work)
    asked = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
        is_done = working.done()
        if is_done:
            await working
        return is_done
    finally:
        await cancel_all(working, asked)


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel unfinished work, and wait until it has released its resources."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(giving_back: Awaitable[Result]) -> Result:
    """Release something, even if the caller is cancelled meanwhile; only a second cancellation interrupts it."""
    work = asyncio.ensure_future(giving_back)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await work
        raise


def stop_on_signals(stopping: asyncio.Event, *, again: Callable[[], object] | None = None) -> None:
    """Set an event on SIGTERM, SIGINT and the end of the terminal (unless under nohup); on later ones call `again`."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set() and again is not None:
            again()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
