"""Faults of a running server: from its start, which they may delay, to its end, which they may bring."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator

from serving.engines.mock import Mocker
from serving.runtime.stopping import until_stopped
from serving.stand_in.faults.admin import admin_port
from serving.stand_in.faults.config import AdminConfig, FaultConfig
from serving.stand_in.faults.state import Faults
from serving.stand_in.local import LocalCalls

KEEP_ALIVE = "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"


@contextlib.asynccontextmanager
async def faults_of(
    config: FaultConfig, admin: AdminConfig | None, stopping: asyncio.Event
) -> AsyncIterator[Faults | None]:
    """Yield the faults of a server once its port may be opened, or None if nothing can go wrong.

    Raises:
        PortError: the admin port cannot be used.
    """
    if config.is_empty and admin is None:
        yield None
        return
    faults = Faults(config)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if admin is not None:
                await stack.enter_async_context(admin_port(admin, faults, stopping))
            await until_stopped(stopping, faults.started.wait())
            yield faults
    finally:
        faults.close()


class Victim:
    """What faults do to a server that has its process for itself (see `faults.state.Server`)."""

    def __init__(self, engine: Mocker, calls: LocalCalls, stopping: asyncio.Event) -> None:
        self._engine = engine
        self._calls = calls
        self._stopping = stopping

    def slow_down(self, factor: float) -> None:
        """See `Server`."""
        self._engine.slow_down(factor)

    def kill_engine(self, why: str) -> None:
        """See `Server`."""
        self._calls.end_all(why, "engine")

    def stop(self) -> None:
        """See `Server`; as with vLLM, a variable keeps it from that."""
        if os.environ.get(KEEP_ALIVE, "0") == "0":
            self._stopping.set()

    def end(self, how: str) -> None:
        """See `Server`: at once, with connections open and nothing released, as crashes do."""
        logging.shutdown()
        sys.stdout.flush()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
