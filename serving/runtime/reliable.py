"""Reliable bytes over messages that may be lost, repeated or reordered: sequence numbers, acknowledgements, go back N.

Pure: the plane that carries the segments decides when. A segment is (sequence number, acknowledged up to, kind, bytes).
"""

import struct
from collections import deque

_header = struct.Struct("<QQB")
HEADER_BYTES = _header.size
DATA, ACK, LOST, BYE = 0, 1, 2, 3
"""Kinds: bytes; an acknowledgement; an acknowledgement that asks for what follows it; the end."""

WINDOW_BYTES = 2 << 20
"""Sent and not yet acknowledged: beyond, the channel is full."""

ACK_EVERY = 64


class ReliableStream:
    """One side of a channel."""

    def __init__(self) -> None:
        self.is_closed = False
        """The other side said that it was done."""
        self._next = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._expected = 0
        self._told = 0  # what the other side knows of `_expected`
        self._has_asked = False

    @property
    def is_full(self) -> bool:
        """Whether the window is used up."""
        return self._bytes >= WINDOW_BYTES

    @property
    def has_unacknowledged(self) -> bool:
        """Whether something sent may have been lost."""
        return bool(self._unacknowledged)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether the other side should be told what has come."""
        return self._told != self._expected

    @property
    def is_late_with_acknowledgement(self) -> bool:
        """Whether it should be told at once."""
        return self._expected - self._told >= ACK_EVERY

    def seal(self, data: bytes) -> bytes:
        """Return the next segment, and keep its bytes until they are acknowledged."""
        number = self._next
        self._next += 1
        self._unacknowledged.append((number, data))
        self._bytes += len(data)
        return self._segment(number, DATA, data)

    def acknowledge(self, kind: int = ACK) -> bytes:
        """Return a segment without data."""
        return self._segment(self._next, kind, b"")

    def again(self) -> list[bytes]:
        """Return everything unacknowledged, to be sent once more."""
        return [self._segment(number, DATA, data) for number, data in self._unacknowledged]

    def receive(self, segment: bytes) -> tuple[bytes | None, list[bytes]]:
        """Take in a segment; return its bytes if they come in order, and what must be sent in answer.

        Raises:
            ValueError: it is no segment.
        """
        if len(segment) < HEADER_BYTES:
            raise ValueError(f"a segment of {len(segment)} bytes; at least {HEADER_BYTES} were expected")
        number, acknowledged, kind = _header.unpack_from(segment)
        while self._unacknowledged and self._unacknowledged[0][0] < acknowledged:
            self._bytes -= len(self._unacknowledged.popleft()[1])
        if kind == LOST:
            return None, self.again()
        if kind != DATA:
            self.is_closed |= kind == BYE
            if number > self._expected and not self._has_asked:
                return None, [self._ask()]
            return None, []
        if number == self._expected:
            self._expected += 1
            self._has_asked = False
            return segment[HEADER_BYTES:], []
        if number > self._expected:
            return None, [] if self._has_asked else [self._ask()]
        self._told = -1  # a repetition: our acknowledgement was lost
        return None, []

    def _ask(self) -> bytes:
        self._has_asked = True
        return self.acknowledge(LOST)

    def forget_asking(self) -> None:
        """Ask again at the next gap: the question or its answer may have been lost."""
        self._has_asked = False

    def _segment(self, number: int, kind: int, data: bytes) -> bytes:
        self._told = self._expected
        return _header.pack(number, self._expected, kind) + data
