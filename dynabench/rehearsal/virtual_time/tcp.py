"""TCP of virtual time: what asyncio's protocols see as a connection is a channel of the memory network.

create_server(factory, sock=MemorySocket)     listens at the node whose code asks
create_connection(factory, host, port)        dials the node of that name
ClientSession(connector=MemoryConnector(...)) aiohttp's clients; programs that share a port share a host's name
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from serving.runtime.memory.network import Network
from serving.runtime.memory.node import this_node
from serving.runtime.memory.requests import MemoryRequests
from serving.runtime.ports import Channel, ChannelEnd
from serving.runtime.world import world

PORT = 8000
"""Where each frontend serves HTTP, at its own node."""
FOREVER_S = 1e9
"""No server stands between the two ends, so there is no outage to be patient about."""

Factory = Callable[[], asyncio.BaseProtocol]


class MemorySocket:
    """A port of a node on which a server may listen; to servers it looks like a bound socket."""

    family = socket.AF_INET

    def __init__(self, host: str, port: int) -> None:
        """Name a port; nobody listens yet."""
        self._place = host, port

    def getsockname(self) -> tuple[str, int]:
        """Return the node's name, and the port."""
        return self._place

    def close(self) -> None:
        """Do nothing: the server stops listening."""


class MemoryTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self, channel: Channel, protocol: asyncio.Protocol, places: tuple[tuple[str, int], tuple[str, int]]
    ) -> None:
        """Begin; `places` are our address and theirs."""
        super().__init__({"sockname": places[0], "peername": places[1]})
        self._channel, self._protocol = channel, protocol
        self._is_closing = self._is_paused = self._is_full = False
        self._unread: list[bytes] = []
        self._has_ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send; never waits."""
        if self._is_closing:
            return
        self._channel.write(bytes(data))
        if self._channel.is_full and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def write_eof(self) -> None:
        """Do nothing: a channel has no half that could end first, so the other side learns it from `close`."""

    def can_write_eof(self) -> bool:
        """Return whether one side can end alone."""
        return False

    def is_closing(self) -> bool:
        """Return whether nothing more is sent."""
        return self._is_closing

    def close(self) -> None:
        """Hang up after what was written."""
        if not self._is_closing:
            self._is_closing = True
            self._channel.close()

    abort = close

    def is_reading(self) -> bool:
        """Return whether the protocol takes what arrives."""
        return not self._is_paused

    def pause_reading(self) -> None:
        """Keep what arrives."""
        self._is_paused = True

    def resume_reading(self) -> None:
        """Deliver what was kept."""
        if self._is_paused:
            self._is_paused = False
            asyncio.get_running_loop().call_soon(self._deliver)

    def get_write_buffer_size(self) -> int:
        """Return 0: what is written is the network's."""
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol take over."""
        assert isinstance(protocol, asyncio.Protocol)
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Return who takes what arrives."""
        return self._protocol

    # ChannelEnd

    def received(self, data: bytes) -> None:
        """See `ChannelEnd`."""
        self._unread.append(data)
        self._deliver()

    def writable(self) -> None:
        """See `ChannelEnd`."""
        if self._is_full:
            self._is_full = False
            self._protocol.resume_writing()

    def closed(self) -> None:
        """See `ChannelEnd`."""
        self._has_ended = True
        self._deliver()

    def _deliver(self) -> None:
        while self._unread and not self._is_paused:
            data = self._unread.pop(0)
            if not self._is_closing:
                self._protocol.data_received(data)
        if self._has_ended and not (self._unread and self._is_paused):
            self._has_ended, self._is_closing = False, True
            self._protocol.connection_lost(None)


class MemoryServer:
    """A server that listens at a node."""

    def __init__(self, plane: MemoryRequests) -> None:
        self._plane = plane
        self.sockets: tuple[Any, ...] = ()

    def close(self) -> None:
        """Accept no more connections; those that are open stay open."""
        self._plane.deafen()

    async def wait_closed(self) -> None:
        """Return at once."""


async def create_server(
    factory: Factory, host: str | None = None, port: int | None = None, *, sock: Any = None, **_: Any
) -> MemoryServer:
    """Listen, as `loop.create_server` does."""
    node = this_node()
    number = sock.getsockname()[1] if sock is not None else port
    assert number
    plane = MemoryRequests(node, number, timeout_s=FOREVER_S, is_direct=True)

    def accept(channel: Channel) -> ChannelEnd:
        return _begin(factory, channel, (node.name, number), ("client", 0))

    await plane.listen(accept)
    return MemoryServer(plane)


async def create_connection(
    factory: Factory, host: str, port: int, **_: Any
) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
    """Connect, as `loop.create_connection` does.

    Raises:
        OSError: nobody listens there.
    """
    node = this_node()
    made: list[MemoryTransport] = []

    def accept(channel: Channel) -> ChannelEnd:
        made.append(_begin(factory, channel, (node.name, 0), (host, port)))
        return made[0]

    await MemoryRequests(node, 0, timeout_s=FOREVER_S, is_direct=True).dial(f"memory:{host}/{port:x}", accept)
    return made[0], made[0].get_protocol()


def _begin(factory: Factory, channel: Channel, ours: tuple[str, int], theirs: tuple[str, int]) -> MemoryTransport:
    protocol = factory()
    assert isinstance(protocol, asyncio.Protocol)
    transport = MemoryTransport(channel, protocol, (ours, theirs))
    protocol.connection_made(transport)
    return transport


class MemoryConnector(aiohttp.BaseConnector):
    """Connects aiohttp's clients again for each request: connections that are kept would be closed by the real clock."""

    def __init__(self, network: Network) -> None:
        super().__init__(force_close=True)
        self._network = network

    async def _create_connection(self, req: aiohttp.ClientRequest, traces: Any, timeout: Any) -> ResponseHandler:
        """Connect to a program whose name begins with the host; chance decides, as the kernel does for a shared port."""
        host, port = req.url.host or "", req.url.port or 0
        sharing = [
            listener.node.name
            for address, listener in self._network.listeners.items()
            if address.endswith(f"/{port:x}") and listener.node.name.startswith(host)
        ]
        if not sharing:
            raise aiohttp.ClientConnectionError(f"nobody listens at {host}:{port}")
        made = await create_connection(self._factory, world().entropy.choice(sharing), port)
        protocol = made[1]
        assert isinstance(protocol, ResponseHandler)
        return protocol
