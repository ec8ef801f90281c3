"""TCP of the network that this process is on: its host's or, in a simulation, its node's.

A `Connection` moves bytes: through a socket, or a channel of the memory network. All above it is the same for both.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from serving.runtime.memory import tcp
from serving.runtime.memory.node import NODE
from serving.transfer import sockets


class Connection(Protocol):
    """Bytes to another process and from it, in order; one task at a time sends and receives."""

    def send(self, data: bytes | memoryview) -> Awaitable[None]:
        """Send all of it, as soon as there is room.

        Raises:
            OSError: the other side hung up, or the connection broke.
        """
        ...

    def receive_into(self, target: memoryview | bytearray) -> Awaitable[int]:
        """Wait for the next bytes, and return how many were put into the memory; 0: the other side hung up.

        Raises:
            OSError: the connection broke.
        """
        ...

    def watch(self, on_readable: Callable[[], object]) -> None:
        """Call back once something has arrived, or the other side has hung up; until `unwatch`, perhaps repeatedly."""
        ...

    def unwatch(self) -> None:
        """Call back no more."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Listener(Protocol):
    """Where others connect."""

    host: str
    """The host at which others reach it."""
    port: int

    def accept(self) -> Awaitable[Connection]:
        """Wait for the next connection.

        Raises:
            OSError: there are too many open files now.
        """
        ...

    def close(self) -> None:
        """Let nobody connect any more."""
        ...


async def listen(host: str, port: int = 0) -> Listener:
    """Listen at a port, by default a free one.

    Raises:
        OSError, UnicodeError: there is no such address here, or the port is in use.
    """
    node = NODE.get()
    return await (sockets.listen(host, port) if node is None else tcp.listen(node, host, port))


async def connect(host: str, port: int) -> Connection:
    """Connect to a port.

    Raises:
        OSError: nobody answers there.
    """
    node = NODE.get()
    return await (sockets.connect(host, port) if node is None else tcp.connect(node, host, port))
