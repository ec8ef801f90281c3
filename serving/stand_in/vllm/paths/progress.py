"""Requests in progress, which can be aborted."""

import re

from starlette.requests import Request
from starlette.responses import Response

from serving.engines.mock.engine import Mocker
from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.paths.bodies import object_of

ENGINE_ID = re.compile(r"cmpl-(?P<completion>.+)-\d+\Z|(?:chatcmpl-|resp_)(?P<other>.+)\Z", re.DOTALL)
"""vLLM's ids of requests in its engine: the answer's id, and for a completion the number of its prompt behind it."""


class RunningRequests:
    """The handlers."""

    def __init__(self, engine: Mocker) -> None:
        self._engine = engine

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
