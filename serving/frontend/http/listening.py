"""Sockets on which a server listens."""

import os
import socket
from pathlib import Path

from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.private_folder import socket_name

LISTEN_FD = "DYNABENCH_LISTEN_FD"

BACKLOG = 2048
"""Connections that may wait to be accepted."""


class PortError(RuntimeUnavailableError):
    """The process cannot listen on a port."""


def listen(host: str, port: int, backlog: int | None = BACKLOG, *, flag: str = "--http-port") -> socket.socket:
    """Bind a listening socket, or use the one that we were started with; without a backlog, a new one does not listen yet.

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
            f"port {port} on {host} cannot be used: {error.strerror}; choose another with {flag}"
        ) from error
    if backlog is not None:
        listener.listen(backlog)
    return listener


def listen_at(path: Path, backlog: int | None = BACKLOG) -> socket.socket:
    """Bind a listening Unix socket.

    Raises:
        RuntimeUnavailableError: its path is too long.
    """
    name = socket_name(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    if backlog is not None:
        listener.listen(backlog)
    return listener
