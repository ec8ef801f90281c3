"""The answers of an OpenAI server, read within limits, because they may be malformed."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from foundation.settings import Whole
from foundation.text import one_line
from serving.runtime.messages import CallError

MAX_BYTES = 1 << 20
"""Most bytes of an answer or event that does not grow with the prompt."""

MAX_REASON = 600
"""Characters of a server's own words that are passed on."""

ID_PREFIX = "token_id:"
"""vLLM's prefix of a token's id, which on request replaces the token's text."""

MAX_TOKEN_ID = 0xFFFFFFFF
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Kind = TypeVar("Kind")


class Problem(msgspec.Struct):
    """What went wrong."""

    message: str | None = None
    code: int | str | None = None


class Failure(msgspec.Struct):
    """The body of an error."""

    error: Problem | str | None = None
    message: str | None = None


class Details(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: Whole | None = None


class ServerUsage(msgspec.Struct):
    """How many tokens there were."""

    completion_tokens: Whole | None = None
    prompt_tokens_details: Details | None = None


class LogProbs(msgspec.Struct):
    """The log-probabilities of one event's tokens."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Place(msgspec.Struct):
    """How likely a token was at a position of the prompt."""

    logprob: float


class ServerChoice(msgspec.Struct):
    """The answer's next piece, or all of it."""

    text: str = ""
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: LogProbs | None = None
    prompt_logprobs: list[dict[int, Place] | None] | None = None


class ServerAnswer(msgspec.Struct):
    """An event of a stream, or a whole answer."""

    choices: list[ServerChoice] = []
    usage: ServerUsage | None = None
    error: Problem | str | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ServerModel(msgspec.Struct):
    """A model that a server serves."""

    id: str
    parent: str | None = None
    """The base model, if this is an adapter."""
    owned_by: str | None = None
    """Engines put their name here."""
    max_model_len: Whole | None = None


class ServerModels(msgspec.Struct):
    """The answer of `/v1/models`."""

    data: list[ServerModel]


def decode_answer(data: bytes, kind: type[Kind]) -> Kind:
    """Read JSON.

    Raises:
        CallError: it is not what was expected.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CallError(
            f"not an answer of an OpenAI server: {one_line(error)}: {one_line(data, 100)}", "engine"
        ) from error


async def body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read a body.

    Raises:
        CallError: it is longer than the limit.
    """
    found = bytearray()
    async for part in response.content.iter_any():
        found += part
        if len(found) > limit:
            raise CallError(f"the answer has more than {limit:,} bytes", "engine")
    return bytes(found)


async def events(response: aiohttp.ClientResponse, limit: int) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event of a stream, except the last, which marks its end.

    Raises:
        CallError: an event is longer than the limit, or the stream ends early.
    """
    line = bytearray()
    async for part in response.content.iter_any():
        *ends, rest = part.split(b"\n")
        for end in ends:
            line += end
            data = bytes(line[5:]).strip() if line.startswith(b"data:") else b""
            line.clear()
            if data == b"[DONE]":
                return
            if data:
                yield data
        line += rest
        if len(line) > limit:
            raise CallError(f"an event has more than {limit:,} bytes", "engine")


def failure(status: int, data: bytes) -> CallError:
    """Return the error that a status other than 200 stands for.

    The client can only mend what the server says about the request itself, not a wrong key or model name of ours.
    """
    try:
        said = decode_answer(data, Failure)
        problem = said.error.message if isinstance(said.error, Problem) else said.error
        reason = one_line(problem or said.message or data, MAX_REASON)
    except CallError:
        reason = one_line(data, MAX_REASON)
    kinds = dict.fromkeys((400, 413, 422), "invalid") | dict.fromkeys((429, 503), "overloaded")
    return CallError(f"HTTP {status}: {reason}", kinds.get(status, "engine"))


def log_probabilities(found: LogProbs, tokens: list[int] | None) -> dict[str, Any]:
    """Return log-probabilities in the form of `serving.worker.protocol`, by token if the server sends ids.

    Raises:
        CallError: they do not match the tokens.
    """
    count, tops = len(found.token_logprobs), found.top_logprobs or []
    if None in found.token_logprobs or len(tops) != count or (tokens is not None and len(tokens) != count):
        raise CallError(f"log-probabilities of {count} tokens, with {len(tops)} places and tokens {tokens}", "engine")
    return {"log_probs": found.token_logprobs, "top_logprobs": [_ranked(top or {}) for top in tops]}


def _ranked(top: dict[str, float]) -> list[Any]:
    ranked = sorted(top.items(), key=lambda entry: -entry[1])
    return [_named(name, value) for name, value in ranked]


def _named(name: str, value: float) -> list[Any] | dict[str, Any]:
    digits = name.removeprefix(ID_PREFIX)
    if digits != name and digits.isdecimal() and int(digits[:11]) <= MAX_TOKEN_ID:
        return [int(digits[:11]), value]
    return {"token": name, "logprob": value, "bytes": list(name.encode())}
