"""From an OpenAI request to prompts in token ids, hashed and sent; templates and tokenizers run off the event loop."""

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
from starlette.responses import Response

from serving.frontend.answer import DONE, annotation
from serving.frontend.answering import Asked
from serving.frontend.config import FrontendConfig
from serving.frontend.generation import Generation, Prompt
from serving.frontend.metrics import ModelMetrics
from serving.frontend.models import ServedModel
from serving.frontend.openai import ApiError, ChatRequest, CompletionRequest, NvExt, Request
from serving.frontend.template import TemplateError
from serving.protocol import StopConditions
from serving.tokenizer import Ids

MAX_WORK = 1 << 20
"""Tokens one request may ask for in all its choices together."""

INLINE_TOKENS = 16_384
"""Longer prompts are hashed off the event loop."""

DP_RANK = "dp_rank:"


async def prepare(
    asked: Request, model: ServedModel, *, metrics: ModelMetrics, config: FrontendConfig, started: float, id: str
) -> Asked | Response:
    """Return an accepted request, on its way to its engines; or at once the answer to a question about routing.

    Raises:
        ApiError: it cannot be served.
    """
    extension = asked.nvext or NvExt()
    _check_tokens(map(int, asked.logit_bias or ()), model, "logit_bias")
    if isinstance(asked, ChatRequest):
        text = await asyncio.to_thread(_render, asked, model, extension)
        texts: list[str] = [text]
        prompts = [await asyncio.to_thread(model.tokenizer.encode, text, special=extension.use_raw_prompt)]
    else:
        assert isinstance(asked, CompletionRequest)
        texts, prompts = await _tokenize(asked, model)
    for tokens in prompts:
        if not len(tokens):
            raise ApiError(400, "the prompt has no tokens", param="messages" if texts else "prompt")
    hashed = [await _hashed(tokens, model.card.kv_cache_block_size) for tokens in prompts]
    limits = [_limit(asked, len(tokens), model) for tokens in prompts]
    n = asked.n or 1
    if asked.limit is not None and sum(limits) * n > MAX_WORK:
        raise ApiError(400, f"all choices together may have at most {MAX_WORK} tokens", param="n")
    metrics.count("input_tokens", by=sum(map(len, prompts)))
    for tokens in prompts:
        metrics.observe("input_sequence_tokens", len(tokens))
    if "query_instance_id" in extension.annotations:
        return _where(model, hashed[0], id)
    generations: list[Generation] = []
    try:
        for prompt, limit in zip(hashed, limits, strict=True):
            for choice in range(n):
                generation = _generate(asked, extension, model, prompt, limit, choice, config, id)
                generations.append(generation)
                overlap = generation.placement.overlap_blocks * prompt.block_size / generation.num_prompt
                metrics.observe("router_overlap_share", overlap)
                metrics.count("router_decisions", f"{generation.placement.worker.instance_id:x}")
    except BaseException:
        for generation in generations:
            generation.close()
        raise
    echoes = [text for text in texts for _ in range(n)] if getattr(asked, "echo", False) else [""] * len(generations)
    annotations = _annotations(extension, texts, prompts, id)
    return Asked(
        asked,
        id=id,
        is_chat=isinstance(asked, ChatRequest),
        generations=generations,
        echoes=echoes,
        annotations=annotations,
        metrics=metrics,
        started=started,
    )


def _render(asked: ChatRequest, model: ServedModel, extension: NvExt) -> str:
    messages = [message.for_template() for message in asked.messages]
    if extension.use_raw_prompt:
        return "".join(message["content"] for message in messages)
    try:
        return model.template.render(messages, asked.tools if asked.tool_choice != "none" else None)
    except TemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


async def _tokenize(asked: CompletionRequest, model: ServedModel) -> tuple[list[str], list[Ids]]:
    """Return the prompts' texts (of token prompts only if they are to be echoed) and token ids."""
    texts: list[str] = []
    prompts: list[Ids] = []
    for prompt in asked.prompts():
        if isinstance(prompt, str):
            texts.append(prompt)
            prompts.append(await asyncio.to_thread(model.tokenizer.encode, prompt, special=True))
        else:
            _check_tokens(prompt, model, "prompt")
            prompts.append(np.array(prompt, np.uint32))
            texts.append("".join(model.tokenizer.detokenizer().texts(prompt)) if asked.echo else "")
    return texts, prompts


def _check_tokens(tokens: Iterable[int], model: ServedModel, param: str) -> None:
    """Refuse tokens that the model does not have: an engine may fail on them for everyone."""
    size = model.vocab_size
    if size is not None and (largest := max(tokens, default=0)) >= size:
        raise ApiError(400, f"there is no token {largest}; the model has {size}", param=param)


async def _hashed(tokens: Ids, block_size: int) -> Prompt:
    if len(tokens) <= INLINE_TOKENS:
        return Prompt(tokens, block_size)
    return await asyncio.to_thread(Prompt, tokens, block_size)


def _limit(asked: Request, num_prompt: int, model: ServedModel) -> int:
    """Return the tokens that may be generated."""
    context, limit = model.card.context_length, asked.limit
    if num_prompt + (limit or 1) > context:
        wanted = f"{num_prompt} prompt tokens" + (f" and max_tokens of {limit}" if limit else "")
        message = f"this model's context holds {context} tokens; the request has {wanted}"
        raise ApiError(
            400,
            message,
            code="context_length_exceeded",
            param="messages" if isinstance(asked, ChatRequest) else "prompt",
        )
    return limit or context - num_prompt


def _generate(
    asked: Request,
    extension: NvExt,
    model: ServedModel,
    prompt: Prompt,
    limit: int,
    choice: int,
    config: FrontendConfig,
    id: str,
) -> Generation:
    card = model.card
    ignore_eos = extension.ignore_eos if extension.ignore_eos is not None else bool(asked.ignore_eos)
    migrations = card.migration_limit if config.migration_limit is None else config.migration_limit
    return Generation(
        model.routing,
        prompt,
        StopConditions(
            max_tokens=limit,
            is_default_limit=asked.limit is None,
            min_tokens=asked.min_tokens,
            stop=asked.stops or None,
            ignore_eos=ignore_eos,
        ),
        sampling=_sampling(asked, extension, choice),
        eos_token_ids=card.eos_token_ids,
        stops=asked.stops,
        tokenizer=model.tokenizer,
        migration_limit=migrations,
        request_id=id,
        instance_id=extension.backend_instance_id,
        rank=_rank(extension),
        session=extension.session_id,
    )


def _sampling(asked: Request, extension: NvExt, choice: int) -> dict[str, Any]:
    """Return what the engine needs to sample; each choice has a seed of its own."""
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias")
    options = {name: value for name in names if (value := getattr(asked, name)) is not None}
    for name in ("top_k", "repetition_penalty"):
        value = getattr(extension, name) if getattr(extension, name) is not None else getattr(asked, name)
        if value is not None:
            options[name] = value
    if extension.greed_sampling:
        options["temperature"] = 0.0
    if asked.seed is not None or choice:
        options["seed"] = (asked.seed or 0) + choice
    if asked.num_logprobs is not None:
        options["logprobs"] = asked.num_logprobs
    return options


def _rank(extension: NvExt) -> int | None:
    for note in extension.annotations:
        if note.startswith(DP_RANK) and note[len(DP_RANK) :].isdigit():
            return int(note[len(DP_RANK) :])
    return None


def _annotations(extension: NvExt, texts: list[str], prompts: list[Ids], id: str) -> dict[str, Any]:
    values = {"formatted_prompt": texts[0] if texts else "", "token_ids": prompts[0].tolist(), "request_id": id}
    return {name: values[name] for name in extension.annotations if name in values}


def _where(model: ServedModel, prompt: Prompt, id: str) -> Response:
    """Answer `query_instance_id`: where the request would go. Nothing is generated."""
    routing = model.routing
    placement = routing.pick(len(prompt.tokens), prompt.hashes)
    routing.on_finish(placement)
    body = annotation("worker_instance_id", str(placement.worker.instance_id))
    body += annotation("token_ids", prompt.tokens.tolist()) + DONE
    return Response(body, media_type="text/event-stream", headers={"x-request-id": id})
