"""The messages between the frontend and a preparer: msgpack, each message after its length.

    frontend                              preparer
    Model(card, files) -----------------> loads it
    once it can take jobs <-------------- Ready(error)
    Job(id, kind, ...) and its body ----> prepares it
    in any order <----------------------- Answer(id, outcome)

There is one preparer for each model.
"""

import struct
from typing import Any

import msgspec
import numpy as np

from serving.frontend.api.kinds import KindName
from serving.frontend.prepared import PreparedPrompt, Preprocessed
from serving.frontend.reading import ReadingElsewhere
from serving.model.card import ModelCard

Body = bytes | bytearray
LENGTH = struct.Struct("<I")
"""Comes before each message: its number of bytes."""

NUM_JOBS = 4
"""Jobs that one process does at once."""


class PreparerModel(msgspec.Struct, array_like=True):
    """The first message: the model that the requests are for."""

    card: ModelCard
    files: dict[str, bytes]
    is_strict: bool
    """See `TextModel`."""
    reading: ReadingElsewhere | None = None
    """How its requests are read (none: as ours)."""


class PreparerReady(msgspec.Struct, array_like=True):
    """The answer to the first message: whether it can take jobs."""

    error: str = ""


class PreparingJob(msgspec.Struct, array_like=True):
    """A request; its body follows the message."""

    id: int
    kind: KindName
    num_bytes: int
    name: str | None
    """The name that the model was found by; a request may have it instead of the one on the card."""
    is_only: bool
    """Whether no other model is served."""


class Refusal(msgspec.Struct, tag=True):
    """An `ApiError`."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None


class Elsewhere(msgspec.Struct, tag=True):
    """The request is for another model, or names none although there are several."""

    model: str | None


Outcome = Preprocessed | Elsewhere | Refusal


class JobResult(msgspec.Struct, array_like=True):
    """The result of a job."""

    id: int
    outcome: Outcome


def framed(message: msgspec.Struct) -> bytes:
    """Return a message as it travels."""
    data = _encode(message)
    return LENGTH.pack(len(data)) + data


def _pack(value: Any) -> Any:
    assert isinstance(value, PreparedPrompt)
    return [value.tokens.astype("<u4").tobytes(), value.block_size, np.array(value.hashes, "<u8").tobytes()]


def _unpack(type: type, value: Any) -> Any:
    assert type is PreparedPrompt
    tokens, block_size, hashes = value
    return PreparedPrompt(np.frombuffer(tokens, "<u4"), block_size, np.frombuffer(hashes, "<u8").tolist())


_encode = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_answer = msgspec.msgpack.Decoder(JobResult, dec_hook=_unpack).decode
