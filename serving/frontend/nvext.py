"""What answers hold for NVIDIA's extensions of a request: annotations, extra fields, where it would go."""

import time
from typing import Any

from starlette.responses import Response

from serving.frontend.api.errors import no_worker
from serving.frontend.api.openai import NvExt
from serving.frontend.api.sse import DONE, annotation
from serving.frontend.generation.choice import Choice
from serving.frontend.models import ServedModel
from serving.frontend.preprocess import Prepared, Prompt
from serving.router.router import AllBusyError, NoWorkersError


def annotations(prepared: Prepared, request_id: str) -> bytes:
    """Return the events that were asked for, which come before all others."""
    if not prepared.extension.annotations:
        return b""
    values = {
        "formatted_prompt": prepared.formatted,
        "token_ids": prepared.prompts[0].tokens.tolist(),
        "request_id": request_id,
    }
    wanted = dict.fromkeys(name for name in prepared.extension.annotations if name in values)
    return b"".join(annotation(name, values[name]) for name in wanted)


def extra_fields(extension: NvExt, choice: Choice, started: float) -> dict[str, Any] | None:
    """Return the `nvext` of an answer, if any of its fields were asked for; the request came at `started`."""
    if not extension.extra_fields:
        return None
    placement = choice.attempts.placement
    worker, overlaps = placement.worker, placement.decision.overlaps
    block_size = choice.block_size
    fields = {
        "worker_id": {"decode_worker_id": worker.instance_id, "decode_dp_rank": worker.rank},
        "timing": {
            "total_time_ms": (time.perf_counter() - started) * 1000,
            "kv_hit_rate": choice.num_cached / choice.num_prompt,
            "router_queue_depth": placement.queue_depth,
        },
        "routing": {
            "worker_slot": placement.slot,
            "queue_depth": placement.queue_depth,
            "predicted_tokens": choice.num_overlap_tokens,
            "best_tokens": max(overlaps) * block_size if overlaps else -1,
            "cached_tokens": choice.num_cached,
        },
    }
    return {name: fields[name] for name in fields if name in extension.extra_fields}


def instance_query(model: ServedModel, prompt: Prompt, request_id: str) -> Response:
    """Answer `query_instance_id`: where the request would go. Nothing is generated.

    Raises:
        ApiError: there is nobody to send it to.
    """
    routing = model.routing
    try:
        placement = routing.pick(len(prompt.tokens), prompt.hashes, is_refusable=False)
    except (NoWorkersError, AllBusyError) as error:
        raise no_worker(error) from error
    routing.on_finish(placement)
    body = annotation("worker_instance_id", str(placement.worker.instance_id))
    body += annotation("token_ids", prompt.tokens.tolist()) + DONE
    return Response(body, media_type="text/event-stream", headers={"x-request-id": request_id})
