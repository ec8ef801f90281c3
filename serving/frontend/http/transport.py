"""Replacements for uvicorn's transport and flow control that let connections pause and linger."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class PausableFlow(FlowControl):
    """Pauses reading while uvicorn wants it (a handler does not read) or we do (the queue is full)."""

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
        """Resume reading for uvicorn, unless held."""
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
        """Resume reading, unless uvicorn has paused it."""
        if self.is_held:
            self.is_held = False
            if not self.read_paused:
                self._transport.resume_reading()


class Transport:
    """The transport that uvicorn sees: after a close, a client that is still sending can read its answer."""

    __slots__ = ("close", "get_extra_info", "is_closing", "write")

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        write: Callable[[bytes], None],
        close: Callable[[], None],
        is_closing: Callable[[], bool],
    ) -> None:
        self.write = write
        self.get_extra_info = transport.get_extra_info
        self.close = close
        self.is_closing = is_closing
