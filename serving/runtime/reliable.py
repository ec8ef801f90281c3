"""Reliable bytes over messages that may be lost, repeated or reordered: sequence numbers, acknowledgements, go back N.

Pure: the channel that carries the segments decides when to send. A segment is (number, acknowledged, kind, bytes):
`acknowledged` is the number that its sender expects next, so everything before it has arrived.

What a segment does at its receiver, which expects number `expected`:

    kind    number               what happens                                                      answer
    any     any                  forget what we sent before `acknowledged`                         -
    DATA    `expected`           deliver its bytes, expect the next                                later: an ACK
    DATA    after `expected`     a gap: drop it, the sender resends it                             LOST, once a gap
    DATA    before `expected`    a repetition: our ACK was lost                                    later: an ACK
    ACK     after `expected`     the last DATA is lost                                             LOST, once a gap
    BYE     any                  the sender sends nothing more; a gap is treated as with ACK       LOST, once a gap
    LOST    any                  go back N                                                         all unacknowledged DATA

ACK, LOST and BYE carry the number of the next DATA and do not use it up. The channel's timer covers the rest: it
sends an ACK, lets the next gap ask again, and resends DATA that stays unacknowledged.
"""

import struct
from collections import deque

_header = struct.Struct("<QQB")
HEADER_BYTES = _header.size
DATA, ACK, LOST, BYE = 0, 1, 2, 3
"""Kinds: bytes; an acknowledgement; an acknowledgement that asks for everything after it; the end."""

WINDOW_BYTES = 2 << 20
"""How much may be sent without acknowledgement before the channel is full."""

ACK_EVERY = 64


class ReliableStream:
    """One side of a channel."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether the other side sends nothing more."""
        self._next = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._expected = 0
        self._acknowledged = 0  # the `_expected` that was sent last
        self._has_asked = False

    @property
    def is_full(self) -> bool:
        """Whether the window is used up."""
        return self._bytes >= WINDOW_BYTES

    @property
    def has_unacknowledged(self) -> bool:
        """Whether something we sent may be lost."""
        return bool(self._unacknowledged)

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether an acknowledgement should be sent soon."""
        return self._acknowledged != self._expected

    @property
    def is_late_with_acknowledgement(self) -> bool:
        """Whether it should be sent now."""
        return self._expected - self._acknowledged >= ACK_EVERY

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
        """Return all unacknowledged segments, to resend them."""
        return [self._segment(number, DATA, data) for number, data in self._unacknowledged]

    def receive(self, segment: bytes) -> tuple[bytes | None, list[bytes]]:
        """Process a segment; return its bytes if it is the next one, and the segments to answer with.

        Raises:
            ValueError: it is not a segment.
        """
        if len(segment) < HEADER_BYTES:
            raise ValueError(f"a segment of {len(segment)} bytes; expected at least {HEADER_BYTES}")
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
        self._acknowledged = -1  # a repetition: our acknowledgement was lost
        return None, []

    def _ask(self) -> bytes:
        self._has_asked = True
        return self.acknowledge(LOST)

    def forget_asking(self) -> None:
        """Ask again at the next gap: the LOST or its answer may have been lost."""
        self._has_asked = False

    def _segment(self, number: int, kind: int, data: bytes) -> bytes:
        self._acknowledged = self._expected
        return _header.pack(number, self._expected, kind) + data
