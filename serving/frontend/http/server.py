"""An application served over HTTP until its process is asked to end."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from serving.frontend.http.connection import ClientConnection, sweep_connections
from serving.frontend.http.limits import Limits
from serving.runtime.stopping import until_stopped
from serving.supervision.process import report_ready

log = logging.getLogger(__name__)

POLL_S = 0.02


class InProgress(Protocol):
    """The requests in progress."""

    is_draining: bool
    num_open: int

    def end_all(self) -> None:
        """End them with an error."""
        ...


class _Server(uvicorn.Server):
    """A server that leaves signals to us: the first one drains."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: ASGIApp,
    in_progress: InProgress,
    listener: socket.socket,
    stopping: asyncio.Event,
    *,
    drain_s: float,
    write_timeout_s: float,
    tls: Mapping[str, Any] | None = None,
    on_ready: Callable[[], object] = report_ready,
) -> None:
    """Serve until the event is set; then let requests in progress finish.

    Args:
        app: the application.
        in_progress: its requests.
        listener: where it is reached.
        stopping: set when the process is asked to end.
        drain_s: how long requests may take to finish then (s).
        write_timeout_s: how long a client may leave its answer unread (s).
        tls: uvicorn's settings of TLS (`ssl_keyfile`, ...), if it is spoken.
        on_ready: called once requests are answered.
    """
    limits = Limits(unread_timeout_s=write_timeout_s)
    server = http_server(app, limits, tls or {})
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    sweeping = asyncio.create_task(sweep_connections(server.server_state.connections, limits))
    if listener.family != socket.AF_UNIX:
        log.info("listening on http%s://%s:%d", "s" if tls else "", *listener.getsockname()[:2])
    on_ready()
    try:
        await until_stopped(stopping, asyncio.shield(serving))
        await _drain(in_progress, drain_s)
    finally:
        in_progress.end_all()
        await asyncio.sleep(0)  # they say so
        server.should_exit = True
        sweeping.cancel()
        await serving


def http_server(app: ASGIApp, limits: Limits, tls: Mapping[str, Any]) -> uvicorn.Server:
    """Return a server of an application, whose connections have limits; `serve` runs it until `should_exit` is set."""
    return _Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            http=partial(ClientConnection, limits=limits),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=1,
            backlog=2048,
            **tls,
        )
    )


async def _drain(in_progress: InProgress, drain_s: float) -> None:
    """Accept no more requests, and wait for those in progress, up to a limit."""
    in_progress.is_draining = True
    if in_progress.num_open and drain_s > 0:
        log.info("waiting for requests in progress (%d); Ctrl-C again stops at once", in_progress.num_open)
    deadline = asyncio.get_running_loop().time() + drain_s
    while in_progress.num_open and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_S)
