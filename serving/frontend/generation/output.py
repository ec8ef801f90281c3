"""What an engine said: the items of `serving.worker.protocol`, read. An engine is not trusted to say what it should."""

import math
from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError

MAX_KV_BYTES = 4 << 20
"""Of `kv_transfer_params`, which travel on to another worker."""

MAX_BYTES = 1 << 60
MAX_S = 1e6
"""What a worker says it did later than this after a request came is left aside."""

TIMES = ("admitted", "prefill_end", "decode_blocks", "transfer_start", "transfer_end", "decode_start")
"""What engines time, as the results folder names it."""


TIERS = ("host", "disk", "store")
"""Where KV is beyond the GPU."""


class Output(msgspec.Struct, gc=False):
    """What an engine said since the last look."""

    tokens: list[int] = []
    texts: list[str] = []
    """From engines that give text with their tokens."""
    finish_reason: str = ""
    num_cached: int | None = None
    tier_tokens: dict[str, int] | None = None
    """Cached tokens that came from beyond the GPU, by tier, from engines that know."""
    num_completion: int | None = None
    """Tokens of the answer so far, from engines that count them."""
    logprobs: list[tuple[float, list[Any] | None]] = []
    """Log-probability and likeliest alternatives of each token, if they were asked for."""
    prompt_logprobs: list[tuple[float | None, list[Any] | None]] | None = None
    """The same for the prompt."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where the prompt's KV is, from a worker that prefills."""
    times: dict[str, float] = {}
    """When what happened, in seconds since the request came to the worker."""
    num_transfer_bytes: float = 0.0

    @property
    def has_news(self) -> bool:
        """Whether it says something of the answer."""
        return bool(self.tokens or self.texts or self.finish_reason)

    def read(self, items: list[Any], num_before: int) -> None:
        """Add what these items say; `num_before` tokens are of earlier attempts.

        Raises:
            ApiError: an item means nothing.
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
            raise ApiError(500, "the engine sent something that is no answer")
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
        if item.get("kv_transfer_params") is not None:
            self.kv_transfer_params = _kv_transfer_params(item["kv_transfer_params"])
        if isinstance(times := item.get("times"), dict):
            self.times |= {name: times[name] for name in TIMES if _is_within(times.get(name), MAX_S)}
            if _is_within(times.get("transfer_bytes"), MAX_BYTES):
                self.num_transfer_bytes = times["transfer_bytes"]


def _count(said: Any) -> int:
    """Return a number of tokens, as an engine says it.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(said, int | float) or not math.isfinite(said):
        raise ApiError(500, "the engine sent a number of tokens that is none")
    return max(int(said), 0)


def _kv_transfer_params(said: Any) -> dict[str, Any]:
    """Return what a worker that prefills says of where the KV is.

    Raises:
        ApiError: it is nothing that can travel on.
    """
    if not isinstance(said, dict):
        raise ApiError(500, f"the engine sent kv_transfer_params that are no dict but {type(said).__name__}")
    num_bytes = len(msgspec.msgpack.encode(said))
    if num_bytes > MAX_KV_BYTES:
        raise ApiError(500, f"the engine sent kv_transfer_params of {num_bytes} bytes; expected {MAX_KV_BYTES} at most")
    return said


def _is_within(said: Any, limit: float) -> bool:
    """Tell whether a worker said a number from 0 to the limit; NaN is none."""
    return isinstance(said, int | float) and 0 <= said <= limit
