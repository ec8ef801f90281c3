"""What travels on a channel: length-prefixed msgpack frames.

In each turn of its loop, a process sends each client one frame with every stream's new items, not one message per
token. An item of a token stream is a token id, a list of them, or a dict (`token_ids`, `finish_reason`, ...).
"""

import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

MAX_FRAME_BYTES = 64 * 1024 * 1024
_length = struct.Struct("<I")


class Call(msgspec.Struct, array_like=True, tag=1):
    """A request to an endpoint of the process, `namespace.component.endpoint`."""

    id: int
    target: str
    request: msgspec.Raw


class Cancel(msgspec.Struct, array_like=True, tag=2):
    """Nobody is waiting for a call any more."""

    id: int


class Pause(msgspec.Struct, array_like=True, tag=3):
    """A call's reader is slow: send nothing more of it for now."""

    id: int


class Resume(msgspec.Struct, array_like=True, tag=4):
    """A paused call may continue."""

    id: int


class Ping(msgspec.Struct, array_like=True, tag=5):
    """Answer with an empty frame."""


Command = Call | Cancel | Pause | Resume | Ping


class End(msgspec.Struct, array_like=True):
    """The end of a call; there is one. An error has a kind (see `CallError`)."""

    id: int
    error: str = ""
    kind: str = ""


class Frame(msgspec.Struct, array_like=True):
    """`items[i]` goes to call `ids[i]`; then the ends."""

    ids: list[int]
    items: list[Any]
    ends: list[End]


U32, U64 = 1, 2
"""Extension types: arrays of little-endian integers. Handlers see lists unless they ask for arrays."""


def pack_u32(values: npt.ArrayLike) -> msgspec.msgpack.Ext:
    """Return token ids in the form in which they are sent."""
    return msgspec.msgpack.Ext(U32, np.asarray(values, "<u4").tobytes())


def pack_u64(values: npt.ArrayLike) -> msgspec.msgpack.Ext:
    """Return hashes in the form in which they are sent."""
    return msgspec.msgpack.Ext(U64, np.asarray(values, "<u8").tobytes())


def as_list(code: int, data: memoryview) -> list[int]:
    """Return a received array as a list."""
    values: list[int] = np.frombuffer(data, "<u4" if code == U32 else "<u8").tolist()
    return values


class CallError(Exception):
    """A call that failed.

    Kinds: `lost` (the process is gone), `draining` (it accepts no new requests), `unknown` (it does not serve this
    endpoint), `invalid` (the request can never be served), `overloaded` (not now, perhaps elsewhere), `full` (not now,
    nor elsewhere), `unavailable` (it passes requests on and there is nobody to take them, or the way to it is cut),
    `engine` (the handler failed).
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class FrameError(ValueError):
    """Bytes that are not frames."""


class Frames:
    """Cuts a byte stream into frames."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add bytes and return the complete frames.

        Raises:
            FrameError: a frame is too large or malformed.
        """
        buffer = self._buffer
        buffer += data
        frames, at, size = [], 0, len(buffer)
        while size - at >= 4:
            (length,) = _length.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes; expected at most {MAX_FRAME_BYTES}")
            if size - at - 4 < length:
                break
            try:
                frames.append(self._decoder.decode(bytes(buffer[at + 4 : at + 4 + length])))
            except (ValueError, RecursionError) as error:  # text that is not UTF-8 is no error of msgspec
                raise FrameError(f"not a frame: {error}") from error
            at += 4 + length
        if at:
            del buffer[:at]
        return frames


_encode = msgspec.msgpack.Encoder().encode


def frame(message: msgspec.Struct) -> bytes:
    """Encode one message as a frame."""
    data = _encode(message)
    return _length.pack(len(data)) + data
