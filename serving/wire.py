"""What travels between a frontend and its workers: length-prefixed msgpack frames over a local socket.

A worker sends one frame per engine step and holds every sequence's new tokens in it, not one message per token.
"""

import asyncio
import struct
from typing import Any

import msgspec

MAX_FRAME_BYTES = 64 * 1024 * 1024
_length = struct.Struct("<I")


class Generate(msgspec.Struct, array_like=True, tag=1):
    """A preprocessed request: its prompt as little-endian u32 token ids, hashed once by the frontend."""

    id: int
    token_ids: bytes
    sequence_hashes: list[int]
    max_tokens: int


class Cancel(msgspec.Struct, array_like=True, tag=2):
    """The client of a request is gone."""

    id: int


class Stored(msgspec.Struct, array_like=True, tag=1):
    """Blocks now cached, in order, behind a parent (none: from the start)."""

    hashes: list[int]
    parent: int | None


class Removed(msgspec.Struct, array_like=True, tag=2):
    """Blocks no longer cached, in the order in which they went."""

    hashes: list[int]


class Finished(msgspec.Struct, array_like=True):
    """A request's end: `error` is empty unless it failed."""

    id: int
    reason: str
    num_cached_tokens: int = 0
    error: str = ""


class StepFrame(msgspec.Struct, array_like=True):
    """What one engine step brought: a token for each of `ids`, then the finishes."""

    ids: list[int]
    tokens: list[int]
    finished: list[Finished]
    events: list[Stored | Removed]


Command = Generate | Cancel


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes and return the frames that are whole.

        Raises:
            ValueError: a frame is larger than any we send.
        """
        buffer = self._buffer
        buffer += data
        frames, at, size = [], 0, len(buffer)
        while size - at >= 4:
            (length,) = _length.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
            if size - at - 4 < length:
                break
            with memoryview(buffer) as view:
                frames.append(self._decoder.decode(view[at + 4 : at + 4 + length]))
            at += 4 + length
        if at:
            del buffer[:at]
        return frames


_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """Encode one message as a frame."""
    data = _encode(message)
    return _length.pack(len(data)) + data


async def wait_closed(writer: asyncio.StreamWriter) -> None:
    """Close a stream and wait for it, whatever state it is in."""
    writer.close()
    try:
        await writer.wait_closed()
    except OSError:
        return
