"""What answers contain for NVIDIA's extensions of a request: annotations, extra fields, where it would go."""

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.responses import Response

from serving.frontend.api.errors import no_worker
from serving.frontend.api.openai import NvExt
from serving.frontend.api.sse import DONE, annotation
from serving.frontend.generation.choice import Choice
from serving.frontend.prepared import Prepared, PreparedPrompt
from serving.frontend.served_model import ServedModel
from serving.router.decision import AllBusyError, NoWorkersError
from serving.routing.placement import WantedRank
from serving.runtime.world import world


def annotations(prepared: Prepared, request_id: str) -> bytes:
    """Return the requested annotations, which come before all other events."""
    if not prepared.extension.annotations:
        return b""
    values = {
        "formatted_prompt": prepared.formatted,
        "token_ids": prepared.prompts[0].tokens.tolist(),
        "request_id": request_id,
    }
    wanted = dict.fromkeys(name for name in prepared.extension.annotations or () if name in values)
    return b"".join(annotation(name, values[name]) for name in wanted)


def extra_fields(extension: NvExt, choice: Choice, started: float) -> dict[str, Any] | None:
    """Return the `nvext` of an answer, if any of its fields were requested; the request arrived at `started`."""
    if not extension.extra_fields:
        return None
    fields: dict[str, Callable[[Choice], dict[str, Any]]]
    fields = {"worker_id": _workers, "timing": partial(_timing, started=started), "routing": _routing}
    return {name: field(choice) for name, field in fields.items() if name in extension.extra_fields}


def _workers(choice: Choice) -> dict[str, int]:
    """Return which workers computed the prompt (if it was a prefill worker) and generated the answer."""
    attempts, workers = choice.attempts, dict[str, int]()
    for stage, call in (("prefill", attempts.prefill), ("decode", attempts.decode)):
        if call is not None:
            rank = call.placement.rank
            workers |= {f"{stage}_worker_id": rank.instance_id, f"{stage}_dp_rank": rank.dp_rank}
    return workers


def _timing(choice: Choice, *, started: float) -> dict[str, Any]:
    """Return the durations of the stages, under Dynamo's names, and their times, as far as known."""
    attempts = choice.attempts
    stages = {name: (at - started) * 1000 for name, at in attempts.stamps().items()}
    ttft = (attempts.first_token_s - started) * 1000 if attempts.first_token_s else None
    begin, end = stages.get("admitted", stages.get("prefill_queued")), stages.get("prefill_end", ttft)
    known = {
        "prefill_wait_time_ms": begin,
        "prefill_time_ms": None if begin is None or end is None else max(end - begin, 0.0),
        "ttft_ms": ttft,
        "total_time_ms": (world().now() - started) * 1000,
        "kv_transfer_estimated_latency_ms": None if (seconds := attempts.hand_over_s) is None else seconds * 1000,
        "kv_hit_rate": choice.num_cached / choice.num_prompt,
        "router_queue_depth": attempts.prompt_placement.queue_depth,
        "stages": stages,
    }
    return {name: value for name, value in known.items() if value is not None}


def _routing(choice: Choice) -> dict[str, int]:
    """Return what the router knew and what it chose."""
    placement, prompt_placement = choice.attempts.placement, choice.attempts.prompt_placement
    best_blocks = prompt_placement.decision.best_blocks
    facts = {
        "worker_slot": placement.slot,
        "queue_depth": prompt_placement.queue_depth,
        "predicted_tokens": choice.num_overlap_tokens,
        "best_tokens": -1 if best_blocks is None else best_blocks * choice.block_size,
        "cached_tokens": choice.num_cached,
        **{f"{tier}_tokens": count for tier, count in choice.tier_tokens.items()},
    }
    return facts | ({"prefill_slot": prompt_placement.slot} if choice.attempts.prefill is not None else {})


def instance_query(model: ServedModel, prompt: PreparedPrompt, request_id: str) -> Response:
    """Answer `query_instance_id`: where the request would go. Nothing is generated.

    Raises:
        ApiError: there is no worker to send it to.
    """
    workers = model.workers
    try:
        placement = workers.pick(WantedRank(len(prompt.tokens), prompt.hashes, is_refusable=False))
    except (NoWorkersError, AllBusyError) as error:
        raise no_worker(error) from error
    workers.on_finish(placement)
    body = annotation("worker_instance_id", str(placement.rank.instance_id))
    body += annotation("token_ids", prompt.tokens.tolist()) + DONE
    return Response(body, media_type="text/event-stream", headers={"x-request-id": request_id})
