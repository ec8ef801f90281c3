"""The messages between an owner and a reader on a connection.

owner                                         reader
WELCOME, its id  (+ its memory's handle)  -->              after both have proven who they are
                                          <--  its id
                                          <--  READ, length, where and how much, ...
DONE, 0, the bytes in that order          -->
                                          <--  NOTICE, length, the notice
DONE, 0                                   -->
REFUSED, length, why                      -->              instead of any answer; then it hangs up
"""

import struct
from collections.abc import Sequence

from serving.transfer.agent import MAX_NOTICE_BYTES, Piece, TransferError
from serving.transfer.stream import Stream

WELCOME = b"dynabench-kv/1\n"
ID_BYTES = 16

READ, NOTICE = 1, 2
DONE, REFUSED = 0, 1

MAX_PIECES = 16_384
"""The pieces in one request; a reader that needs more sends another."""

MAX_REASON_BYTES = 1024

HEADER = struct.Struct("<BI")
PLACE = struct.Struct("<QQ")

MAX_BODY_BYTES = {READ: MAX_PIECES * PLACE.size, NOTICE: MAX_NOTICE_BYTES}


def read_request(pieces: Sequence[Piece]) -> bytes:
    """Return the request for pieces of an owner's memory."""
    places = b"".join(PLACE.pack(piece.source, piece.num_bytes) for piece in pieces)
    return HEADER.pack(READ, len(places)) + places


def refusal(why: str) -> bytes:
    """Return the answer to a request that is refused."""
    reason = why.encode()[:MAX_REASON_BYTES]
    return HEADER.pack(REFUSED, len(reason)) + reason


async def expect_done(stream: Stream) -> None:
    """Receive the start of an owner's answer.

    Raises:
        TransferError: it refuses.
    """
    status, length = HEADER.unpack(await stream.receive(HEADER.size))
    if (status, length) == (DONE, 0):
        return
    if status != REFUSED or length > MAX_REASON_BYTES:
        raise TransferError(f"the owner's answer ({status}, {length}) does not follow this protocol", "refused")
    reason = (await stream.receive(length)).decode(errors="replace")
    raise TransferError(f"the owner refuses: {reason}", "refused")


async def leave_notice(stream: Stream, notice: bytes) -> None:
    """Send an owner a notice, and wait until it accepts it.

    Raises:
        TransferError: it refuses.
    """
    await stream.send(HEADER.pack(NOTICE, len(notice)) + notice)
    await expect_done(stream)
