"""TCP between the nodes of a memory network: a node's one host is its name, and its ports are its own.

    listener = await listen(worker, "127.0.0.1", 0)      # listener.host is "worker"
    connection = await connect(caller, "worker", listener.port)

Connections are channels that go directly, also where requests and events go over a server.
"""

import asyncio
import errno
import ipaddress
from collections import deque
from collections.abc import Callable

from serving.runtime.memory.node import Node
from serving.runtime.memory.requests import MemoryChannel, MemoryRequests
from serving.runtime.ports import Channel, ChannelEnd

FIRST_FREE_PORT = 49152
"""Where the ports begin of those who ask for a free one."""

SEGMENT_BYTES = 256 << 10
"""The most bytes that arrive together, or not at all."""


class MemoryConnection:
    """One end of a connection."""

    def __init__(self, channel: Channel) -> None:
        """Begin as the end of a channel."""
        assert isinstance(channel, MemoryChannel)
        channel.is_read_later = True
        self._channel = channel
        self._arrived: deque[memoryview] = deque()
        self._is_over = False
        self._has_changed = asyncio.Event()
        self._on_readable: Callable[[], object] | None = None

    @property
    def has_rest(self) -> bool:
        """Whether something arrived that was not received, although no bit was wrong on this connection so far."""
        return bool(self._arrived) and not self._channel.is_damaged

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of it, as soon as there is room.

        Raises:
            BrokenPipeError: the other side hung up, or the connection broke.
        """
        for start in range(0, len(data), SEGMENT_BYTES):
            while self._channel.is_full and not self._is_over:
                await self._change()
            if self._is_over:
                raise BrokenPipeError(errno.EPIPE, "the other side hung up")
            segment = bytes(data[start : start + SEGMENT_BYTES])
            sent = self._channel.node.network.flipped(segment)
            if sent is not segment:
                self._channel.is_damaged = self._channel.peer.is_damaged = True
            self._channel.write(sent)

    async def receive_into(self, target: memoryview | bytearray) -> int:
        """Wait for the next bytes, and return how many were put into the memory; 0: the connection ended."""
        while not self._is_readable:
            await self._change()
        if not self._arrived:
            return 0
        first = self._arrived.popleft()
        num_bytes = min(len(first), len(target))
        target[:num_bytes] = first[:num_bytes]
        if num_bytes < len(first):
            self._arrived.appendleft(first[num_bytes:])
        self._channel.count_read(num_bytes)
        return num_bytes

    def watch(self, on_readable: Callable[[], object]) -> None:
        """Call back once something has arrived, or the connection has ended; until `unwatch`, perhaps repeatedly."""
        self._on_readable = on_readable
        if self._is_readable:
            asyncio.get_running_loop().call_soon(self._report)

    def unwatch(self) -> None:
        """Call back no more."""
        self._on_readable = None

    def close(self) -> None:
        """Hang up."""
        self._channel.close()

    def received(self, data: bytes) -> None:
        """See `ChannelEnd`."""
        if data:
            self._arrived.append(memoryview(data))
            self._has_changed.set()
            self._report()

    def writable(self) -> None:
        """See `ChannelEnd`."""
        self._has_changed.set()

    def closed(self) -> None:
        """See `ChannelEnd`."""
        self._is_over = True
        self._has_changed.set()
        self._report()

    @property
    def _is_readable(self) -> bool:
        return bool(self._arrived) or self._is_over

    async def _change(self) -> None:
        self._has_changed.clear()
        await self._has_changed.wait()

    def _report(self) -> None:
        if self._on_readable is not None and self._is_readable:
            self._on_readable()


class MemoryListener:
    """A port of a node."""

    def __init__(self, plane: MemoryRequests, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._plane = plane
        self._arrived: asyncio.Queue[MemoryConnection] = asyncio.Queue()

    def admit(self, channel: Channel) -> ChannelEnd:
        """Let somebody wait to be accepted."""
        connection = MemoryConnection(channel)
        self._arrived.put_nowait(connection)
        return connection

    async def accept(self) -> MemoryConnection:
        """Wait for the next connection."""
        return await self._arrived.get()

    def close(self) -> None:
        """Let nobody connect any more, and hang up on those who were not accepted."""
        self._plane.deafen()
        while not self._arrived.empty():
            self._arrived.get_nowait().close()


async def listen(node: Node, host: str, port: int) -> MemoryListener:
    """Listen at a port of a node; 0 is a free one.

    Raises:
        OSError: the node has no such address, or the port is in use.
    """
    if not _is_own(node, host):
        raise OSError(errno.EADDRNOTAVAIL, f"the node {node.name} has no address {host}")
    taken = node.network.listeners
    number = port or FIRST_FREE_PORT
    while _address(node.name, number) in taken:
        if port:
            raise OSError(errno.EADDRINUSE, "the port is in use")
        number += 1
    plane = MemoryRequests(node, number, is_direct=True)
    listener = MemoryListener(plane, node.name, number)
    await plane.listen(listener.admit)
    return listener


async def connect(node: Node, host: str, port: int) -> MemoryConnection:
    """Connect to a port of a node; 127.0.0.1 is the caller's own.

    Raises:
        OSError: nobody answers there.
    """
    made: list[MemoryConnection] = []

    def accept(channel: Channel) -> ChannelEnd:
        made.append(MemoryConnection(channel))
        return made[0]

    name = node.name if _is_own(node, host) else host
    await MemoryRequests(node, 0, is_direct=True).dial(_address(name, port), accept)
    return made[0]


def _address(name: str, port: int) -> str:
    return f"memory:{name}/{port:x}"


def _is_own(node: Node, host: str) -> bool:
    """Return whether a host is a node's own: its name, or any address of "this host"."""
    if host in (node.name, "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified
