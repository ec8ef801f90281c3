"""Calls beside a running event loop, such as that of a notebook: in a thread of their own, and Ctrl-C ends them, too."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from dynabench.interrupt import Interrupt, InterruptError

T = TypeVar("T")


def beside_a_loop(call: Callable[[Interrupt | None], T]) -> T:
    """Call what runs an event loop; if this thread has one, as in a notebook, in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call(None)
    found: list[T] = []
    failed: list[BaseException] = []

    def carry_out() -> None:
        try:
            found.append(call(interrupt))
        except BaseException as error:  # raised again below
            failed.append(error)
        finally:
            is_over.set()

    is_over = threading.Event()  # a `join` that a signal ends takes the thread for ended
    with Interrupt() as interrupt:
        context = contextvars.copy_context()  # has what was called, for the manifest
        threading.Thread(target=context.run, args=(carry_out,)).start()
        while not is_over.is_set():
            with suppress(InterruptError):
                is_over.wait()
    if failed:
        raise failed[0]
    return found[0]
