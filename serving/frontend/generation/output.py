"""Read an engine's output: the items of `serving.worker.protocol`. An engine is not trusted to send valid items."""

from collections.abc import Iterable
from itertools import repeat
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType, convert

from serving.frontend.api.errors import ApiError

MAX_KV_BYTES = 4 << 20
"""Maximum size of `kv_transfer_params`, which travel on to another worker."""

MAX_TOKEN = (1 << 32) - 1
MAX_BYTES = 1 << 60
MAX_S = 1e6
"""Times that a worker reports are ignored if they are longer than this after the request arrived."""

TIMES = ("admitted", "prefill_end", "decode_blocks", "transfer_start", "transfer_end", "decode_start")
"""The times that engines report, under the names of the results folder."""

# Bounds also reject what is not finite.
Token = Annotated[int, Meta(ge=0, le=MAX_TOKEN)]
Count = Annotated[float, Meta(ge=-1e15, le=1e15)]
Component = Annotated[float, Meta(ge=-1e38, le=1e38)]


class NamedToken(TypedDict):
    """An alternative to a token, from engines that know its text but not its id."""

    token: str
    logprob: float
    bytes: NotRequired[list[int] | None]


Alternatives = list[tuple[Token, float] | NamedToken]


class TierTokens(msgspec.Struct, gc=False):
    """Cached tokens that came from beyond the GPU, by tier."""

    host: Count = 0
    disk: Count = 0
    store: Count = 0


class EngineItem(msgspec.Struct, gc=False):
    """An item that is a dict. Times that make no sense are ignored; anything else that is wrong makes it invalid."""

    token_ids: list[Token] = []
    text: str | None = None
    finish_reason: str | None = None
    cached_tokens: Count | UnsetType = UNSET
    completion_tokens: Count | UnsetType = UNSET
    tier_tokens: TierTokens | None = None
    log_probs: list[float | None] = []
    top_logprobs: list[Alternatives | None] | None = None
    prompt_log_probs: list[float | None] | None = None
    prompt_top_logprobs: list[Alternatives | None] | None = None
    embedding: Annotated[list[Component], Meta(min_length=1)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    times: Any = None


class Output(msgspec.Struct, gc=False):
    """An engine's output since the last read."""

    tokens: list[int] = []
    steps: tuple[tuple[int, int], ...] = ()
    """The places (from, to) of tokens that came in one message, where that has several: a step that verifies drafts."""
    texts: list[str] = []
    """From engines that return text with their tokens."""
    finish_reason: str = ""
    num_cached: int | None = None
    tier_tokens: dict[str, int] | None = None
    """Cached tokens that came from beyond the GPU, by tier, from engines that report it."""
    num_completion: int | None = None
    """Tokens of the answer so far, from engines that count them."""
    logprobs: list[tuple[float | None, Alternatives | None]] = []
    """Log-probability and most likely alternatives of each token, if requested."""
    prompt_logprobs: list[tuple[float | None, Alternatives | None]] | None = None
    """The same for the prompt."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where the prompt's KV is, from a worker that prefills."""
    embedding: list[float] | None = None
    """The prompt's embedding, if that was requested."""
    times: dict[str, float] = {}
    """When things happened, in seconds since the request reached the worker."""
    num_transfer_bytes: float = 0.0

    def read(self, items: list[Any], num_before: int) -> None:
        """Add these items; `num_before` tokens are from earlier attempts.

        Raises:
            ApiError: an item is invalid.
        """
        try:
            for item in items:
                if type(item) is int and 0 <= item <= MAX_TOKEN:
                    self.tokens.append(item)
                elif type(item) is list:
                    for token in item:  # faster than by msgspec
                        if type(token) is not int or not 0 <= token <= MAX_TOKEN:
                            raise msgspec.ValidationError(f"{token!r} is not a token id")
                    self._extend(item)
                else:
                    self._add(convert(item, EngineItem), num_before)
        except msgspec.ValidationError as error:
            raise ApiError(500, f"the engine sent something that is not an answer: {error}") from None

    def _extend(self, tokens: list[int]) -> None:
        """Add the tokens of a message."""
        start = len(self.tokens)
        self.tokens += tokens
        if len(tokens) > 1:
            self.steps += ((start, start + len(tokens)),)

    def _add(self, item: EngineItem, num_before: int) -> None:
        self._extend(item.token_ids)
        if item.finish_reason:
            self.finish_reason = item.finish_reason
        if item.cached_tokens is not UNSET:
            self.num_cached = _count(item.cached_tokens)
        if (tiers := item.tier_tokens) is not None:
            self.tier_tokens = {name: _count(getattr(tiers, name)) for name in TierTokens.__struct_fields__}
        if item.text is not None:
            self.texts.append(item.text)
        if item.completion_tokens is not UNSET:
            self.num_completion = num_before + _count(item.completion_tokens)
        if item.prompt_log_probs is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = [*_with_alternatives(item.prompt_log_probs, item.prompt_top_logprobs)]
        if item.log_probs:
            self.logprobs += _with_alternatives(item.log_probs, item.top_logprobs)
        if item.embedding is not None:
            self.embedding = item.embedding
        if item.kv_transfer_params is not None:
            self.kv_transfer_params = _portable(item.kv_transfer_params)
        if isinstance(times := item.times, dict):
            self.times |= {name: times[name] for name in TIMES if _is_within(times.get(name), MAX_S)}
            if _is_within(times.get("transfer_bytes"), MAX_BYTES):
                self.num_transfer_bytes = times["transfer_bytes"]


def _count(reported: float) -> int:
    return max(int(reported), 0)


def _with_alternatives(
    values: list[float | None], tops: list[Alternatives | None] | None
) -> Iterable[tuple[float | None, Alternatives | None]]:
    """Return each log-probability with the most likely alternatives at its place, if there are any.

    Raises:
        ApiError: some places have none.
    """
    if not tops:
        return zip(values, repeat(None), strict=False)
    if len(tops) < len(values):
        raise ApiError(500, f"the engine sent {len(values)} log-probabilities, but alternatives for {len(tops)} tokens")
    return zip(values, tops, strict=False)


def _portable(params: dict[str, Any]) -> dict[str, Any]:
    """Return the params of a worker that prefills, which say where the KV is.

    Raises:
        ApiError: they are too large to be passed on.
    """
    num_bytes = len(msgspec.msgpack.encode(params))
    if num_bytes > MAX_KV_BYTES:
        raise ApiError(500, f"the engine sent kv_transfer_params of {num_bytes} bytes; expected at most {MAX_KV_BYTES}")
    return params


def _is_within(said: Any, limit: float) -> bool:
    """Return whether a worker sent a number from 0 to the limit; NaN is not one."""
    return isinstance(said, int | float) and 0 <= said <= limit
