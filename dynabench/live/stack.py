"""Start a whole stack on this host, wait until it answers, and leave nothing behind."""

import asyncio
import dataclasses
import functools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from dynabench.errors import UserError
from mocker import EngineConfig
from serving.frontend.config import FrontendConfig
from serving.frontend.server import PortError, listen, programs
from serving.model.files import model_name
from serving.router import RouterConfig
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import Group, Program
from serving.worker.config import WorkerConfig
from serving.worker.devices import allot, describe, this_host
from serving.worker.engine import EngineChoice

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 1800.0
"""For engines that load a model, and may have to fetch it first."""

STOP_TIMEOUT_S = 3.0
UNLOAD_TIMEOUT_S = 20.0
"""For engines that run a model, which end processes of their own first."""


class LaunchError(UserError):
    """A stack that did not start, or a process of it that died."""


class LocalStack:
    """A frontend with the router inside, and workers, each a process."""

    def __init__(
        self,
        *,
        frontend: FrontendConfig,
        router: RouterConfig,
        worker: WorkerConfig,
        engine: EngineConfig | EngineChoice,
        num_workers: int,
        runtime: RuntimeConfig | None = None,
        restart: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Bind the port; nothing runs yet.

        Args:
            frontend: settings of the frontend.
            router: settings of the router.
            worker: settings of each worker; its endpoint's namespace is made unique unless `runtime` is given.
            engine: settings of each simulated engine, or another engine.
            num_workers: worker processes.
            runtime: how they find each other (default: in a folder of their own).
            restart: start processes again when they end.
            say: is given the processes' log lines.

        Raises:
            LaunchError: the port is taken.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="dynabench-"))
        try:
            self._listener = listen(frontend.http_host, frontend.http_port)
        except PortError as error:
            shutil.rmtree(self._folder)
            raise LaunchError(str(error)) from error
        namespace = f"bench-{secrets.token_hex(4)}"
        if runtime is None:
            runtime = RuntimeConfig(etcd_endpoints="", nats_server="", discovery_dir=str(self._folder))
        address = worker.address
        self._worker = dataclasses.replace(worker, endpoint=f"dyn://{namespace}.{address.component}.{address.endpoint}")
        self._frontend = dataclasses.replace(frontend, namespace=namespace)
        self._router = router
        self._engine = engine
        self._runtime = runtime
        self._num_workers = num_workers
        self._start_timeout_s = START_TIMEOUT_S if isinstance(engine, EngineConfig) else LOAD_TIMEOUT_S
        self._is_talkative = say is not None
        self.group = Group(restart=restart, say=say)
        self.model = worker.model_name or (model_name(worker.model_path) if worker.model_path else "mock")
        self.url = f"http://{frontend.http_host}:{self._listener.getsockname()[1]}"

    async def __aenter__(self) -> Self:
        """Start everything and wait until every worker can be asked.

        Raises:
            LaunchError: a process died or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._start()
        except TimeoutError as error:
            await self.stop()
            raise LaunchError(f"the stack did not answer within {self._start_timeout_s:g} s") from error
        except BaseException as error:
            await self.stop(at_once=isinstance(error, asyncio.CancelledError))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(at_once=kind is asyncio.CancelledError)

    async def stop(self, *, at_once: bool = False) -> None:
        """End all processes and remove what they left."""
        timeout_s = STOP_TIMEOUT_S if isinstance(self._engine, EngineConfig) else UNLOAD_TIMEOUT_S
        try:
            await self.group.stop(0 if at_once else timeout_s)
        finally:
            self._listener.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        quiet = {} if self._is_talkative else {"DYN_LOG": os.environ.get("DYN_LOG", "warn")}
        for number, (arguments, parts, environment) in enumerate(self._workers()):
            await self.group.start(Program(f"worker-{number}", arguments, parts, quiet | environment))
        for program in programs(self._frontend, self._router, self._runtime, self._listener.fileno()):
            await self.group.start(dataclasses.replace(program, environment=quiet | program.environment))
        # Each question has a connection of its own, and any of several frontends answers it: ask until it is all but
        # certain (1 - e^-12) that each was asked.
        num_questions = 12 * self._frontend.http_workers if self._frontend.http_workers > 1 else 1
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for _ in range(num_questions):
                await self._wait_until_ready(session)

    async def _wait_until_ready(self, session: aiohttp.ClientSession) -> None:
        while not await self._is_ready(session):
            if dead := self.group.dead:
                raise LaunchError(f"{dead[0]} ended while the stack was starting: {self.group.cause(dead[0])}")
            await asyncio.sleep(0.05)

    def _workers(self) -> list[tuple[list[str], tuple[Any, ...], dict[str, str]]]:
        """Return the command line, settings and environment of each worker.

        Raises:
            LaunchError: the engine does not take its settings, or there are too few GPUs.
        """
        engine, worker = self._engine, self._worker
        if isinstance(engine, EngineConfig):
            return [(["-m", "serving.mocker"], (worker, engine, self._runtime), {})] * self._num_workers
        try:
            allotments = allot([(engine, worker)] * self._num_workers, this_host())
        except ValueError as error:
            raise LaunchError(str(error)) from error
        for line in describe(allotments):
            _say_once(line)
        return [
            (["-m", choice.module], (worker, choice.run, self._runtime, list(choice.arguments)), environment)
            for choice, environment, *_ in allotments
        ]

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        asking = asyncio.ensure_future(_health(session, self.url))
        await asyncio.wait([asking], timeout=0.5)  # the frontend takes connections only once it runs
        if not asking.done():
            asking.cancel()
            return False
        return await asking >= self._num_workers


@functools.cache
def _say_once(line: str) -> None:
    """Print a line for the user, though every arm of an experiment has it."""
    print(line, file=sys.stderr)


async def _health(session: aiohttp.ClientSession, url: str) -> int:
    """Return how many instances can be asked."""
    try:
        async with session.get(f"{url}/health") as response:
            return len((await response.json()).get("instances", []))
    except aiohttp.ClientError:
        return 0
