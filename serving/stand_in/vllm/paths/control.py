"""What can be done to the engine while it runs: its caches are emptied, and requests are aborted."""

import re

from starlette.requests import Request
from starlette.responses import Response

from serving.engines.mock.engine import Mocker
from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import done, flag, object_of

ENGINE_ID = re.compile(r"cmpl-(?P<completion>.+)-\d+\Z|(?:chatcmpl-|resp_)(?P<other>.+)\Z", re.DOTALL)
"""vLLM's ids of requests in its engine: the answer's id, and for a completion the number of its prompt behind it."""


class Control:
    """The handlers."""

    def __init__(self, engine: Mocker) -> None:
        self._engine = engine

    async def reset_prefix(self, request: Request) -> Response:
        """POST /reset_prefix_cache: whether it is empty now; it is not while requests hold blocks."""
        preempts_running = flag(request, "reset_running_requests", False)
        if flag(request, "reset_external", False) and self._engine.ranks[0].has_host_memory:
            message = "reset_external: the KV in tiers beyond the GPU cannot be reset in this stand-in; leave it out"
            raise RefusedError(501, "NotImplementedError", message)
        if preempts_running and self._engine.ranks[0].has_host_memory:
            message = "reset_running_requests is not simulated with KV in host memory; leave it out"
            raise RefusedError(501, "NotImplementedError", message)
        try:
            results = [
                await rank.control.reset_prefix_cache(preempts_running=preempts_running) for rank in self._engine.ranks
            ]
        except RuntimeError as error:
            message = f"Call to reset_prefix_cache method failed: {error}"
            raise RefusedError(500, "InternalServerError", message) from error
        return json_response({"success": all(results)})

    async def reset_other(self, request: Request) -> Response:
        """POST /reset_mm_cache and /reset_encoder_cache: a model of text has neither."""
        return done()

    async def on_abort(self, request: Request) -> Response:
        """POST /abort_requests: those with these ids, or all."""
        asked = await object_of(request, "Invalid JSON format")
        ids = asked.get("request_ids")
        if not ids:
            return json_response({"status": "aborted", "aborted": self._abort(None)})
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise RefusedError(400, "Bad Request", "request_ids must be a list of strings", "request_ids")
        self._abort(set(filter(None, map(_given, ids))))
        return json_response({"status": "aborted", "aborted": len(ids)})

    def _abort(self, ids: set[str] | None) -> int:
        """Abort the requests that clients gave these ids, or all; return how many there were."""
        found = [(rank, live) for rank in self._engine.ranks for live in rank.control.lives()]
        found = [(rank, live) for rank, live in found if ids is None or live.request_id in ids]
        for rank, live in found:
            rank.control.abort(live, is_asked=True)
        return len(found)


def _given(engine_id: str) -> str:
    """Return the id that a client gave the request that has this one in vLLM's engine ("": there can be none)."""
    match = ENGINE_ID.match(engine_id)
    return "" if match is None else match["completion"] or match["other"]
