"""Where an engine's own processes listen for the engines that read its KV: ports, and environment variables for them."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Annotated, Self

from msgspec import Meta

from serving.worker.engine import EngineError

LOOPBACK = "127.0.0.1"
ATTEMPTS = 100

Port = Annotated[int, Meta(ge=1, le=65535)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
"""The name of a host or an engine, from another worker."""


class PortReservation:
    """Consecutive TCP ports, reserved while an engine starts.

    They are bound, but nobody listens on them, so on Linux an engine that sets SO_REUSEADDR, as ZeroMQ and asyncio do, can
    also bind them and listen. Engines that start at the same time on one host get different ports.
    """

    def __init__(self, host: str = LOOPBACK, count: int = 1) -> None:
        try:
            self._sockets = _consecutive(host, count)
        except OSError as error:
            raise EngineError(f"an engine cannot listen on {host}: {error}") from error
        self.first: int = self._sockets[0].getsockname()[1]

    def close(self) -> None:
        """Release the ports."""
        for reserved in self._sockets:
            reserved.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def defaults(environment: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the user did not set, and restore the environment afterwards, for another engine in this process."""
    missing = environment.keys() - os.environ.keys()
    os.environ.update({name: environment[name] for name in missing})
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def ucx_at(host: str) -> dict[str, str]:
    """Return settings that keep NIXL's own sockets on the loopback interface if the host is; by default they are on all."""
    return {"UCX_NET_DEVICES": "lo"} if is_loopback(host) else {}


def is_loopback(host: str) -> bool:
    """Whether only this host can reach an address."""
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _consecutive(host: str, count: int) -> list[socket.socket]:
    """Bind consecutive ports.

    Raises:
        OSError: the address is not this host's, or there are no such ports.
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
        # Only now: otherwise we could also get a port that another reservation has.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        made.close()
        raise
    return made
