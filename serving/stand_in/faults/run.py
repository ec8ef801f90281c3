"""Faults of a running server: from its start, which they may delay, to its end, which they may bring."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator

from serving.engines.kv.reader import Spoil
from serving.engines.mock.engine import Mocker
from serving.runtime.stopping import cancel_all, until_stopped
from serving.stand_in.faults.admin import admin_port
from serving.stand_in.faults.config import AdminConfig, FaultConfig
from serving.stand_in.faults.state import Faults
from serving.stand_in.local import LocalCalls


@contextlib.asynccontextmanager
async def faults_of(
    config: FaultConfig, admin: AdminConfig | None, stopping: asyncio.Event, *, publishes_events: bool
) -> AsyncIterator[Faults | None]:
    """Yield the faults of a server once its port may be opened, or None if nothing can go wrong.

    Raises:
        PortError: the admin port cannot be used.
    """
    if config.is_empty and admin is None:
        yield None
        return
    faults = Faults(config, publishes_events=publishes_events)
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(faults.close)
        following = asyncio.create_task(_follow(stopping, faults.ending))
        closing.push_async_callback(cancel_all, following)
        if admin is not None:
            await closing.enter_async_context(admin_port(admin, faults))
        await until_stopped(faults.ending, faults.started.wait())
        yield faults


async def _follow(stopping: asyncio.Event, ending: asyncio.Event) -> None:
    """End one server if the process, which may have others, is asked to."""
    await stopping.wait()
    ending.set()


class Victim:
    """What faults do to a server that has its process for itself (see `faults.state.Server`)."""

    def __init__(self, engine: Mocker, calls: LocalCalls, ending: asyncio.Event, *, outlives_engine: bool) -> None:
        self._engine = engine
        self._calls = calls
        self._ending = ending
        self._outlives_engine = outlives_engine

    def slow_down(self, factor: float) -> None:
        """See `Server`."""
        self._engine.slow_down(factor)

    def spoil_loads(self, spoil: Spoil) -> None:
        """See `Server`."""
        self._engine.spoil_loads(spoil)

    def kill_engine(self, why: str) -> None:
        """See `Server`."""
        self._calls.end_all(why, "engine")

    def stop(self) -> None:
        """See `Server`; a setting keeps it from that."""
        if not self._outlives_engine:
            self._ending.set()

    def end(self, how: str) -> None:
        """See `Server`: at once, with connections open and nothing released, as crashes do."""
        logging.shutdown()
        sys.stdout.flush()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)
