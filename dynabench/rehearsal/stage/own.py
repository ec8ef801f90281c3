"""The user's own engine in a rehearsal: its file runs at each worker, on the worker's event loop and thus on virtual time."""

import asyncio
import contextlib
import inspect
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dynabench.deployment.description import Deployment
from foundation.errors import UserError
from serving.engines.own import OwnEngine
from serving.runtime.memory.node import NODE
from serving.runtime.world import world
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


def own_of(deployment: Deployment) -> str:
    """Return the engine of the user's own that every worker of a deployment runs, as `pytok:FILE`; nothing if there is none.

    Raises:
        UserError: only some workers run it.
    """
    kinds = {f"{pool.engine}:{pool.own.engine_file}" if pool.engine in KINDS else "" for pool in deployment.pools}
    if len(kinds) > 1:
        raise UserError("pools have several engines, of which some are your own; expected the same one in each pool")
    return kinds.pop()


def is_chat(engine: str) -> bool:
    """Return whether an engine takes whole chat requests: one's own, or that of a pool."""
    return engine.startswith("pystr:") or engine == "echo_full"


def own_engine(engine: str, worker: WorkerConfig) -> OwnEngine:
    """Return the engine of a worker."""
    kind, _, file = engine.partition(":")
    return OwnEngine("pystr" if kind == "pystr" else "pytok", file, worker, ModelRunConfig(), (), http_port=0)


@contextlib.contextmanager
def contained(seed: int) -> Iterator[None]:
    """Give what runs at a node its own clocks and random numbers from a seed, and refuse real time, threads and exits.

    What an engine's file changes is restored at the end.
    """
    before = random.getstate()
    random.seed(f"own code {seed}")
    clocks: Any = {
        name: _clock(getattr(time, name), per_s, is_wall=name.startswith("time"))
        for name, per_s in (
            ("time", 1),
            ("monotonic", 1),
            ("perf_counter", 1),
            ("time_ns", 10**9),
            ("monotonic_ns", 10**9),
            ("perf_counter_ns", 10**9),
        )
    }
    with (
        patch.object(sys, "argv", sys.argv),
        patch.object(sys, "path", list(sys.path)),
        patch.object(os, "_exit", _refused("os._exit", os._exit, "an exception")),
        patch.object(
            threading.Thread, "start", _refused("a thread", threading.Thread.start, "tasks of the event loop")
        ),
        patch.object(time, "sleep", _refused("time.sleep", time.sleep, "await asyncio.sleep")),
        patch.multiple(time, **clocks),
    ):
        try:
            yield
        finally:
            random.setstate(before)


def _clock(usual: Callable[[], Any], per_s: int, *, is_wall: bool) -> Callable[[], Any]:
    def read() -> Any:
        if NODE.get() is None or not (node := world()).is_virtual:
            return usual()
        now_s = node.wall_s() if is_wall else node.now()
        return now_s if per_s == 1 else round(now_s * per_s)

    return read


def _refused(what: str, usual: Callable[..., Any], instead: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if (node := NODE.get()) is None:
            return usual(*arguments, **options)
        loop: Any = asyncio.get_running_loop()
        caller = inspect.stack(0)[1].frame
        where = f" ({Path(caller.f_code.co_filename).name}:{caller.f_lineno})"
        raise loop.refuse(f"{node.name} uses {what}{where}, which virtual time does not have; expected {instead}")

    return call
