"""What the frontend sends to an engine of type `ModelType.Backend`: a request in token ids.

The answer is a stream of items: a token id, a list of them, or a dict with `token_ids` and perhaps `finish_reason`
("stop", "length", ...), `cached_tokens`, `log_probs` (one for each token) and `top_logprobs` (for each token a list of
(id, log-probability)); with the first of them, if the request wants them, `prompt_log_probs` and `prompt_top_logprobs`, whose
first entry is None. An engine that gives text sends `text` beside tokens that say the same, one piece to an item, and in
the end `completion_tokens`.
"""

from typing import Any

import msgspec
from msgspec.msgpack import Ext

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Sampling options that engines know by these names."""


def sampling(options: dict[str, Any], *more: str) -> dict[str, Any]:
    """Return those of a request's sampling options that it has, of `SAMPLING` and more."""
    return {name: options[name] for name in (*SAMPLING, *more) if options.get(name) is not None}


class StopConditions(msgspec.Struct, kw_only=True):
    """When to stop."""

    max_tokens: int | None = None
    is_default_limit: bool = False
    """The client named no limit: `max_tokens` is what the context leaves."""
    min_tokens: int = 0
    stop: list[str] | None = None
    ignore_eos: bool = False


class PreprocessedRequest(msgspec.Struct, kw_only=True):
    """A request in token ids; Dynamo's names. Handlers get it as a dict, with lists for the arrays."""

    token_ids: Ext
    sequence_hashes: Ext | None = None
    """Chained hashes of its full blocks, if the model's card has a block size: hashed once, by the frontend."""
    stop_conditions: StopConditions
    sampling_options: dict[str, Any] = {}
    eos_token_ids: list[int] = []
    annotations: list[str] = []
    num_generated: int = 0
    """How many of the last tokens another instance generated before it was lost: this one continues the answer."""
    dp_rank: int = 0
    is_refusable: bool = True
    """Whether a router may refuse it because all workers are full: not if part of the answer was accepted before."""
    request_id: str = ""
