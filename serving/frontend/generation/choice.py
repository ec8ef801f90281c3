"""One choice of an answer: its attempts produce tokens, its text turns them into pieces."""

import asyncio
from collections.abc import Sequence
from typing import Any

from xxhash import xxh3_128_hexdigest

from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import AsIds, TokenLogprob, TokenNames, name_tokens
from serving.frontend.api.sse import unescape
from serving.frontend.config import FrontendConfig
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.generation.output import Output
from serving.frontend.generation.text import ChoiceText
from serving.frontend.prepared import Prepared, PreparedPrompt
from serving.frontend.served_model import ServedModel
from serving.life.terms import Terms
from serving.model.adapter import Adapter
from serving.worker.protocol import CacheScope, StopConditions

SLICE_TOKENS = 16_384
"""Yield to other requests after sending this many tokens."""

CHOICE_TOKENS = 512
"""A choice costs about as much to send as this many tokens."""


class Choice:
    """Read `pieces` until `finish_reason` is set; `close` it then, and on any other way out."""

    def __init__(self, attempts: Attempts, text: ChoiceText, request: ChoiceRequest, tokenizer: TokenNames) -> None:
        self.finish_reason = ""
        self.num_prompt = len(request.prompt.tokens)
        self.block_size = request.prompt.block_size
        self.num_cached = 0
        self.tier_tokens: dict[str, int] = {}
        """Cached tokens that came from beyond the GPU, by tier, if the engine reports it."""
        self.num_before = 0
        """Tokens of the answer before the last pieces."""
        self.logprobs: list[TokenLogprob] = []
        """Of the last pieces, if requested."""
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """Of the prompt, if requested, once the first pieces have arrived."""
        self.end_logprob: TokenLogprob | None = None
        """Of the token that ended the answer, which has no text, if requested."""
        self.tokens: list[int] = []
        """Of the last pieces, and the one that ended the answer."""
        self.raw_prompt_logprobs: list[tuple[float | None, list[Any] | None]] | None = None
        """Log-probabilities of the prompt as the engine sends them, by token ids."""
        self.kv_transfer_params: dict[str, Any] | None = None
        """Where the prompt's KV is, for a client that directs disaggregated requests itself."""
        self.attempts = attempts
        self._text = text
        self._request = request
        self._tokenizer = tokenizer
        self._num_counted: int | None = None
        self._has_logprobs = not request.sampling.keys().isdisjoint(("logprobs", "prompt_logprobs"))

    @property
    def num_completion(self) -> int:
        """Tokens of the answer. If an engine returns text, its own count is better than the number of pieces."""
        return self._text.num_tokens if self._num_counted is None else self._num_counted

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self._text.stop

    @property
    def stop_token(self) -> int | None:
        """The token that ended it, if one did."""
        return self._text.stop_token

    @property
    def eos_token(self) -> int | None:
        """The model's own token that ends answers."""
        return next(iter(self._request.eos_token_ids), None)

    @property
    def prompt(self) -> PreparedPrompt:
        """What it answers."""
        return self._request.prompt

    @property
    def fingerprint(self) -> str:
        """Return a hash that differs between prompts, seeds and choices, and is the same when the request is repeated.

        Ids made of it are unique in a conversation, in which each prompt is longer than the one before.
        """
        seed, place = (self._request.sampling.get(name, 0) for name in ("seed", "choice"))
        return xxh3_128_hexdigest(self._request.prompt.tokens.tobytes() + b"%d %d" % (seed, place))

    @property
    def num_overlap_tokens(self) -> int:
        """Prompt tokens that the router expected in the cache of the worker that computes the prompt."""
        return self.attempts.prompt_placement.overlap_blocks * self.block_size

    async def pieces(self) -> list[bytes]:
        """Wait for output and return the text of each new token, escaped for JSON.

        Raises:
            ApiError: the request failed.
        """
        output = await self.attempts.take()
        self.num_before = self.num_completion
        if output.num_cached is not None:
            self.num_cached = min(output.num_cached, self.num_prompt)
        if output.tier_tokens is not None:
            self.tier_tokens = {name: min(count, self.num_cached) for name, count in output.tier_tokens.items()}
        if output.num_completion is not None:
            self._num_counted = output.num_completion
        if output.texts:
            pieces = self._text.push_texts(output.texts, output.finish_reason)
        else:
            pieces = self._text.push(output.tokens, output.finish_reason)
        self.tokens = output.tokens[: self.num_completion - self.num_before]
        self.finish_reason = self._text.finish_reason
        self.kv_transfer_params = output.kv_transfer_params or self.kv_transfer_params
        if self._has_logprobs:
            self._read_logprobs(output, pieces)
        return pieces

    def close(self) -> None:
        """Release the bookings, and cancel the calls still in progress."""
        self.attempts.close(has_stopped=bool(self.finish_reason))

    def _read_logprobs(self, output: Output, pieces: list[bytes]) -> None:
        """Add the tokens' texts to the requested log-probabilities.

        Raises:
            ApiError: tokens arrived without them.
        """
        wanted = self._request.sampling
        if output.prompt_logprobs is not None and self.prompt_logprobs is None:
            self.raw_prompt_logprobs = output.prompt_logprobs
            texts = map(self._tokenizer.text_of, self._request.prompt.tokens.tolist())
            self.prompt_logprobs = [
                TokenLogprob(text, value, name_tokens(top, self._tokenizer))
                for text, (value, top) in zip(texts, output.prompt_logprobs, strict=False)
            ]
        is_missing = ("logprobs" in wanted and not output.logprobs) or (
            "prompt_logprobs" in wanted and self.prompt_logprobs is None
        )
        if output.tokens and is_missing:
            raise ApiError(400, "this model's engine does not return these log-probabilities", param="logprobs")
        self.logprobs = [
            TokenLogprob(unescape(piece), value, name_tokens(top, self._tokenizer))
            for piece, (value, top) in zip(pieces, output.logprobs, strict=False)
        ]
        if len(pieces) < len(self.tokens) <= len(output.logprobs):
            value, top = output.logprobs[len(self.tokens) - 1]
            text = self._tokenizer.text_of(self.tokens[-1])
            self.end_logprob = TokenLogprob(text, value, name_tokens(top, self._tokenizer))


async def start_choices(
    prepared: Prepared, model: ServedModel, config: FrontendConfig, request_id: str
) -> list[Choice]:
    """Send each choice of a request to an engine; once the first is accepted, the others are not refused.

    Of thousands of choices a slice is sent at a time. Choices that may wait for a worker are not placed yet: see `until_placed`.

    Raises:
        ApiError: there is no worker to send it to.
    """
    _check_kv_transfer(prepared, model, config)
    choices: list[Choice] = []
    num_tokens = 0
    try:
        for prompt, limit in zip(prepared.prompts, prepared.limits, strict=True):
            for index in range(prepared.options.n or 1):
                if num_tokens > SLICE_TOKENS:
                    await asyncio.sleep(0)
                    num_tokens = 0
                num_tokens += CHOICE_TOKENS + len(prompt.tokens) + limit
                request = _request(prepared, model, prompt, limit, index, request_id)
                choices.append(_start(request, prepared, model, config, is_refusable=not choices))
    except BaseException:
        for choice in choices:
            choice.close()
        raise
    return choices


async def until_placed(choices: Sequence[Choice]) -> None:
    """Wait for workers for choices that could be sent to none yet; close all if one gets none.

    Raises:
        ApiError: there is no worker for one of them.
    """
    try:
        for choice in choices:
            await choice.attempts.until_placed()
    except BaseException:
        for choice in choices:
            choice.close()
        raise


def _check_kv_transfer(prepared: Prepared, model: ServedModel, config: FrontendConfig) -> None:
    """Reject kv_transfer_params if clients may not send them, and requests that the model's workers cannot serve."""
    params, name = prepared.options.kv_transfer_params, "kv_transfer_params"
    if params is not None and not config.allow_kv_transfer_params:
        raise ApiError(400, f"{name} are accepted from clients only with --allow-kv-transfer-params", param=name)
    if params is not None and len(prepared.prompts) * (prepared.options.n or 1) > 1:
        raise ApiError(400, f"{name} need a single prompt and a single answer", param=name)
    if model.card.role == "prefill" and not (params and params.get("do_remote_decode")):
        raise ApiError(503, f"only prefill workers serve model {model.card.name!r} at the moment; retry later")


def _request(
    prepared: Prepared, model: ServedModel, prompt: PreparedPrompt, limit: int, index: int, request_id: str
) -> ChoiceRequest:
    options, extension = prepared.options, prepared.extension
    conditions = StopConditions(
        max_tokens=limit,
        is_default_limit=prepared.is_limit_a_bound,
        min_tokens=options.min_tokens or 0,
        stop=options.stops or None,
        stop_token_ids=options.stop_token_ids or [],
        ignore_eos=bool(options.ignore_eos if extension.ignore_eos is None else extension.ignore_eos),
        stop_after=extension.stop_after,
    )
    return ChoiceRequest(
        prompt=prompt,
        conditions=conditions,
        sampling=_sampling(prepared, index),
        eos_token_ids=model.card.eos_token_ids,
        request_id=request_id,
        instance_id=extension.backend_instance_id,
        rank=extension.dp_rank if prepared.vllm.dp_rank is None else prepared.vllm.dp_rank,
        session=extension.session_id or options.session_id,
        kv_transfer_params=options.kv_transfer_params,
        tools=prepared.tools,
        scope=_scope(prepared.vllm.cache_salt, model.adapter),
        num_choices=prepared.options.n or 1,
        priority=prepared.vllm.priority,
    )


def _scope(salt: str, adapter: Adapter | None) -> CacheScope | None:
    """Return whose cached KV a request may share, None if everybody's."""
    if adapter is None:
        return CacheScope(salt=salt) if salt else None
    return CacheScope(salt=salt, lora_name=adapter.name, lora_id=adapter.id, lora_path=adapter.path)


def _start(
    request: ChoiceRequest, prepared: Prepared, model: ServedModel, config: FrontendConfig, *, is_refusable: bool
) -> Choice:
    conditions, is_directed = request.conditions, request.kv_transfer_params is not None
    limit = model.card.migration_limit if config.migration_limit is None else config.migration_limit
    terms = Terms(
        limit=0 if is_directed else limit,  # its client has bound it to the worker that has its KV
        config=model.stages.config,
        is_pinned=request.instance_id is not None,
        is_whole=is_directed,
        can_continue=prepared.constraint is None or model.card.continues_constrained,
    )
    attempts = Attempts(model.stages, request, terms, is_refusable=is_refusable)
    visible = prepared.shape.visible_tokens if prepared.shape is not None else frozenset[str]()
    if not prepared.vllm.skip_special_tokens:
        visible |= model.text.tokenizer.special_tokens
    text = ChoiceText(
        model.text.tokenizer.detokenizer(visible),
        stops=prepared.options.stops,
        end_token_ids=[
            *(prepared.options.stop_token_ids or ()),
            *(() if conditions.ignore_eos else request.eos_token_ids),
        ],
        min_tokens=conditions.min_tokens,
        max_tokens=conditions.max_tokens,
        shows_stop=prepared.vllm.include_stop_str_in_output,
    )
    names: TokenNames = AsIds() if prepared.vllm.return_tokens_as_token_ids else model.text.tokenizer
    return Choice(attempts, text, request, names)


def _sampling(prepared: Prepared, index: int) -> dict[str, Any]:
    """Return the sampling options for the engine; each choice has its own seed, if the client gave one."""
    request, extension = prepared.options, prepared.extension
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    options = {name: getattr(request, name) for name in names}
    for name in ("top_k", "repetition_penalty"):
        own = getattr(extension, name)
        options[name] = getattr(request, name) if own is None else own
    if extension.greed_sampling:
        options["temperature"] = 0.0
    if request.seed is not None:
        options["seed"] = request.seed + index
    elif index:
        options["choice"] = index
    if (wanted := prepared.constraint) is not None:
        options["guided_decoding"] = {wanted.kind: wanted.value}
    options |= {"logprobs": prepared.num_logprobs, "prompt_logprobs": prepared.num_prompt_logprobs}
    own = prepared.vllm
    options |= {
        "allowed_token_ids": own.allowed_token_ids,
        "bad_words": own.bad_words or None,
        "repetition": own.repetition,
    }
    return {name: value for name, value in options.items() if value is not None}
