"""Writing in few system calls: each costs as much as parsing a small request, and wakes the other side."""

import asyncio

AT_ONCE = 8
"""This many small messages are sent without waiting for the turn's end: the other side may begin with them."""

AT_ONCE_BYTES = 16 * 1024


class TurnTransport:
    """A transport that sends what is written in a turn of the loop together, at its end."""

    __slots__ = ("_loop", "_num_bytes", "_parts", "_transport", "abort", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.abort = transport.abort
        self.is_closing = transport.is_closing
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        """Send with what else is written in this turn, unless that is much."""
        self._hold(data)
        if len(self._parts) >= AT_ONCE or self._num_bytes > AT_ONCE_BYTES:
            self.flush()

    def write_answer(self, data: bytes) -> None:
        """Send the part of an answer over HTTP: the head with what follows it in this turn, all else at once."""
        self._hold(data)
        if not data.startswith(b"HTTP/"):
            self.flush()

    def flush(self) -> None:
        """Send now. Once the other side is gone, uvloop would raise before it reports that."""
        parts, self._parts, self._num_bytes = self._parts, [], 0
        if parts and not self.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def write_eof(self) -> None:
        """Send what was written, and that nothing follows."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Send what was written, then hang up."""
        self.flush()
        self._transport.close()

    def _hold(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._num_bytes += len(data)
