"""What the frontend sends to an engine of type `ModelType.Backend`: a request in token ids.

The answer is a stream of items: a token id, a list of them, or a dict. A dict has `token_ids` and may have:

- `finish_reason`: "stop", "length", ...
- `cached_tokens`, and `tier_tokens`: how many of them came from `host` memory, `disk` or a `store`, by these names.
- `log_probs`, one for each token, and `top_logprobs`, a list of (id, log-probability) for each token.
- `prompt_log_probs` and `prompt_top_logprobs`, in the first dict, if requested; their first entry is None.
- `kv_transfer_params`, with `finish_reason`, from a worker that only prefills: where the prompt's KV is.
- `text`, from an engine that returns text: the text of the tokens, one piece per item; at the end `completion_tokens`.
- `embedding`, in the only dict of the answer to a request for one: a list of numbers.
- `times`, from engines that know them, in seconds since the request reached the engine: `admitted` (the prompt has
  started), `prefill_end`, `decode_blocks` (there are blocks for its KV), `transfer_start`, `transfer_end`,
  `decode_start` (its first step); also `transfer_bytes`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Ext
from xxhash import xxh3_64_intdigest

from serving.runtime.world import world


class StopConditions(msgspec.Struct, kw_only=True):
    """When to stop."""

    max_tokens: int | None = None
    is_default_limit: bool = False
    """`max_tokens` only bounds the answer: it is what fits in the context, or the limit of a response or a message. The
    mocker then ends an answer by itself; otherwise it fills the limit, as benchmarks need it."""
    min_tokens: int = 0
    stop: list[str] | None = None
    stop_token_ids: list[int] = []
    """The frontend cuts an answer at the first of these and drops the rest; the mocker's answers end there."""
    ignore_eos: bool = False
    stop_after: int | None = None
    """Number of the output token at which the mocker generates EOS; engines that run a model decide themselves."""


class CacheScope(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt's KV depends on beside its tokens: only prompts of the same scope share blocks."""

    salt: str = ""
    lora_name: str = ""
    lora_id: int = 0
    lora_path: str = ""

    @property
    def root(self) -> int:
        """The hash that takes the place of a prefix before its first blocks."""
        return xxh3_64_intdigest(msgspec.msgpack.encode(self))


class PreprocessedRequest(msgspec.Struct, kw_only=True):
    """A request in token ids; Dynamo's names. Handlers get it as a dict, with lists for the arrays."""

    token_ids: Ext
    sequence_hashes: Ext | None = None
    """Chained hashes of the prompt's full blocks, if the model's card has a block size; the frontend computes them once."""
    stop_conditions: StopConditions
    sampling_options: dict[str, Any] = {}
    """Among them `guided_decoding`, what the answer must look like: exactly one of `json` (a JSON schema), `regex`, `choice`
    (a list of texts) and `grammar` (EBNF, as vLLM takes it), if the model's card says that its engine can; and `choice`, from
    1 for the second answer to a prompt without a seed: engines that sample ignore it, a mocker answers differently. Only mockers
    read `allowed_token_ids`, `bad_words` (texts that no answer has) and `repetition` (shortest and longest pattern, and how
    often it must come to end the answer)."""
    tools: list[dict[str, Any]] | None = None
    """What the answer may call, as the client sent it, if it is left to the model: engines that run one ignore it."""
    is_embedding: bool = False
    """Whether an embedding of the prompt is wanted instead of an answer, if the model's card says that its engine can."""
    eos_token_ids: list[int] = []
    annotations: list[str] = []
    num_generated: int = 0
    """How many of the last tokens another instance generated before it was lost: this one continues the answer."""
    dp_rank: int = 0
    is_refusable: bool = True
    """Whether a router may refuse it because all workers are full: not if a part of it was accepted before."""
    kv_transfer_params: dict[str, Any] | None = None
    """For a request that two workers share, as in vLLM: `do_remote_decode` for the prefill worker; its answer's params for
    the decode worker. If both are called at once, both get those of a card's `Bootstrap` and a `bootstrap_room`."""
    is_held: bool = False
    """Whether a call that only prefills may last until the prompt's KV has been read; cancelling it drops the KV."""
    num_choices: int = 1
    """How many answers the client wants to the prompt, under the same request id; this is one of them."""
    request_id: str = ""
    cache_scope: CacheScope | None = None
    """Whose cached KV it may share, if not everybody's; only mockers read it."""
    session_id: str | None = None
    """The session that it is part of, by which vLLM's KV events name it; only mockers read it."""
    priority: int = 0
    """Smaller ones go first, if the scheduler heeds it."""


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Sampling options that engines know by these names."""


def sampling(options: dict[str, Any], *more: str) -> dict[str, Any]:
    """Return the request's sampling options that are set, of those in `SAMPLING` and `more`."""
    return {name: options[name] for name in (*SAMPLING, *more) if options.get(name) is not None}


def end_tokens(request: dict[str, Any]) -> list[int]:
    """Return the tokens that end a request's answer: none if it ignores them."""
    ends: list[int] = [] if request["stop_conditions"]["ignore_eos"] else request["eos_token_ids"]
    return ends


def engine_id(request: dict[str, Any]) -> str:
    """Return an id for an engine that knows a request only by its id: a client may use the same id twice."""
    return f"{request['request_id']}-{world().token_hex(4)}"


def finish_reason(theirs: str) -> str:
    """Translate an engine's reason for the end of an answer: `length`, or `stop` for any other."""
    return "length" if theirs == "length" else "stop"


def log_probabilities(tokens: Sequence[int], places: Sequence[Any]) -> dict[str, Any]:
    """Return the log-probabilities of each token and of the most likely tokens at its position."""
    values, tops = [], []
    for token, place in zip(tokens, places, strict=False):
        values.append(place[token].logprob)
        ranked = sorted(place.items(), key=lambda entry: -entry[1].logprob)
        tops.append([[other, found.logprob] for other, found in ranked])
    return {"log_probs": values, "top_logprobs": tops}
