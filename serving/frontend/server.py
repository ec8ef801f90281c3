"""A frontend process, or several that share a port."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from serving.frontend.app import Frontend
from serving.frontend.config import FrontendConfig
from serving.frontend.http.listening import LISTEN_FD, listen
from serving.frontend.http.server import serve_http
from serving.frontend.models import Models
from serving.frontend.routes import frontend_app
from serving.life import DisaggregationConfig
from serving.router import RouterConfig
from serving.runtime.address import EndpointAddress
from serving.runtime.config import RuntimeConfig
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError
from serving.runtime.server import GeneratorService
from serving.runtime.world import world
from serving.supervision.group import ProcessGroup, Program
from serving.supervision.process import report_ready

log = logging.getLogger(__name__)

GROUP = "DYNABENCH_FRONTEND_GROUP"


async def serve_frontend(
    runtime: DistributedRuntime,
    config: FrontendConfig,
    models: Models,
    listener: socket.socket,
    *,
    group: str = "",
    see: Callable[[Frontend], object] = lambda _: None,
) -> None:
    """Serve HTTP until the process is asked to end; then let requests in progress finish.

    Args:
        runtime: connected to the network.
        config: how to serve.
        models: what to serve.
        listener: where.
        group: the name of those that share a port with it, if any do.
        see: is called with the handlers, for whoever watches the requests in progress.
    """
    frontend = Frontend(models, config, await _siblings(runtime, group), runtime.outages)
    see(frontend)
    await _count_for_siblings(runtime, frontend, group)
    await models.start()
    try:
        await serve_http(
            frontend_app(frontend, config),
            frontend.answering,
            listener,
            runtime.stopping,
            drain_s=config.drain_s,
            write_timeout_s=config.write_timeout_s,
        )
    finally:
        await models.close()


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
            models, name = Models(runtime, config, router, disaggregation), os.environ.get(GROUP, "")
            await serve_frontend(runtime, config, models, listener, group=name)
        return
    with listener:
        async with ProcessGroup(restart=True) as group:
            await group.start(*frontend_programs(config, router, disaggregation, runtime_config, listener.fileno()))
            report_ready()
            log.info("listening on http://%s:%d with %d processes", *listener.getsockname()[:2], config.http_workers)
            await group.wait(stopping)
            await group.stop(config.drain_s + 5)


def frontend_program(
    config: FrontendConfig, router: RouterConfig, disaggregation: DisaggregationConfig, runtime: RuntimeConfig
) -> Program:
    """Return a frontend's process that opens its port itself."""
    return Program("frontend", ["-m", "serving.frontend"], (config, router, disaggregation, runtime))


def frontend_programs(
    config: FrontendConfig,
    router: RouterConfig,
    disaggregation: DisaggregationConfig,
    runtime: RuntimeConfig,
    descriptor: int,
) -> list[Program]:
    """Return the processes of a frontend that share a listening socket."""
    environment = {LISTEN_FD: str(descriptor)}
    alone = frontend_program(config, router, disaggregation, runtime)
    first = replace(alone, environment=environment, file_descriptors=(descriptor,))
    if config.http_workers == 1:
        return [first]
    environment |= {GROUP: world().token_hex(4)}
    return [replace(first, name=f"frontend-{number}", environment=environment) for number in range(config.http_workers)]


def _metrics_address(group: str) -> EndpointAddress:
    return EndpointAddress("dynabench", f"frontends-{group}", "metrics")


async def _count_for_siblings(runtime: DistributedRuntime, frontend: Frontend, group: str) -> None:
    """Answer the other processes on our port, if there are any, when they ask for our counts."""
    if group:

        async def count(_: Any) -> Any:
            yield frontend.state()

        await runtime.serve(_metrics_address(group), GeneratorService(count))


async def _siblings(runtime: DistributedRuntime, group: str) -> Any:
    """Return a function that asks the other processes on our port for their counts, if there are any."""
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
