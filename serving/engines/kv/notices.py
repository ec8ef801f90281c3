"""Notices between the agents of prefill and decode workers, of at most `MAX_NOTICE_BYTES`; one may arrive twice, or never.

decode worker                              prefill worker
Renew: it will still read     --------->   source first: extends the leases
Read: it has, or never will   --------->   frees the blocks
Begin: it has blocks          --------->   destination first: computes the prompt
                              <---------   Offered: where its KV is
Wait: it has no blocks yet    <-------->   Wait: the prompt is queued, or being computed
Left: it needs no more        <-------->   Left: there will be no KV
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from serving.engines.kv.params import Id, RemoteKv, RoomNumber

MAX_RENEWED = 50
"""Most requests, or rooms, in one notice."""


class Renew(msgspec.Struct, tag="renew", array_like=True, frozen=True):
    """These will still be read."""

    requests: Annotated[list[Id], Meta(max_length=MAX_RENEWED)]


class Read(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """This was read, or never will be."""

    request: Id


class Begin(msgspec.Struct, tag="begin", array_like=True, frozen=True):
    """There are blocks for the prompt of a room; repeated until its KV is offered."""

    room: RoomNumber
    reader: dict[str, Any]
    """The agent that will read the KV."""


class Offered(msgspec.Struct, tag="offered", array_like=True, frozen=True):
    """Where the KV is that the reader in a room waits for."""

    room: RoomNumber
    kv: RemoteKv
    """All but its agent, which the reader knows."""


class Wait(msgspec.Struct, tag="wait", array_like=True, frozen=True):
    """On our side it is not the turn of these rooms yet: the other side should keep waiting."""

    rooms: Annotated[list[RoomNumber], Meta(max_length=MAX_RENEWED)]


class Left(msgspec.Struct, tag="left", array_like=True, frozen=True):
    """Nobody is in that room any more."""

    room: RoomNumber
    reason: Annotated[str, Meta(max_length=500)] = ""
    kind: Annotated[str, Meta(pattern="^(lost|overloaded)$")] = "lost"
    """The kind of a `CallError`."""


Notice = Renew | Read | Begin | Offered | Wait | Left

encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(Notice)


def decode(data: bytes) -> Notice | None:
    """Decode a notice; return None if it is not one that we know."""
    try:
        notice: Notice = _decoder.decode(data)
    except (ValueError, RecursionError):  # text that is not UTF-8 is no error of msgspec
        return None
    return notice
