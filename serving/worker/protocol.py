"""What the frontend sends to an engine of type `ModelType.Backend`: a request in token ids.

The answer is a stream of items: a token id, a list of them, or a dict with `token_ids` and perhaps `finish_reason`
("stop", "length", ...), `cached_tokens`, `tier_tokens` (those of them that came from `host` memory, `disk` or a `store`,
by these names, from engines that know), `log_probs` (one for each token) and `top_logprobs` (for each token a list of
(id, log-probability)); with the first of them, if the request wants them, `prompt_log_probs` and `prompt_top_logprobs`, whose
first entry is None. A worker that only prefills ends with `finish_reason` and `kv_transfer_params`, which say where the prompt's
KV is. An engine that gives text sends `text` beside tokens that say the same, one piece to an item, and in the end
`completion_tokens`.

Engines that know it say when what happened, as `times` in any of those dicts, in seconds since the request came to them: of
`admitted` (the prompt is begun), `prefill_end`, `decode_blocks` (there are blocks for its KV), `transfer_start`,
`transfer_end`, `decode_start` (its first step), and `transfer_bytes`.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Ext


class StopConditions(msgspec.Struct, kw_only=True):
    """When to stop."""

    max_tokens: int | None = None
    is_default_limit: bool = False
    """The client named no limit: `max_tokens` is what the context leaves."""
    min_tokens: int = 0
    stop: list[str] | None = None
    stop_token_ids: list[int] = []
    """The frontend cuts an answer at the first, and then gives up the rest; the mocker's answers end there."""
    ignore_eos: bool = False
    stop_after: int | None = None
    """Output token as which the mocker says EOS; engines that run a model say it by themselves."""


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
    kv_transfer_params: dict[str, Any] | None = None
    """Of a request that two workers share, as vLLM has them: `do_remote_decode` to the one that prefills; to the other what
    that one answered. In both, where they are called at once, those of a card's `Bootstrap` and a `bootstrap_room`."""
    is_held: bool = False
    """Whether the call of a prompt that is only prefilled may last until its KV was read: to cancel it gives that up."""
    request_id: str = ""


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Sampling options that engines know by these names."""


def sampling(options: dict[str, Any], *more: str) -> dict[str, Any]:
    """Return those of a request's sampling options that it has, of `SAMPLING` and more."""
    return {name: options[name] for name in (*SAMPLING, *more) if options.get(name) is not None}


def end_tokens(request: dict[str, Any]) -> list[int]:
    """Return the tokens that end a request's answer: none if it ignores them."""
    ends: list[int] = [] if request["stop_conditions"]["ignore_eos"] else request["eos_token_ids"]
    return ends


def engine_id(request: dict[str, Any]) -> str:
    """Return an id for an engine that knows a request by its id alone: a client may use one twice."""
    return f"{request['request_id']}-{os.urandom(4).hex()}"


def finish_reason(theirs: str) -> str:
    """Return why an answer ended, of an engine's own reason: `length`, or `stop` for any other."""
    return "length" if theirs == "length" else "stop"


def log_probabilities(tokens: Sequence[int], places: Sequence[Any]) -> dict[str, Any]:
    """Return log-probabilities: of each token, and of the likeliest at its place, which are given by token."""
    values, tops = [], []
    for token, place in zip(tokens, places, strict=False):
        values.append(place[token].logprob)
        ranked = sorted(place.items(), key=lambda entry: -entry[1].logprob)
        tops.append([[other, found.logprob] for other, found in ranked])
    return {"log_probs": values, "top_logprobs": tops}
