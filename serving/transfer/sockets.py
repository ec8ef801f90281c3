"""Connections and listeners of this host."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

BACKLOG = 1024

SILENCE_S = 30
"""The silence after which the system checks whether the other host is still there."""


class SocketConnection:
    """A connected socket in the event loop, without copies of the data (see `Connection`)."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection

    def send(self, data: bytes | memoryview) -> Awaitable[None]:
        """See `Connection`."""
        return asyncio.get_running_loop().sock_sendall(self.socket, data)

    def receive_into(self, target: memoryview | bytearray) -> Awaitable[int]:
        """See `Connection`."""
        return asyncio.get_running_loop().sock_recv_into(self.socket, target)

    def watch(self, on_readable: Callable[[], object]) -> None:
        """See `Connection`."""
        asyncio.get_running_loop().add_reader(self.socket, on_readable)

    def unwatch(self) -> None:
        """See `Connection`."""
        asyncio.get_running_loop().remove_reader(self.socket)

    def close(self) -> None:
        """See `Connection`."""
        self.socket.close()


class SocketListener:
    """A listening socket (see `Listener`)."""

    def __init__(self, listener: socket.socket, host: str = "", port: int = 0) -> None:
        """Own a socket; `host` and `port` are where others reach it, if it has a port."""
        listener.setblocking(False)
        self.host = host
        self.port = port
        self._socket = listener

    async def accept(self) -> SocketConnection:
        """See `Listener`."""
        connection, _ = await asyncio.get_running_loop().sock_accept(self._socket)
        return SocketConnection(connection)

    def close(self) -> None:
        """See `Listener`."""
        self._socket.close()


async def listen(host: str, port: int) -> SocketListener:
    """Listen at a port of this host; 0 is a free one.

    Raises:
        OSError, UnicodeError: this host has no such address, or the port is in use.
    """
    loop = asyncio.get_running_loop()
    family, _, _, _, place = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_options(listener)  # accepted connections inherit them
        listener.bind(place)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return SocketListener(listener, host, listener.getsockname()[1])


async def connect(host: str, port: int) -> SocketConnection:
    """Connect to a port.

    Raises:
        OSError: nobody answers there.
    """
    loop = asyncio.get_running_loop()
    try:
        places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a host name: {error}") from error
    for number, (family, _, _, _, place) in enumerate(places):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            set_options(connection)
            await loop.sock_connect(connection, place)
        except BaseException as error:
            connection.close()
            if not isinstance(error, OSError) or number + 1 == len(places):
                raise
        else:
            return SocketConnection(connection)
    raise OSError(f"{host!r} has no address")


def set_options(connection: socket.socket) -> None:
    """Send without delay, and detect that the other host is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
