"""The guard in front of every route, and the form of its errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.frontend.admission import Admission
from serving.frontend.answers.sending import BEGUN
from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import PATH as MESSAGES
from serving.frontend.api.messages.errors import body_at
from serving.frontend.app import Frontend
from serving.frontend.config import FrontendConfig

log = logging.getLogger(__name__)

DEFECT = ApiError(500, "the frontend failed on this request; its log says why")

Handler = Callable[[Request], Awaitable[Response]]


class Guard:
    """In front of every route: counts requests, and answers those that may not pass or that fail with an error."""

    def __init__(self, app: ASGIApp, frontend: Frontend, config: FrontendConfig) -> None:
        self._app = app
        self._frontend = frontend
        self._admission = Admission(config)
        self._hot: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): frontend.complete,
            ("POST", "/v1/chat/completions"): frontend.chat,
            ("POST", "/v1/responses"): frontend.respond,
            ("POST", MESSAGES): frontend.message,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with an error."""
        if scope["type"] != "http":
            return
        frontend = self._frontend
        scope["path"] = scope["path"].rstrip("/") or "/"
        if scope["path"] in ("/health", "/live"):
            await self._app(scope, receive, send)
            return
        method, headers = scope["method"], scope["headers"]
        error = self._admission.refusal(method, headers, num_open=frontend.num_open, is_draining=frontend.is_draining)
        if error is not None:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        frontend.num_open += 1
        handler = self._hot.get((method, scope["path"]))
        try:
            if handler is None:
                await self._app(scope, receive, send)
            else:
                await self._answer(handler, scope, receive, send)
        finally:
            frontend.num_open -= 1

    async def _answer(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer without the framework's layers, which would add a tenth of a millisecond to each time to first token."""
        try:
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except ClientDisconnect:
            return  # nobody is left to answer
        except ApiError as error:  # raised before anything was sent: see `CompletionResponse`
            refusal = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if BEGUN in scope or not self._frontend.is_draining or task is None:
                raise
            task.uncancel()
            refusal = ApiError(
                503, "the server shut down before the request was complete", headers={"connection": "close"}
            )
        except Exception:
            log.exception("a request failed")
            if BEGUN in scope:
                raise  # the connection breaks: better than an answer that looks complete
            refusal = DEFECT
        else:
            return
        await error_response(refusal, scope["path"])(scope, receive, send)


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form of the API that a path belongs to."""
    return Response(body_at(path, error), error.status, headers=error.headers, media_type="application/json")
