"""Read an engine's output: the items of `serving.worker.protocol`. An engine is not trusted to send valid items."""

import math
from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError

MAX_KV_BYTES = 4 << 20
"""Maximum size of `kv_transfer_params`, which travel on to another worker."""

MAX_BYTES = 1 << 60
MAX_S = 1e6
"""Times that a worker reports are ignored if they are longer than this after the request arrived."""

TIMES = ("admitted", "prefill_end", "decode_blocks", "transfer_start", "transfer_end", "decode_start")
"""The times that engines report, under the names of the results folder."""


TIERS = ("host", "disk", "store")
"""The tiers for KV beyond the GPU."""


class Output(msgspec.Struct, gc=False):
    """An engine's output since the last read."""

    tokens: list[int] = []
    texts: list[str] = []
    """From engines that return text with their tokens."""
    finish_reason: str = ""
    num_cached: int | None = None
    tier_tokens: dict[str, int] | None = None
    """Cached tokens that came from beyond the GPU, by tier, from engines that report it."""
    num_completion: int | None = None
    """Tokens of the answer so far, from engines that count them."""
    logprobs: list[tuple[float, list[Any] | None]] = []
    """Log-probability and most likely alternatives of each token, if requested."""
    prompt_logprobs: list[tuple[float | None, list[Any] | None]] | None = None
    """The same for the prompt."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where the prompt's KV is, from a worker that prefills."""
    embedding: list[float] | None = None
    """The prompt's embedding, if that was requested."""
    times: dict[str, float] = {}
    """When things happened, in seconds since the request reached the worker."""
    num_transfer_bytes: float = 0.0

    @property
    def has_news(self) -> bool:
        """Whether it contains part of the answer."""
        return bool(self.tokens or self.texts or self.finish_reason)

    def read(self, items: list[Any], num_before: int) -> None:
        """Add these items; `num_before` tokens are from earlier attempts.

        Raises:
            ApiError: an item is invalid.
        """
        for item in items:
            if type(item) is int:
                self.tokens.append(item)
            elif type(item) is list:
                self.tokens += item
            else:
                self._read_dict(item, num_before)

    def _read_dict(self, item: Any, num_before: int) -> None:
        if not isinstance(item, dict) or not isinstance(tokens := item.get("token_ids", []), list):
            raise ApiError(500, "the engine sent something that is not an answer")
        self.tokens += tokens
        if item.get("finish_reason"):
            self.finish_reason = str(item["finish_reason"])
        if "cached_tokens" in item:
            self.num_cached = _count(item["cached_tokens"])
        if isinstance(tiers := item.get("tier_tokens"), dict):
            self.tier_tokens = {name: _count(tiers.get(name, 0)) for name in TIERS}
        if "text" in item:
            self.texts.append(str(item["text"]))
        if "completion_tokens" in item:
            self.num_completion = num_before + _count(item["completion_tokens"])
        if item.get("prompt_log_probs") is not None and self.prompt_logprobs is None:
            self.prompt_logprobs = list(zip(item["prompt_log_probs"], item["prompt_top_logprobs"], strict=False))
        if item.get("log_probs") is not None:
            tops = item.get("top_logprobs") or [None] * len(tokens)
            self.logprobs += [(value, tops[index]) for index, value in enumerate(item["log_probs"])]
        if item.get("embedding") is not None:
            self.embedding = _embedding(item["embedding"])
        if item.get("kv_transfer_params") is not None:
            self.kv_transfer_params = _kv_transfer_params(item["kv_transfer_params"])
        if isinstance(times := item.get("times"), dict):
            self.times |= {name: times[name] for name in TIMES if _is_within(times.get(name), MAX_S)}
            if _is_within(times.get("transfer_bytes"), MAX_BYTES):
                self.num_transfer_bytes = times["transfer_bytes"]


def _count(said: Any) -> int:
    """Return the number of tokens that an engine sent.

    Raises:
        ApiError: it is not a number.
    """
    if not isinstance(said, int | float) or not math.isfinite(said):
        raise ApiError(500, "the engine sent a token count that is not a number")
    return max(int(said), 0)


def _embedding(said: Any) -> list[float]:
    """Return the embedding that an engine sent.

    Raises:
        ApiError: it is not a list of numbers.
    """
    if not isinstance(said, list) or not said or not all(isinstance(x, int | float) and math.isfinite(x) for x in said):
        raise ApiError(500, "the engine sent an embedding that is not a list of numbers")
    return said


def _kv_transfer_params(said: Any) -> dict[str, Any]:
    """Return the params of a worker that prefills, which say where the KV is.

    Raises:
        ApiError: they cannot be passed on.
    """
    if not isinstance(said, dict):
        raise ApiError(500, f"the engine sent kv_transfer_params of type {type(said).__name__}, not dict")
    num_bytes = len(msgspec.msgpack.encode(said))
    if num_bytes > MAX_KV_BYTES:
        raise ApiError(500, f"the engine sent kv_transfer_params of {num_bytes} bytes; expected at most {MAX_KV_BYTES}")
    return said


def _is_within(said: Any, limit: float) -> bool:
    """Return whether a worker sent a number from 0 to the limit; NaN is not one."""
    return isinstance(said, int | float) and 0 <= said <= limit
