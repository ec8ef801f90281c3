"""What the agents of prefill and decode workers tell each other, in at most `MAX_NOTICE_BYTES`; it may come twice, or never.

decode worker                              prefill worker
Renew: it will still read     --------->   source first: extends the leases
Read: it has, or never will   --------->   frees the blocks
Begin: it has blocks          --------->   destination first: computes the prompt
                              <---------   Offered: where its KV is, in parts
Wait: it has no blocks yet    <-------->   Wait: the prompt is queued, or being computed
Left: it needs no more        <-------->   Left: there will be no KV
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from serving.engines.kv_params import Id, RemoteKv, RoomNumber, Whole

MAX_BLOCKS = 150
"""In one notice."""

MAX_RENEWED = 50
"""Requests, or rooms, in one notice."""


class Renew(msgspec.Struct, tag="renew", array_like=True, frozen=True):
    """These will still be read."""

    requests: Annotated[list[Id], Meta(max_length=MAX_RENEWED)]


class Read(msgspec.Struct, tag="read", array_like=True, frozen=True):
    """This was read, or never will be."""

    request: Id


class Begin(msgspec.Struct, tag="begin", array_like=True, frozen=True):
    """There are blocks for the prompt of a room; said again and again until its KV is offered."""

    room: RoomNumber
    reader: dict[str, Any]
    """The agent that will read it."""


class Offered(msgspec.Struct, tag="offered", array_like=True, frozen=True):
    """Where a part of the KV is for which those in a room wait."""

    room: RoomNumber
    kv: RemoteKv
    """All of it but its blocks and its agent, which the reader knows."""
    first: Whole
    num_blocks: Whole
    blocks: Annotated[list[tuple[Whole, Whole]], Meta(max_length=MAX_BLOCKS)]
    """Slots and generations."""


class Wait(msgspec.Struct, tag="wait", array_like=True, frozen=True):
    """It is not their turn yet on our side: whoever is in these rooms, too, is to go on waiting."""

    rooms: Annotated[list[RoomNumber], Meta(max_length=MAX_RENEWED)]


class Left(msgspec.Struct, tag="left", array_like=True, frozen=True):
    """Nobody is in that room any more."""

    room: RoomNumber
    reason: Annotated[str, Meta(max_length=500)] = ""
    kind: Annotated[str, Meta(pattern="^(lost|overloaded)$")] = "lost"
    """That of a `CallError`."""


Notice = Renew | Read | Begin | Offered | Wait | Left

encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(Notice)


def decode(data: bytes) -> Notice | None:
    """Return what a notice says, None if it says nothing that we know."""
    try:
        notice: Notice = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return notice


def parts(room: int, kv: RemoteKv) -> Iterator[Offered]:
    """Cut an offer into notices."""
    blocks = list(zip(kv.remote_block_ids, kv.remote_generations, strict=True))
    bare = msgspec.structs.replace(kv, remote_block_ids=[], remote_generations=[], remote_agent={})
    for first in range(0, len(blocks), MAX_BLOCKS):
        yield Offered(room, bare, first, len(blocks), blocks[first : first + MAX_BLOCKS])


class Assembly:
    """The parts of an offer that have come."""

    def __init__(self, num_blocks: int, agent: dict[str, Any]) -> None:
        """Wait for an offer of so many blocks, by this agent."""
        self._num_blocks = num_blocks
        self._agent = agent
        self._parts: dict[int, list[tuple[int, int]]] = {}

    def add(self, part: Offered) -> RemoteKv | None:
        """Take in a part, and return the whole if it is complete."""
        if part.num_blocks != self._num_blocks or part.first >= self._num_blocks:
            return None
        self._parts[part.first] = part.blocks
        blocks = [block for first in sorted(self._parts) for block in self._parts[first]]
        if len(blocks) < self._num_blocks:
            return None
        return msgspec.structs.replace(
            part.kv,
            remote_block_ids=[slot for slot, _ in blocks],
            remote_generations=[generation for _, generation in blocks],
            remote_agent=self._agent,
        )
