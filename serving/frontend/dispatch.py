"""From a prepared request to its choices, each routed and sent."""

from typing import Any

from starlette.responses import Response

from serving.frontend.answer import DONE, annotation
from serving.frontend.answering import Asked
from serving.frontend.config import FrontendConfig
from serving.frontend.generation import Generation, refusal
from serving.frontend.metrics import ModelMetrics
from serving.frontend.models import ServedModel
from serving.frontend.openai import DP_RANK, NvExt, Request
from serving.frontend.preprocess import Prepared, Prompt
from serving.router.router import AllBusyError, NoWorkersError
from serving.worker.protocol import StopConditions


def dispatch(
    prepared: Prepared, model: ServedModel, *, metrics: ModelMetrics, config: FrontendConfig, started: float, id: str
) -> Asked | Response:
    """Send each choice of a request to an engine; or answer at once a question about routing.

    Raises:
        ApiError: there is nobody to send it to.
    """
    metrics.count("input_tokens", by=sum(len(prompt.tokens) for prompt in prepared.prompts))
    for prompt in prepared.prompts:
        metrics.observe("input_sequence_tokens", len(prompt.tokens))
    if "query_instance_id" in prepared.extension.annotations:
        return _where(model, prepared.prompts[0], id)
    n = prepared.options.n or 1
    generations: list[Generation] = []
    try:
        for prompt, limit in zip(prepared.prompts, prepared.limits, strict=True):
            for choice in range(n):
                generation = _generate(prepared, model, prompt, limit, choice, config, id, is_refusable=not generations)
                generations.append(generation)
                overlap = generation.placement.overlap_blocks * prompt.block_size / generation.num_prompt
                metrics.observe("router_overlap_share", overlap)
                metrics.count("router_decisions", f"{generation.placement.worker.instance_id:x}")
    except BaseException:
        for generation in generations:
            generation.close()
        raise
    return Asked(
        prepared,
        id=id,
        generations=generations,
        annotations=_annotations(prepared, id),
        metrics=metrics,
        started=started,
    )


def _generate(
    prepared: Prepared,
    model: ServedModel,
    prompt: Prompt,
    limit: int,
    choice: int,
    config: FrontendConfig,
    id: str,
    *,
    is_refusable: bool,
) -> Generation:
    card, options, extension = model.card, prepared.options, prepared.extension
    ignore_eos = extension.ignore_eos if extension.ignore_eos is not None else bool(options.ignore_eos)
    migrations = card.migration_limit if config.migration_limit is None else config.migration_limit
    return Generation(
        model.routing,
        prompt,
        StopConditions(
            max_tokens=limit,
            is_default_limit=not prepared.has_own_limit,
            min_tokens=options.min_tokens or 0,
            stop=options.stops or None,
            ignore_eos=ignore_eos,
        ),
        sampling=_sampling(prepared, choice),
        eos_token_ids=card.eos_token_ids,
        stop_token_ids=options.stop_token_ids or [],
        stops=options.stops,
        tokenizer=model.text.tokenizer,
        migration_limit=migrations,
        request_id=id,
        instance_id=extension.backend_instance_id,
        rank=_rank(extension),
        session=extension.session_id or options.session_id,
        is_refusable=is_refusable,
    )


def _sampling(prepared: Prepared, choice: int) -> dict[str, Any]:
    """Return what the engine needs to sample; each choice has a seed of its own."""
    asked: Request = prepared.options
    extension = prepared.extension
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
    options = {name: value for name in names if (value := getattr(asked, name)) is not None}
    for name in ("top_k", "repetition_penalty"):
        value = getattr(extension, name) if getattr(extension, name) is not None else getattr(asked, name)
        if value is not None:
            options[name] = value
    if extension.greed_sampling:
        options["temperature"] = 0.0
    if asked.seed is not None or choice:
        options["seed"] = (asked.seed or 0) + choice
    if prepared.num_logprobs is not None:
        options["logprobs"] = prepared.num_logprobs
    if prepared.num_prompt_logprobs is not None:
        options["prompt_logprobs"] = prepared.num_prompt_logprobs
    return options


def _rank(extension: NvExt) -> int | None:
    """Return the data-parallel rank that was asked for; `openai.parse` has checked its digits."""
    for note in extension.annotations:
        if note.startswith(DP_RANK):
            return int(note.removeprefix(DP_RANK))
    return None


def _annotations(prepared: Prepared, id: str) -> dict[str, Any]:
    wanted = prepared.extension.annotations
    if not wanted:
        return {}
    values = {
        "formatted_prompt": prepared.formatted,
        "token_ids": prepared.prompts[0].tokens.tolist(),
        "request_id": id,
    }
    return {name: values[name] for name in wanted if name in values}


def _where(model: ServedModel, prompt: Prompt, id: str) -> Response:
    """Answer `query_instance_id`: where the request would go. Nothing is generated."""
    routing = model.routing
    try:
        placement = routing.pick(len(prompt.tokens), prompt.hashes, is_refusable=False)
    except (NoWorkersError, AllBusyError) as error:
        raise refusal(error) from error
    routing.on_finish(placement)
    body = annotation("worker_instance_id", str(placement.worker.instance_id))
    body += annotation("token_ids", prompt.tokens.tolist()) + DONE
    return Response(body, media_type="text/event-stream", headers={"x-request-id": id})
