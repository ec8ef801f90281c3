"""Channels over NATS: two subjects, one each way; what the connection loses is sent again."""

import asyncio
from collections.abc import Callable

from serving.runtime.nats_connection import NatsConnection
from serving.runtime.ports import ChannelEnd
from serving.runtime.reliable import BYE, HEADER_BYTES, ReliableStream

SEGMENT_BYTES = 512 * 1024
"""Bytes in one message of a channel; fewer if the server accepts fewer (1 MiB by default)."""

ACK_DELAY_S = 0.02
PROBE_S = 0.5
"""How often a channel resends what was not acknowledged, and asks whether its peer is there."""


class NatsChannel:
    """One channel; it collects what is written in one turn of the loop into one segment."""

    def __init__(
        self, connection: NatsConnection, subject: str, peer: str, forget: Callable[["NatsChannel"], None]
    ) -> None:
        """Prepare to send to the subject `peer`; segments for us at `subject` are passed to `on_segment`.

        Args:
            connection: carries it.
            subject: where we listen.
            peer: where the other side listens.
            forget: is called once the channel is closed.
        """
        self.is_full = False
        self.subject = subject
        self.end: ChannelEnd | None = None
        self._connection = connection
        self._peer = peer
        self._forget = forget
        self._stream = ReliableStream()
        self._pending = bytearray()
        self._will_flush = False
        self._will_acknowledge = False
        self._is_closed = False
        self._probing = asyncio.create_task(self._probe())

    @property
    def is_cut(self) -> bool:
        """Whether we, or perhaps the other side, have no connection to the server."""
        return not self._connection.is_settled

    @property
    def outage(self) -> str:
        """Why calls without any answer should wait no longer; empty while they should."""
        return self._connection.outage

    def count_given_up(self) -> None:
        """Count a call that was given up because of this."""
        self._connection.outages.num_given_up += 1

    def write(self, data: bytes) -> None:
        """Send."""
        self._pending += data
        if not self._will_flush:
            self._will_flush = True
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """Send what is pending, then hang up."""
        if not self._is_closed:
            self._flush()
            self._send(self._stream.acknowledge(BYE))
            self._finish()

    def on_segment(self, segment: bytes) -> None:
        """Process a message for this channel."""
        if self._is_closed:
            return
        data, answers = self._stream.receive(segment)
        for answer in answers:
            self._send(answer)
        if data is not None and self.end is not None:
            self.end.received(data)
        if self._stream.is_closed:
            self._finish()
        elif self._stream.is_late_with_acknowledgement:
            self._send(self._stream.acknowledge())
        elif self._stream.owes_acknowledgement and not self._will_acknowledge:
            self._will_acknowledge = True
            asyncio.get_running_loop().call_later(ACK_DELAY_S, self._acknowledge)
        if self.is_full and not self._stream.is_full:
            self.is_full = False
            if self.end is not None:
                self.end.writable()

    def on_nobody(self) -> None:
        """NATS reports that nobody listens on the other side."""
        if not self._is_closed and self._connection.is_settled:
            self._finish()

    def _flush(self) -> None:
        self._will_flush = False
        data = bytes(self._pending)
        self._pending.clear()
        size = min(SEGMENT_BYTES, self._connection.max_payload - HEADER_BYTES)
        for start in range(0, len(data), size):
            self._send(self._stream.seal(data[start : start + size]))
        self.is_full = self._stream.is_full

    def _acknowledge(self) -> None:
        self._will_acknowledge = False
        if not self._is_closed and self._stream.owes_acknowledgement:
            self._send(self._stream.acknowledge())

    def _send(self, segment: bytes, reply: str = "") -> None:
        self._connection.send(self._peer, segment, reply)

    async def _probe(self) -> None:
        lost_for = 0
        while True:
            await asyncio.sleep(PROBE_S)
            self._stream.forget_asking()
            self._send(self._stream.acknowledge(), self.subject)
            lost_for = lost_for + 1 if self._stream.has_unacknowledged else 0
            if lost_for >= 2:
                lost_for = 0
                for segment in self._stream.again():
                    self._send(segment)

    def _finish(self) -> None:
        self._is_closed = True
        self._probing.cancel()
        self._forget(self)
        if self.end is not None:
            self.end.closed()
