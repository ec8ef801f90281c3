"""What uvicorn is given instead of a transport and its flow control, so that connections can pause and linger."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Reading is paused as long as uvicorn wants it (a handler does not read) or we do (the queue is full)."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.is_held = False

    def pause_reading(self) -> None:
        """Pause for uvicorn."""
        if not self.read_paused:
            self.read_paused = True
            if not self.is_held:
                self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on for uvicorn, unless held."""
        if self.read_paused:
            self.read_paused = False
            if not self.is_held:
                self._transport.resume_reading()

    def hold(self) -> None:
        """Pause for the connection until `release`."""
        if not self.is_held:
            self.is_held = True
            if not self.read_paused:
                self._transport.pause_reading()

    def release(self) -> None:
        """Read on, unless uvicorn has paused it."""
        if self.is_held:
            self.is_held = False
            if not self.read_paused:
                self._transport.resume_reading()


class Transport:
    """The transport as uvicorn sees it: closing it lets a client read the answer to a request that it still sends."""

    __slots__ = ("close", "get_extra_info", "is_closing", "write")

    def __init__(
        self, transport: asyncio.Transport, *, close: Callable[[], None], is_closing: Callable[[], bool]
    ) -> None:
        self.write = transport.write
        self.get_extra_info = transport.get_extra_info
        self.close = close
        self.is_closing = is_closing
