"""Start a whole stack on this host, wait until it is ready, and clean up afterwards."""

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from dynabench.deployment.description import Deployment
from dynabench.deployment.processes import deployment_programs
from dynabench.planner.programs import hands_of, has_planner, planner_program
from foundation.errors import UserError
from serving.frontend.http.listening import PortError, listen
from serving.runtime.config import RuntimeConfig
from serving.supervision.group import ProcessGroup

START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 1800.0
"""Time limit for engines that load a model, and may have to download it first."""

STOP_TIMEOUT_S = 3.0
UNLOAD_TIMEOUT_S = 20.0
"""Time limit for engines that run a model, which first end their own processes."""


class StackError(UserError):
    """A stack did not start, or one of its processes died."""


class LocalStack:
    """The processes of a deployment on this host."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        seed: int = 0,
        restart: bool = False,
    ) -> None:
        """Bind the port; nothing runs yet.

        Args:
            deployment: what to start, in its own namespace, and in its own discovery folder unless the deployment sets
                discovery.
            seed: seed of the router's random choices.
            restart: whether to start processes again when they end.

        Raises:
            StackError: the port is taken, an engine rejects its settings, or there are too few GPUs.
        """
        frontend = deployment.frontend
        try:
            self._listener = listen(frontend.http_host, frontend.http_port)
        except PortError as error:
            raise StackError(str(error)) from error
        self._folder = Path(tempfile.mkdtemp(prefix="dynabench-"))
        own_folder = RuntimeConfig(
            discovery_backend="auto", etcd_endpoints="", nats_server="", discovery_dir=str(self._folder)
        )
        self._runtime, namespace = deployment.runtime or own_folder, f"bench-{secrets.token_hex(4)}"
        self.url = f"http://{frontend.http_host}:{self._listener.getsockname()[1]}"
        try:
            self._programs = deployment_programs(
                deployment,
                self._runtime,
                namespace=namespace,
                descriptor=self._listener.fileno(),
                seed=seed,
            )
        except ValueError as error:
            self._clean_up()
            raise StackError(str(error)) from error
        self._has_planner = has_planner(deployment)
        self._quiet = {"DYN_LOG": os.environ.get("DYN_LOG", "warn")}
        self.hands = hands_of(
            deployment, self._runtime, namespace=namespace, beside=self._programs, environment=self._quiet
        )
        if self._has_planner:
            self._programs.append(planner_program(deployment, self._runtime, namespace=namespace, url=self.url))
        self._num_workers = deployment.num_workers
        self._num_frontends = frontend.http_workers
        runs_model = any(pool.runs_model for pool in deployment.pools)
        self._start_timeout_s = LOAD_TIMEOUT_S if runs_model else START_TIMEOUT_S
        self._stop_timeout_s = UNLOAD_TIMEOUT_S if runs_model else STOP_TIMEOUT_S
        self.group = ProcessGroup(restart=restart, on_event=self.hands.on_event)
        self._obeying = contextlib.AsyncExitStack()
        self.model = deployment.pools[0].served_name

    async def __aenter__(self) -> Self:
        """Start everything and wait until every worker is reachable.

        Raises:
            StackError: a process died or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await self._start()
        except TimeoutError as error:
            await self.stop()
            raise StackError(f"the stack did not respond within {self._start_timeout_s:g} s") from error
        except BaseException as error:
            await self.stop(at_once=isinstance(error, asyncio.CancelledError))
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(at_once=kind is asyncio.CancelledError)

    async def stop(self, *, at_once: bool = False) -> None:
        """End all processes and remove their files."""
        try:
            await self._obeying.aclose()
            await self.group.stop(0 if at_once else self._stop_timeout_s)
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        if self._has_planner:
            await self._obeying.enter_async_context(self.hands.at_work(self.group, self._runtime))
        for program in self._programs:
            await self.group.start(replace(program, environment=self._quiet | program.environment))
        # Each query opens a new connection, and any of several frontends may answer it. Ask until it is almost certain
        # (1 - e^-12) that each has answered.
        num_questions = 12 * self._num_frontends if self._num_frontends > 1 else 1
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            for _ in range(num_questions):
                await self._wait_until_ready(session)

    async def _wait_until_ready(self, session: aiohttp.ClientSession) -> None:
        while not await self._is_ready(session):
            if dead := self.group.dead:
                raise StackError(f"{dead[0]} ended while the stack was starting: {self.group.cause(dead[0])}")
            await asyncio.sleep(0.05)

    async def _is_ready(self, session: aiohttp.ClientSession) -> bool:
        asking = asyncio.ensure_future(_health(session, self.url))
        await asyncio.wait([asking], timeout=0.5)  # the frontend accepts connections only once it runs
        if not asking.done():
            asking.cancel()
            return False
        return await asking >= self._num_workers


async def _health(session: aiohttp.ClientSession, url: str) -> int:
    """Return how many instances are reachable."""
    try:
        async with session.get(f"{url}/health") as response:
            return len((await response.json()).get("instances", []))
    except aiohttp.ClientError:
        return 0
