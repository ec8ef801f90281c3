"""Where in the code tasks wait, for messages."""

import asyncio
from typing import Any


def described(callback: Any) -> str:
    """Name a callback, or the task whose step it is."""
    owner = getattr(callback, "__self__", None)
    return place_of(owner) if isinstance(owner, asyncio.Task) else f"{getattr(callback, '__qualname__', callback)}"


def place_of(task: asyncio.Task[Any]) -> str:
    """Return a task's function, and the line where it waits."""
    name = getattr(task.get_coro(), "__qualname__", str(task.get_coro()))
    frames = _awaited(task.get_coro())
    return f"{name} at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else name


def _awaited(coroutine: Any) -> list[Any]:
    """Return the frames of a coroutine and of those that it awaits, the innermost last."""
    frames = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        frames.append(frame)
        coroutine = coroutine.cr_await
    return frames
