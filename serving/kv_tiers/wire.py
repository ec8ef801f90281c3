"""The protocol between a store and a worker on a connection.

store                                           worker
WELCOME, its id                           -->               after both have proven who they are
                                          <--  its id
                                          <--  LOOK_UP, TOUCH, READ, WRITE or REMOVE; how many keys; bytes of a chunk; identity; keys
DONE, how many are there                  -->               to LOOK_UP, and to TOUCH, which marks them as just used
DONE, how many follow, these chunks       -->               to READ
DONE, how many may come, a byte for each  -->               to WRITE: 1 if it is wanted, 0 if it is there
                                          <--  the wanted chunks
DONE, how many are there                  -->
DONE, how many were evicted, their keys   -->               only those of the same identity
DONE, 0                                   -->               to REMOVE
                                          <--  COUNTS
DONE, length, the counts                  -->
REFUSED, length, why                      -->               instead of any answer; then it hangs up
"""

import asyncio
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serving.transfer.agent import TransferError
from serving.transfer.stream import Stream
from serving.transfer.wire import DONE, MAX_REASON_BYTES, REFUSED

WELCOME = b"dynabench-kv-store/2\n"

LOOK_UP, TOUCH, READ, WRITE, REMOVE, COUNTS = range(1, 7)

MAX_KEYS = 16_384
"""Most keys in one request; a worker with more sends another request."""

MAX_LOT_BYTES = 32 << 20
"""Most bytes of chunks in one request, unless a single chunk is larger."""

MAX_CHUNK_BYTES = 1 << 30

MAX_COUNTS_BYTES = 1024

ENTRY_BYTES = 512
"""Bytes that a chunk takes up in a store in addition to its content."""

GROUP_BYTES = 256 << 10
"""Smaller chunks are sent and received together: a system call costs more than a copy."""

STALL_S = 30.0
"""How long the other side may take; more only while it moves `MIN_BYTES_PER_S`."""

MIN_BYTES_PER_S = 1_000_000

REQUEST = struct.Struct("<BIIQ")
ANSWER = struct.Struct("<BI")
KEY_BYTES = 8


class StoreRequest(NamedTuple):
    """What a worker asks for."""

    kind: int
    num_keys: int
    chunk_bytes: int
    identity: int

    def check(self) -> None:
        """Check that it is a valid request.

        Raises:
            TransferError: it is not.
        """
        if not LOOK_UP <= self.kind <= COUNTS:
            raise TransferError(f"unknown kind of request: {self.kind}", "refused")
        most = MAX_KEYS
        if self.kind in (READ, WRITE):
            if not 0 < self.chunk_bytes <= MAX_CHUNK_BYTES:
                raise TransferError(f"chunks of {self.chunk_bytes} bytes; expected 1 to {MAX_CHUNK_BYTES}", "refused")
            most = lot_size(self.chunk_bytes)
        if self.num_keys > most:
            raise TransferError(f"a request of {self.num_keys} keys; expected at most {most}", "refused")


def lot_size(chunk_bytes: int) -> int:
    """Return how many chunks one request may ask for or carry."""
    return min(max(MAX_LOT_BYTES // chunk_bytes, 1), MAX_KEYS)


def pack_request(kind: int, keys: Sequence[int], *, chunk_bytes: int, identity: int) -> bytes:
    """Return a request."""
    return REQUEST.pack(kind, len(keys), chunk_bytes, identity) + pack_keys(keys)


def pack_keys(keys: Sequence[int]) -> bytes:
    """Return the wire format of keys."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(body: bytes) -> list[int]:
    """Return keys from their wire format."""
    return list(struct.unpack(f"<{len(body) // KEY_BYTES}Q", body))


def refusal(why: str) -> bytes:
    """Return the answer to a request that is refused."""
    reason = why.encode()[:MAX_REASON_BYTES]
    return ANSWER.pack(REFUSED, len(reason)) + reason


def place_of(port: int) -> str:
    """Return what a proof is bound to: only the port, because the store's host has several names."""
    return f"kv-store:{port}"


async def receive_number(stream: Stream, most: int) -> int:
    """Read the beginning of a store's answer, and return the number in it.

    Raises:
        TransferError: it refuses, or the number is too large.
    """
    status, number = ANSWER.unpack(await stream.receive(ANSWER.size))
    if status == DONE and number <= most:
        return int(number)
    if status != REFUSED or number > MAX_REASON_BYTES:
        raise TransferError(f"the store's answer ({status}, {number}) does not follow the protocol", "refused")
    raise TransferError(f"the store refuses: {(await stream.receive(number)).decode(errors='replace')}", "refused")


def time_for(num_bytes: int) -> asyncio.Timeout:
    """Return a timeout for the other side to move this many bytes."""
    return asyncio.timeout(STALL_S + num_bytes / MIN_BYTES_PER_S)


async def send_chunks(stream: Stream, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
    """Send chunks of one size."""
    small: list[bytes | bytearray | memoryview] = []
    num_small = 0
    for chunk in chunks:
        small.append(chunk)
        num_small += len(chunk)
        if num_small >= GROUP_BYTES:
            await stream.send(memoryview(small[0]) if len(small) == 1 else b"".join(small))
            small, num_small = [], 0
    if small:
        await stream.send(b"".join(small))


def group_size(chunk_bytes: int) -> int:
    """Return how many chunks are received together."""
    return max(GROUP_BYTES // chunk_bytes, 1)


async def receive_group(stream: Stream, count: int, chunk_bytes: int) -> list[memoryview]:
    """Receive `count` chunks of one size into new memory."""
    group = memoryview(bytearray(count * chunk_bytes))
    await stream.receive_into(group)
    return [group[start : start + chunk_bytes] for start in range(0, len(group), chunk_bytes)]


async def drain(stream: Stream, num_bytes: int) -> None:
    """Receive bytes and discard them."""
    rubbish = memoryview(bytearray(min(num_bytes, GROUP_BYTES)))
    while num_bytes:
        part = rubbish[:num_bytes]
        await stream.receive_into(part)
        num_bytes -= len(part)
