"""Notices between the agents of prefill and decode workers, of at most `MAX_NOTICE_BYTES`; one may arrive twice, or never.

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

from serving.engines.kv.params import Id, RemoteKv, RoomNumber, Whole

MAX_BLOCKS = 150
"""Most blocks in one notice."""

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
    """Where a part of the KV is that the reader in a room waits for."""

    room: RoomNumber
    kv: RemoteKv
    """All but its blocks, and its agent, which the reader knows."""
    first: Whole
    num_blocks: Whole
    blocks: Annotated[list[tuple[Whole, Whole]], Meta(max_length=MAX_BLOCKS)]
    """Slots and generations."""


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
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return notice


def parts(room: int, kv: RemoteKv) -> Iterator[Offered]:
    """Divide an offer into notices."""
    blocks = list(zip(kv.remote_block_ids, kv.remote_generations, strict=True))
    bare = msgspec.structs.replace(kv, remote_block_ids=[], remote_generations=[], remote_agent={})
    for first in range(0, len(blocks), MAX_BLOCKS):
        yield Offered(room, bare, first, len(blocks), blocks[first : first + MAX_BLOCKS])


class Assembly:
    """The parts of an offer that have arrived."""

    def __init__(self, num_blocks: int, agent: dict[str, Any]) -> None:
        """Wait for this agent's offer of `num_blocks` blocks."""
        self._num_blocks = num_blocks
        self._agent = agent
        self._parts: dict[int, list[tuple[int, int]]] = {}

    def add(self, part: Offered) -> RemoteKv | None:
        """Add a part; return the whole offer if it is complete."""
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
