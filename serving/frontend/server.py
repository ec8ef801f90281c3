"""A frontend process, or several that share a port."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from serving.frontend.app import Frontend
from serving.frontend.config import FrontendConfig
from serving.frontend.http.connection import Connection, sweep
from serving.frontend.http.limits import Limits
from serving.frontend.models import Models
from serving.frontend.routes import make_app
from serving.life import DisaggregationConfig
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.private_folder import socket_name
from serving.runtime.server import GeneratorService
from serving.runtime.stopping import until_stopped
from serving.supervision.group import Group, Program
from serving.supervision.process import report_ready

log = logging.getLogger(__name__)

LISTEN_FD = "DYNABENCH_LISTEN_FD"
GROUP = "DYNABENCH_FRONTEND_GROUP"


class PortError(RuntimeUnavailableError):
    """The process cannot listen on a port."""


def listen(host: str, port: int) -> socket.socket:
    """Bind a listening socket, or use the one that we were started with.

    Only processes that are handed it explicitly have it: nobody else keeps the port once the frontend is gone.

    Raises:
        PortError: the port is in use, or binding it is not allowed.
    """
    if LISTEN_FD in os.environ:
        given = socket.socket(fileno=int(os.environ[LISTEN_FD]))
        given.set_inheritable(False)
        return given
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortError(
            f"port {port} on {host} cannot be used: {error.strerror}; choose another with --http-port"
        ) from error
    listener.listen(2048)
    return listener


class _Server(uvicorn.Server):
    """A server that leaves signals to us: the first one drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen_at(path: Path) -> socket.socket:
    """Bind a listening Unix socket.

    Raises:
        RuntimeUnavailableError: its path is too long.
    """
    name = socket_name(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(2048)
    return listener


async def serve_frontend(
    runtime: DistributedRuntime, config: FrontendConfig, models: Models, listener: socket.socket
) -> None:
    """Serve HTTP until the process is asked to end; then let requests in progress finish."""
    frontend = Frontend(models, config, await _siblings(runtime), runtime.outages)
    await _count_for_siblings(runtime, frontend)
    await models.start()
    limits = Limits(unread_timeout_s=config.write_timeout_s)
    server = _server(frontend, config, limits)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sweeping = asyncio.create_task(sweep(server.server_state.connections, limits))
    if listener.family != socket.AF_UNIX:
        log.info("listening on http://%s:%d", *listener.getsockname()[:2])
    report_ready()
    try:
        await until_stopped(runtime.stopping, asyncio.shield(serving))
        await _drain(frontend, config.drain_s)
    finally:
        frontend.end_all()
        await models.close()
        server.should_exit = True
        sweeping.cancel()
        await serving


def _server(frontend: Frontend, config: FrontendConfig, limits: Limits) -> _Server:
    return _Server(
        uvicorn.Config(
            make_app(frontend, config),
            log_level="warning",
            access_log=False,
            http=partial(Connection, limits=limits),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
            backlog=2048,
        )
    )


async def _drain(frontend: Frontend, drain_s: float) -> None:
    """Accept no more requests, and wait for those in progress, up to a limit."""
    frontend.is_draining = True
    if frontend.num_open:
        log.info("waiting for requests in progress (%d); Ctrl-C again stops at once", frontend.num_open)
    deadline = asyncio.get_running_loop().time() + drain_s
    while frontend.num_open and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)


async def run_frontends(
    config: FrontendConfig,
    router: RouterConfig,
    disaggregation: DisaggregationConfig,
    runtime_config: RuntimeConfig,
    stopping: asyncio.Event,
) -> None:
    """Run one frontend here, or several processes that share a port.

    Raises:
        RuntimeUnavailableError: the port, a server or a folder cannot be used.
        GroupError: one of several processes did not start.
    """
    listener = listen(config.http_host, config.http_port)
    if config.http_workers == 1 or LISTEN_FD in os.environ:
        async with await DistributedRuntime.connect(runtime_config, stopping=stopping) as runtime:
            await serve_frontend(runtime, config, Models(runtime, config, router, disaggregation), listener)
        return
    with listener:
        async with Group(restart=True) as group:
            await group.start(*programs(config, router, disaggregation, runtime_config, listener.fileno()))
            report_ready()
            log.info("listening on http://%s:%d with %d processes", *listener.getsockname()[:2], config.http_workers)
            await group.wait(stopping)
            await group.stop(config.drain_s + 5)


def program(
    config: FrontendConfig, router: RouterConfig, disaggregation: DisaggregationConfig, runtime: RuntimeConfig
) -> Program:
    """Return a frontend's process that opens its port itself."""
    return Program("frontend", ["-m", "serving.frontend"], (config, router, disaggregation, runtime))


def programs(
    config: FrontendConfig,
    router: RouterConfig,
    disaggregation: DisaggregationConfig,
    runtime: RuntimeConfig,
    descriptor: int,
) -> list[Program]:
    """Return the processes of a frontend that share a listening socket."""
    environment = {LISTEN_FD: str(descriptor)}
    alone = program(config, router, disaggregation, runtime)
    first = replace(alone, environment=environment, file_descriptors=(descriptor,))
    if config.http_workers == 1:
        return [first]
    environment |= {GROUP: secrets.token_hex(4)}
    return [replace(first, name=f"frontend-{number}", environment=environment) for number in range(config.http_workers)]


def _metrics_address(group: str) -> EndpointAddress:
    return EndpointAddress("dynabench", f"frontends-{group}", "metrics")


async def _count_for_siblings(runtime: DistributedRuntime, frontend: Frontend) -> None:
    """Answer the other processes on our port, if there are any, when they ask for our counts."""
    if group := os.environ.get(GROUP):

        async def count(_: Any) -> Any:
            yield frontend.state()

        await runtime.serve(_metrics_address(group), GeneratorService(count))


async def _siblings(runtime: DistributedRuntime) -> Any:
    """Return a function that asks the other processes on our port for their counts, if there are any."""
    group = os.environ.get(GROUP)
    if not group:
        return None
    client = await runtime.client(_metrics_address(group))

    async def ask() -> list[dict[str, Any]]:
        states: list[dict[str, Any]] = []
        for id in client.instance_ids():
            if id != runtime.instance_id:
                try:
                    async with asyncio.timeout(2):
                        states += [state async for state in client.direct(None, id)]
                except (CallError, TimeoutError):
                    continue  # it has just gone, and its counts with it
        return states

    return ask
