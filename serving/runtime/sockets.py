"""Requests over sockets: Unix sockets where discovery is a folder of this host, else TCP."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import cast

from serving.runtime.ports import Channel, ChannelEnd, RuntimeUnavailableError

HIGH_WATER_BYTES = 1 << 20
Accept = Callable[[Channel], ChannelEnd]


class SocketChannel(asyncio.Protocol):
    """One connection."""

    def __init__(self, accept: Accept, channels: set["SocketChannel"]) -> None:
        self.is_full = False
        self.is_cut = False
        self._accept = accept
        self._channels = channels
        self._end: ChannelEnd | None = None
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take up the connection."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by class
        self._transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._channels.add(self)
        self._end = self._accept(self)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        assert self._end is not None
        self._end.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell that the other side is gone."""
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
        """Send."""
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        """Send what is buffered, then hang up."""
        if self._transport is not None:
            self._transport.close()


class SocketPlane:
    """The request plane over Unix sockets or TCP."""

    def __init__(self, *, path: Path | None = None, host: str = "127.0.0.1") -> None:
        """Prepare to listen on a Unix socket at `path`, or without one on a TCP port of `host`."""
        self._path = path
        self._host = host
        self._channels: set[SocketChannel] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, accept: Accept) -> str:
        """Accept channels; return the address to dial."""
        loop = asyncio.get_running_loop()
        if self._path is None:
            self._server = await loop.create_server(lambda: SocketChannel(accept, self._channels), self._host, 0)
            return f"tcp:{self._host}:{self._server.sockets[0].getsockname()[1]}"
        try:
            self._server = await loop.create_unix_server(lambda: SocketChannel(accept, self._channels), str(self._path))
        except OSError as error:
            raise RuntimeUnavailableError(
                f"cannot listen at {self._path}: {error}; a shorter --discovery-dir may help"
            ) from error
        return f"unix:{self._path}"

    async def dial(self, address: str, accept: Accept) -> Channel:
        """Open a channel."""
        loop = asyncio.get_running_loop()
        kind, _, place = address.partition(":")
        if kind == "unix":
            _, channel = await loop.create_unix_connection(lambda: SocketChannel(accept, self._channels), place)
        elif kind == "tcp":
            host, _, port = place.rpartition(":")
            _, channel = await loop.create_connection(lambda: SocketChannel(accept, self._channels), host, int(port))
        else:
            raise OSError(f"an instance at {address} needs another request plane than sockets")
        return channel

    async def close(self) -> None:
        """Close every channel and stop listening."""
        if self._server is not None:
            self._server.close()
        for channel in list(self._channels):
            channel.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
