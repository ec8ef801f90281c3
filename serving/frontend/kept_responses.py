"""Responses that this process keeps: continued by requests, read and deleted by clients."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.api.conversations import Conversations
from serving.frontend.api.errors import ApiError
from serving.frontend.api.responses import earlier
from serving.frontend.api.responses.earlier import Continuing
from serving.frontend.config import FrontendConfig
from serving.frontend.preparing.messages import Body


class KeptResponses:
    """The handlers, and what requests for responses need."""

    def __init__(self, config: FrontendConfig) -> None:
        self.max_bytes = config.max_kept_responses_mb << 20
        self.conversations = Conversations(max_number=config.max_kept_responses, max_bytes=self.max_bytes)
        self.keeps = config.http_workers == 1 and config.max_kept_responses > 0
        """Whether any are kept; of several processes on one port, each would keep only its own."""

    async def answer(self, request: Request) -> Response:
        """GET or DELETE /v1/responses/{id}."""
        act = earlier.delete if request.method == "DELETE" else earlier.find
        return Response(act(self.conversations, request.path_params["id"]), media_type="application/json")


class ResponseTurn:
    """One request for a response: what it continues, and whether its response is kept."""

    def __init__(self, kept: KeptResponses) -> None:
        self._kept = kept
        self._items: bytes | None = None
        """Those that lead to the response, if it is to be kept."""

    def complete(self, body: Body, admit: Callable[[int], None]) -> Body:
        """Return a request with all of its conversation.

        Args:
            body: the request.
            admit: called with the number of bytes that the conversation so far adds.

        Raises:
            ApiError: it continues a response that is not kept or not admitted, or wants what cannot be kept.
        """
        asked = Continuing.of(body)
        if not self._kept.keeps:
            _check_nothing_kept(asked)
            return body
        if asked.store is False and asked.previous_response_id is None:
            return body
        items = asked.items(self._kept.conversations, admit)
        self._items = items if asked.store is not False and len(items) <= self._kept.max_bytes else None
        return body if asked.previous_response_id is None else earlier.with_items(body, items)

    @property
    def is_kept(self) -> bool:
        """Whether the response is to be kept, if it fits once it is complete."""
        return self._items is not None

    def keep(self, response: dict[str, Any]) -> bool:
        """Keep a response object, and return whether it fits; only if it is to be kept."""
        assert self._items is not None
        return earlier.keep(self._kept.conversations, self._items, response)


def _check_nothing_kept(asked: Continuing) -> None:
    wanted = {"previous_response_id": asked.previous_response_id is not None, "store": asked.store is True}
    for name, is_wanted in wanted.items():
        if is_wanted:
            message = (
                f"{name}: this server keeps no responses (its --http-workers is not 1, or --max-kept-responses is 0)"
            )
            raise ApiError(400, message, code="unsupported_parameter", param=name)
