"""Tunnels through an HTTP proxy to the server that is measured."""

import asyncio
import socket
from typing import Any

from dynabench.proxy import Proxy
from foundation.text import one_line

MOST_HEAD = 1 << 16
"""Most bytes of a proxy's answer."""
PATIENCE_S = 30.0


class ProxyError(OSError):
    """A proxy that does not lead to the server."""


async def open_tunnel(proxy: Proxy, host: str, port: int) -> asyncio.Transport:
    """Return a connection through a proxy to a server.

    Raises:
        ProxyError: the proxy refuses, or is no proxy.
        OSError: there is no connection to it.
    """
    loop = asyncio.get_running_loop()
    transport, tunnel = await loop.create_connection(lambda: _Tunnel(proxy.connect(host, port)), proxy.host, proxy.port)
    try:
        await asyncio.wait_for(tunnel.opened, PATIENCE_S)
    except BaseException as error:
        transport.abort()
        if isinstance(error, TimeoutError):
            raise ProxyError("the proxy did not answer") from error
        raise
    return transport


def tunnel_through(plain: socket.socket, proxy: Proxy, host: str, port: int) -> None:
    """Make a socket that is connected to a proxy one to a server.

    Raises:
        ProxyError: the proxy refuses, or is no proxy.
        OSError: the connection broke.
    """
    plain.sendall(proxy.connect(host, port))
    said = b""
    while b"\r\n\r\n" not in said and len(said) <= MOST_HEAD:
        said += (part := plain.recv(1))  # what follows the head is for TLS
        if not part:
            break
    check_opened(said)


def check_opened(said: bytes) -> None:
    """Check a proxy's answer to the request for a tunnel.

    Raises:
        ProxyError: it is a refusal, or no answer.
    """
    words = said.split(b"\r\n", 1)[0].split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or b"\r\n\r\n" not in said:
        raise ProxyError(f"the proxy does not answer as one: {one_line(said, 100) or 'it closed the connection'}")
    if not words[1].startswith(b"2"):
        raise ProxyError(f"the proxy refuses: {one_line(b' '.join(words[1:]), 100)}")


class _Tunnel(asyncio.Protocol):
    """Asks a proxy for a tunnel; `opened` is done once there is one."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._said = b""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._said += data
        if b"\r\n\r\n" in self._said or len(self._said) > MOST_HEAD:
            self._settle()

    def connection_lost(self, error: Exception | None) -> None:
        self._settle()

    def _settle(self) -> None:
        if self.opened.done():
            return
        try:
            check_opened(self._said)
        except ProxyError as error:
            self.opened.set_exception(error)
        else:
            self.opened.set_result(None)
