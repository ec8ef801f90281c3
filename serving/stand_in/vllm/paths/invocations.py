"""POST /invocations: SageMaker's only path for requests, whatever they ask for."""

import json

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from serving.frontend.answering import Answering
from serving.stand_in.vllm.paths.bodies import check_is_json, object_in

ADAPTER = "x-amzn-sagemaker-adapter-identifier"
"""The header that names the adapter; without it, a request is for the model itself, whatever its body says."""


class Invocations:
    """The handler."""

    def __init__(self, answering: Answering, name: str) -> None:
        """Hand requests to `answering`; `name` is the model's."""
        self._answering = answering
        self._name = name

    async def on_invoke(self, request: Request) -> Response:
        """POST /invocations: a chat if there are messages, else a completion."""
        check_is_json(request)
        asked = object_in(await self._answering.reader.body_of(request))
        asked["model"] = request.headers.get(ADAPTER) or self._name  # the body's own does not count
        answer = self._answering.chat if isinstance(asked.get("messages"), list) else self._answering.complete
        return await answer(_with_body(request, json.dumps(asked).encode()))


def _with_body(request: Request, body: bytes) -> Request:
    """Return a request with another body; after that it receives what the first one does."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return waiting.pop() if waiting else await request.receive()

    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-length"]
    length = (b"content-length", b"%d" % len(body))
    return Request({**request.scope, "headers": [*headers, length]}, receive)
