"""The user's own engine in a rehearsal: its file runs at each worker, on the worker's event loop and thus on virtual time."""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from foundation.errors import UserError
from serving.engines.own import OwnEngine
from serving.runtime.memory.node import NODE
from serving.worker.config import ModelRunConfig, WorkerConfig

KINDS = ("pystr", "pytok")


def check_own(engine: str) -> None:
    """Check that this is `pystr:FILE` or `pytok:FILE`.

    Raises:
        UserError: it is not, or there is no such file.
    """
    kind, _, file = engine.partition(":")
    if kind not in KINDS or not file:
        raise UserError(f"own_engine is {engine!r}; expected pystr:FILE or pytok:FILE")
    if not Path(file).expanduser().is_file():
        raise UserError(f"own_engine is {engine!r}: there is no file {file}")


def is_chat(engine: str) -> bool:
    """Return whether an engine, the user's own or one that echoes, takes whole chat requests."""
    return engine.startswith("pystr:") or engine == "echo_full"


def own_engine(engine: str, worker: WorkerConfig) -> OwnEngine:
    """Return the engine of a worker."""
    kind, _, file = engine.partition(":")
    return OwnEngine("pystr" if kind == "pystr" else "pytok", file, worker, ModelRunConfig(), (), http_port=0)


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Refuse real time and threads to what runs at a node, and restore what the file of an engine changes."""
    with (
        patch.object(sys, "argv", sys.argv),
        patch.object(sys, "path", list(sys.path)),
        patch.object(time, "sleep", _refused("time.sleep", time.sleep, "await asyncio.sleep")),
        patch.object(
            threading.Thread, "start", _refused("a thread", threading.Thread.start, "tasks of the event loop")
        ),
    ):
        yield


def _refused(what: str, usual: Callable[..., Any], instead: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if (node := NODE.get()) is None:
            return usual(*arguments, **options)
        loop: Any = asyncio.get_running_loop()
        raise loop.refuse(f"{node.name} uses {what}, which takes real time; expected {instead}")

    return call
