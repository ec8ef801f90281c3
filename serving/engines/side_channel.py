"""Ports at which an engine's own processes will listen, for the engines that read its KV."""

import contextlib
import socket
from ipaddress import ip_address
from typing import Self

LOOPBACK = "127.0.0.1"
ATTEMPTS = 100


class PortReservation:
    """Consecutive TCP ports that nobody else is given while an engine starts.

    They are bound, but nobody listens there, so on Linux an engine that sets SO_REUSEADDR, as ZeroMQ and asyncio do, can
    bind them too and listen. Several engines that start at once on one host get different ports.
    """

    def __init__(self, host: str = LOOPBACK, count: int = 1) -> None:
        self._sockets = _consecutive(host, count)
        self.first: int = self._sockets[0].getsockname()[1]

    def close(self) -> None:
        """Give up what no engine has bound."""
        for reserved in self._sockets:
            reserved.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_loopback(host: str) -> bool:
    """Whether only this host can reach that address."""
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _consecutive(host: str, count: int) -> list[socket.socket]:
    """Bind consecutive ports.

    Raises:
        OSError: the host is not this one, or there are no such ports.
    """
    for _ in range(ATTEMPTS):
        bound = [_bound(host, 0)]
        first = bound[0].getsockname()[1]
        try:
            bound += [_bound(host, first + number) for number in range(1, count)]
        except (OSError, OverflowError):  # the next one is taken, or there is none
            for reserved in bound:
                reserved.close()
        else:
            return bound
    raise OSError(f"no {count} consecutive ports are free at {host}")


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.bind(address)
        # Only now: a port that another reservation holds would be given to us as well otherwise.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        made.close()
        raise
    return made
