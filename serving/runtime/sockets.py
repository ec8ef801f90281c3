"""Requests over sockets: Unix sockets if discovery is a folder of this host, else TCP.

A Unix socket is in a folder that is ours alone. Anyone may connect to a TCP port, so both sides first prove that they
know the cluster's token (`proof.py`). Little time, few bytes and few such connections at once are allowed for that.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from serving.runtime.cluster_token import ClusterToken
from serving.runtime.ports import Channel, ChannelEnd, RuntimeUnavailableError
from serving.runtime.private_folder import for_us_alone
from serving.runtime.proof import NONCE_BYTES, Handshake, ProofError
from serving.runtime.turn import TurnTransport
from serving.runtime.world import world

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 1 << 20
BACKLOG = 1024

PROOF_S = 5.0
"""How long a connection may take to prove itself."""

MAX_UNPROVEN = 64
"""Connections at a port that may be unproven at once; beyond that, the oldest is dropped. Ours take a millisecond."""

REFUSAL_GAP_S = 60.0
"""A host that is refused repeatedly is logged once in this time."""

Accept = Callable[[Channel], ChannelEnd]


class SocketChannel(asyncio.Protocol):
    """One connection."""

    def __init__(self, accept: Accept, channels: set["SocketChannel"]) -> None:
        self.is_full = False
        self.is_cut = False
        self.outage = ""
        self._accept = accept
        self._channels = channels
        self._end: ChannelEnd | None = None
        self._transport: TurnTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start using the connection."""
        wire = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        wire.set_write_buffer_limits(HIGH_WATER_BYTES)
        self._transport = TurnTransport(wire)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channels.add(self)
        self._end = self._accept(self)

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        assert self._end is not None
        self._end.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the other side is gone."""
        self._channels.discard(self)
        if self._end is not None:
            self._end.closed()

    def pause_writing(self) -> None:
        """The buffer is full."""
        self.is_full = True

    def resume_writing(self) -> None:
        """The buffer has room again."""
        self.is_full = False
        if self._end is not None:
            self._end.writable()

    def write(self, data: bytes) -> None:
        """Send with what else is written in this turn."""
        assert self._transport is not None
        self._transport.write(data)

    def count_given_up(self) -> None:
        """Do nothing: there is no outage here."""

    def close(self) -> None:
        """Send what is buffered, then hang up."""
        if self._transport is not None:
            self._transport.close()


class Unproven(asyncio.Protocol):
    """Replaces a channel until both sides have proven themselves."""

    def __init__(self, handshake: Handshake, channel: SocketChannel, unproven: dict["Unproven", None]) -> None:
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Empty once proven, else the reason for the refusal."""
        self.peer = ""
        self._handshake = handshake
        self._channel = channel
        self._unproven = unproven
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the proof."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = str((transport.get_extra_info("peername") or ("?",))[0])
        self._unproven[self] = None
        self._timer = asyncio.get_running_loop().call_later(PROOF_S, self.refuse, f"it took more than {PROOF_S:g} s")
        self._transport.write(self._handshake.start())

    def data_received(self, data: bytes) -> None:
        """Continue the proof."""
        assert self._transport is not None
        if self.outcome.done():
            return
        try:
            self._transport.write(self._handshake.feed(data))
        except ProofError as error:
            self.refuse(str(error))
            return
        if self._handshake.is_over:
            self._finish("")
            self._transport.set_protocol(self._channel)
            self._channel.connection_made(self._transport)
            if self._handshake.rest:
                self._channel.data_received(self._handshake.rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side hung up, as a side that refuses us does."""
        self._finish("it hung up before it proved that it knows this cluster's token")

    def refuse(self, why: str) -> None:
        """Hang up."""
        self._finish(why)
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, why: str) -> None:
        self._timer.cancel()
        self._unproven.pop(self, None)
        if not self.outcome.done():
            self.outcome.set_result(why)


class SocketPlane:
    """The request plane over Unix sockets or TCP."""

    outages = None
    """It needs no server."""

    def __init__(self, *, path: Path | None = None, host: str = "127.0.0.1", token: ClusterToken | None = None) -> None:
        """Prepare to listen on a Unix socket at `path`, else on a TCP port of `host` for callers with the token."""
        self._path = path
        self._host = host
        self._token = token
        self._accept: Accept | None = None
        self._channels: set[SocketChannel] = set()
        self._callers: dict[Unproven, None] = {}  # not proven yet, the oldest first
        self._listeners: dict[Unproven, None] = {}
        self._refused: dict[str, float] = {}
        self._address = ""
        self._server: asyncio.Server | None = None

    async def listen(self, accept: Accept) -> str:
        """Accept channels; return the address to dial."""
        self._accept = accept
        if self._path is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._admit, self._host, 0)
            self._address = f"tcp:{self._host}:{self._server.sockets[0].getsockname()[1]}"
            return self._address
        try:
            self._server = await self._bind(self._path, accept)
        except OSError as error:
            raise RuntimeUnavailableError(f"cannot listen at {self._path}: {error}") from error
        return f"unix:{self._path}"

    async def restore(self) -> None:
        """Listen again at our path after somebody removed its socket; connections stay."""
        if (removed := self._server) is not None and self._path is not None and self._accept is not None:
            fresh = await self._bind(self._path, self._accept)
            if self._server is removed:
                removed.close()
                self._server = fresh
            else:  # closed meanwhile
                fresh.close()
                self._path.unlink(missing_ok=True)

    async def dial(self, address: str, accept: Accept) -> Channel:
        """Open a channel."""
        loop = asyncio.get_running_loop()
        channel = SocketChannel(accept, self._channels)
        kind, _, place = address.partition(":")
        if kind == "unix":
            await loop.create_unix_connection(lambda: channel, place)
        elif kind == "tcp":
            if self._token is None:
                raise OSError(f"an instance at {address} needs etcd or Kubernetes, which holds the token for TCP")
            host, _, port = place.rpartition(":")
            unproven = Unproven(self._handshake(address, is_caller=True), channel, self._listeners)
            try:
                await loop.create_connection(lambda: unproven, host, int(port))
            except UnicodeError as error:
                raise OSError(f"{host!r} is not a host name: {error}") from error
            try:
                why = await unproven.outcome
            except asyncio.CancelledError:
                unproven.refuse("nobody is waiting for it")
                raise
            if why:
                self._say(address, f"{address} was not called: {why}")
                raise ConnectionRefusedError(why)
        else:
            raise OSError(f"an instance at {address} needs a request plane other than sockets")
        return channel

    async def stop_listening(self) -> None:
        """Accept no more channels; those that are open stay open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for caller in list(self._callers):
            caller.refuse("this process is stopping")
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Close every channel and stop listening."""
        await self.stop_listening()
        if self._token is not None:
            self._token.close()
        for unproven in list(self._listeners):
            unproven.refuse("this process is stopping")
        for channel in list(self._channels):
            channel.close()

    async def _bind(self, path: Path, accept: Accept) -> asyncio.Server:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with for_us_alone():
                listener.bind(str(path))
            loop = asyncio.get_running_loop()
            return await loop.create_unix_server(
                lambda: SocketChannel(accept, self._channels), sock=listener, backlog=BACKLOG
            )
        except OSError:
            listener.close()
            raise

    def _admit(self) -> Unproven:
        assert self._accept is not None
        if len(self._callers) >= MAX_UNPROVEN:
            next(iter(self._callers)).refuse(
                f"more than {MAX_UNPROVEN} connections have yet to prove that they know the token"
            )
        handshake = self._handshake(self._address, is_caller=False)
        caller = Unproven(handshake, SocketChannel(self._accept, self._channels), self._callers)
        caller.outcome.add_done_callback(lambda outcome: self._admitted(caller.peer, outcome.result()))
        return caller

    def _admitted(self, peer: str, why: str) -> None:
        if why and self._server is not None:
            self._say(peer, f"a connection from {peer} to {self._address} was refused: {why}")

    def _handshake(self, address: str, *, is_caller: bool) -> Handshake:
        assert self._token is not None, "TCP needs a token"
        return Handshake(self._token.value, address, world().entropy.randbytes(NONCE_BYTES), is_caller=is_caller)

    def _say(self, peer: str, text: str) -> None:
        now = world().now()
        if now - self._refused.get(peer, -REFUSAL_GAP_S) < REFUSAL_GAP_S:
            return
        if len(self._refused) >= 1000:
            self._refused.clear()
        self._refused[peer] = now
        log.warning("%s", text)
