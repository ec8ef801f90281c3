"""Channels on a memory network: directly between two nodes, as sockets are, or over a server, as with NATS."""

import asyncio
import math
from collections.abc import Callable
from contextvars import Context, copy_context

from serving.runtime.memory.broker import Broker
from serving.runtime.memory.node import Link, Node
from serving.runtime.memory.server import UNREACHABLE, Line, reason
from serving.runtime.outages import ANSWER_S, Outages
from serving.runtime.ports import Channel, ChannelEnd

HIGH_WATER_BYTES = 1 << 20
"""Bytes that the other side has not received at which a channel is full."""

LOW_WATER_BYTES = HIGH_WATER_BYTES // 4
"""Bytes at which it has room again, as asyncio's transports do."""

DIAL_S = 127.0
"""How long a kernel tries to connect to a machine that is silent."""

BROKERED_DIAL_S = 3.0
"""How long a process may take to answer over a server."""

SETTLE_S = 3.0
"""How long after a server's return the silence of others means nothing."""

Accept = Callable[[Channel], ChannelEnd]


class MemoryChannel:
    """One end of a channel."""

    def __init__(self, plane: "MemoryRequests", context: Context) -> None:
        """Prepare an end; what it receives is received in this context. `join` connects two."""
        self.is_full = False
        self.is_read_later = False
        """Whether our end reports what it has read (`count_read`); by default it has read what it received."""
        self.is_damaged = False
        """Whether a bit of what was sent was wrong, either way."""
        self.node = plane.node
        self.peer = self
        self._plane = plane
        self.context = context
        self._link = Link(plane.node, plane.node)
        self._end: ChannelEnd | None = None
        self._num_unread = 0
        self._is_closed = False

    @property
    def ends(self) -> tuple[Node, Node]:
        """See `Wire`."""
        return self.node, self.peer.node

    @property
    def is_cut(self) -> bool:
        """Whether the server between the two is away, or has just returned; without one, nobody can know."""
        return self._plane.is_cut

    @property
    def outage(self) -> str:
        """Why calls without any answer should wait no longer for the server; empty while they should."""
        return self._plane.outage

    def count_given_up(self) -> None:
        """Count a call that was given up because of this."""
        self._plane.count_given_up()

    def join(self, peer: "MemoryChannel", via: Broker | None) -> None:
        """Send to the other end."""
        self.peer = peer
        self._link = Link(self.node, peer.node, peer.context, via=via)
        self.node.network.wires[self] = None

    def open_peer(self, accept: Accept, then: Callable[[], object] | None = None) -> None:
        """Let the other end begin, before anything that is written here reaches it."""
        self._link.send(self.peer.open, accept, then)

    def write(self, data: bytes) -> None:
        """Send."""
        if self._is_closed:
            return
        if self.peer.node.is_dead and self.node.network.nodes[self.peer.node.name] is not self.peer.node:
            self._break_soon()  # its machine is there again, and knows nothing of this channel
            return
        self._num_unread += len(data)
        self.is_full = self.is_full or self._num_unread > HIGH_WATER_BYTES
        self._link.send(self.peer.receive, bytes(data))

    def close(self) -> None:
        """Send what was written, then hang up."""
        if not self._is_closed:
            self._forget()
            self._link.send(self.peer.finish)
            asyncio.get_running_loop().call_soon(self._report_closed, context=self.context)

    def reset(self) -> None:
        """See `Wire`."""
        self._link.lose()
        self._break_soon()

    def end(self, node: Node, *, is_lost: bool) -> None:
        """See `Wire`: what a process has written still arrives, and its kernel hangs up."""
        if node is self.node and not self._is_closed:
            if not is_lost:
                self._link.send(self.peer.finish)
            self._forget()

    def open(self, accept: Accept, then: Callable[[], object] | None) -> None:
        """Begin, as the other end asks."""
        if self._is_closed:  # who dialled has given up
            self._forget()
            self._link.send(self.peer.finish)
            return
        self._end = accept(self)
        if then is not None:
            then()

    def receive(self, data: bytes) -> None:
        """Bytes have arrived."""
        if self._is_closed or self._end is None:
            self.peer.on_read(len(data))
            return
        if not self.is_read_later:
            self.peer.on_read(len(data))
        self._end.received(data)

    def count_read(self, num_bytes: int) -> None:
        """Count bytes that our end has read later than it received them."""
        self.peer.on_read(num_bytes)

    def on_read(self, num_bytes: int) -> None:
        """The other side has received this much."""
        self._num_unread -= num_bytes
        if self.is_full and self._num_unread <= LOW_WATER_BYTES:
            self.is_full = False
            asyncio.get_running_loop().call_soon(self._report_room, context=self.context)

    def _report_room(self) -> None:
        if self._end is not None and not self._is_closed:
            self._end.writable()

    def _report_closed(self) -> None:
        if self._end is not None:
            self._end.closed()

    def _break_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.finish, context=self.context)

    def finish(self) -> None:
        """The other side has hung up, or the connection broke."""
        if not self._is_closed:
            self._forget()
            self._report_closed()

    def _forget(self) -> None:
        self._is_closed = True
        self._plane.forget(self)
        self.node.network.wires.pop(self, None)


class MemoryRequests:
    """The request plane of a process."""

    def __init__(self, node: Node, instance_id: int, *, timeout_s: float = math.inf, is_direct: bool = False) -> None:
        """Prepare to listen.

        Args:
            node: the process.
            instance_id: of the runtime: a node may have several.
            timeout_s: how long calls without any answer wait for a server that is away.
            is_direct: whether channels are direct even if the network has a server for requests.
        """
        self.node = node
        self.context = copy_context()
        self.outages: Outages | None = None
        self.accept: Accept | None = None
        self._broker = None if is_direct else node.network.broker
        self._timeout_s = timeout_s
        self._address = f"memory:{node.name}/{instance_id:x}"
        self._channels: dict[MemoryChannel, None] = {}
        self._following: asyncio.Task[None] | None = None
        self._back_s = -SETTLE_S
        if self._broker is not None:
            self._line = Line(node, self._broker)
            self.outages = Outages(
                "broker",
                "the server for requests",
                consequence=f"calls wait for it, those without any answer for {timeout_s:g} s",
                carries_requests=True,
            )
            following = self.outages.follow(self._ask, UNREACHABLE, reason)
            self._following = asyncio.create_task(following)

    @property
    def is_cut(self) -> bool:
        """Whether the server is away, or has just returned."""
        return self.outages is not None and (
            self.outages.is_away or asyncio.get_running_loop().time() - self._back_s < SETTLE_S
        )

    @property
    def outage(self) -> str:
        """Why calls without any answer should wait no longer for the server; empty while they should."""
        return str(self.outages) if self.outages is not None and self.outages.seconds > self._timeout_s else ""

    def count_given_up(self) -> None:
        """Count a call that was given up because of this."""
        if self.outages is not None:
            self.outages.num_given_up += 1

    async def listen(self, accept: Accept) -> str:
        """Accept channels; return the address to dial."""
        self.context, self.accept = copy_context(), accept
        self.node.network.listen(self._address, self)
        return self._address

    async def dial(self, address: str, accept: Accept) -> Channel:
        """Open a channel.

        Raises:
            OSError: nobody listens there, or the machine is silent.
        """
        kind, _, place = address.partition(":")
        if kind != "memory":
            raise OSError(f"an instance at {address} is not on this memory network")
        host = self.node.network.nodes.get(place.partition("/")[0])
        if host is None:
            raise ConnectionRefusedError(f"there is no machine for {address}")
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        channel = MemoryChannel(self, copy_context())
        self._channels[channel] = None

        def settle() -> None:
            if not opened.done():
                opened.set_result(None)

        def refuse() -> None:
            if not opened.done():
                opened.set_exception(ConnectionRefusedError(f"nobody listens at {address}"))

        def knock() -> None:
            listener = self.node.network.listeners.get(address)
            if isinstance(listener, MemoryRequests) and listener.accept is not None:
                listener.admit(channel, listener.accept).open_peer(accept, settle)
            else:
                Link(host.kernel, self.node, channel.context, via=self._broker).send(refuse)

        # A kernel accepts connections even for a process that hangs; over a server, the process itself must answer.
        door = host.kernel if self._broker is None or host.is_dead else host
        Link(self.node, door, via=self._broker).send(knock)
        try:
            async with asyncio.timeout(DIAL_S if self._broker is None else BROKERED_DIAL_S):
                await opened
        except BaseException:
            channel.close()
            raise
        return channel

    def admit(self, caller: MemoryChannel, accept: Accept) -> MemoryChannel:
        """Return our end of a channel; it begins before anything arrives."""
        channel = MemoryChannel(self, self.context)
        self._channels[channel] = None
        channel.join(caller, self._broker)
        caller.join(channel, self._broker)
        caller.open_peer(accept)
        return channel

    def forget(self, channel: MemoryChannel) -> None:
        """Drop a channel that is closed."""
        self._channels.pop(channel, None)

    async def stop_listening(self) -> None:
        """Accept no more channels; those that are open stay open."""
        self.deafen()

    def deafen(self) -> None:
        """Do the same at once."""
        self.accept = None
        self.node.network.listeners.pop(self._address, None)

    async def close(self) -> None:
        """Close every channel and stop listening."""
        await self.stop_listening()
        for channel in list(self._channels):
            channel.close()
        if self._following is not None:
            self._following.cancel()

    async def _ask(self) -> None:
        assert self._broker is not None and self.outages is not None
        async with asyncio.timeout(ANSWER_S):
            await self._line.ask(self._broker.ping)
        if self.outages.is_away:
            self._back_s = asyncio.get_running_loop().time()
