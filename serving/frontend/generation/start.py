"""Send the choices of a request to engines: what each asks of one, and on which terms."""

import asyncio
from collections.abc import Sequence
from typing import Any

from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import AsIds, TokenNames
from serving.frontend.config import FrontendConfig
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.generation.choice import Choice
from serving.frontend.generation.kv_transfer import KvTransfer
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


async def start_choices(
    prepared: Prepared, model: ServedModel, config: FrontendConfig, request_id: str
) -> list[Choice]:
    """Send each choice of a request to an engine; once the first is accepted, the others are not refused.

    Of thousands of choices a slice is sent at a time. Choices that may wait for a worker are not placed yet: see `until_placed`.

    Raises:
        ApiError: there is no worker to send it to.
    """
    transfer = _kv_transfer(prepared, model, config)
    choices: list[Choice] = []
    num_tokens = 0
    try:
        for prompt, limit in zip(prepared.prompts, prepared.limits, strict=True):
            for index in range(prepared.options.n or 1):
                if num_tokens > SLICE_TOKENS:
                    await asyncio.sleep(0)
                    num_tokens = 0
                num_tokens += CHOICE_TOKENS + len(prompt.tokens) + limit
                request = _request(prepared, model, prompt, limit, index, request_id, transfer=transfer)
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


def _kv_transfer(prepared: Prepared, model: ServedModel, config: FrontendConfig) -> KvTransfer | None:
    """Return what a client that directs two workers itself has for this one.

    Raises:
        ApiError: clients may not do so, or the model's workers cannot serve the request.
    """
    params, name = prepared.options.kv_transfer_params, "kv_transfer_params"
    transfer = None if params is None else KvTransfer.of(params)
    if params is not None and not config.allow_kv_transfer_params:
        raise ApiError(400, f"{name} are accepted from clients only with --allow-kv-transfer-params", param=name)
    if params is not None and len(prepared.prompts) * (prepared.options.n or 1) > 1:
        raise ApiError(400, f"{name} need a single prompt and a single answer", param=name)
    if model.card.role == "prefill" and (transfer is None or not transfer.computes_prompt):
        raise ApiError(503, f"only prefill workers serve model {model.card.name!r} at the moment; retry later")
    return transfer


def _request(
    prepared: Prepared,
    model: ServedModel,
    prompt: PreparedPrompt,
    limit: int,
    index: int,
    request_id: str,
    *,
    transfer: KvTransfer | None,
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
    scope = _scope(prepared.vllm.cache_salt, model.adapter)
    return ChoiceRequest(
        prompt=prompt.within(scope),
        conditions=conditions,
        sampling=_sampling(prepared, index),
        eos_token_ids=model.card.eos_token_ids,
        request_id=request_id,
        instance_id=extension.backend_instance_id,
        rank=extension.dp_rank if prepared.vllm.dp_rank is None else prepared.vllm.dp_rank,
        session=extension.session_id or options.session_id,
        kv_transfer=transfer,
        tools=prepared.tools,
        scope=scope,
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
    conditions, is_directed = request.conditions, request.kv_transfer is not None
    limit = model.card.migration_limit if config.migration_limit is None else config.migration_limit
    terms = Terms(
        limit=0 if is_directed else limit,  # its client has bound it to the worker that has its KV
        config=model.stages.config,
        is_pinned=request.instance_id is not None,
        is_whole=is_directed,
        can_continue=prepared.constraint is None or model.card.continues_constrained,
    )
    attempts = Attempts.begin(model.stages, request, terms, is_refusable=is_refusable)
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
