"""The guard in front of every route, and the form of its errors."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.frontend.answering import Answering, Handler
from serving.frontend.answers.sending import BEGUN
from serving.frontend.api.errors import ApiError

log = logging.getLogger(__name__)

DEFECT = ApiError(500, "the frontend failed on this request; its log says why")


class Admission(Protocol):
    """Which requests may pass."""

    def refusal(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], *, num_open: int, is_draining: bool
    ) -> ApiError | None:
        """Return the error for a request that may not pass."""
        ...


class Guard:
    """In front of every route: counts requests, and answers those that may not pass or that fail with an error."""

    def __init__(
        self,
        app: ASGIApp,
        answering: Answering,
        admission: Admission,
        *,
        hot: Mapping[tuple[str, str], Handler],
        open_paths: Collection[str],
    ) -> None:
        """Guard an application.

        Args:
            app: the application.
            answering: the requests in progress.
            admission: which requests may pass.
            hot: handlers that are called directly, by method and path.
            open_paths: paths that are neither guarded nor counted.
        """
        self._app = app
        self._answering = answering
        self._admission = admission
        self._hot = hot
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with an error."""
        if scope["type"] != "http":
            return
        answering = self._answering
        path = scope["path"] = scope["path"].rstrip("/") or "/"
        if path in self._open:
            await self._app(scope, receive, send)
            return
        method, headers = scope["method"], scope["headers"]
        error = self._admission.refusal(
            method, path, headers, num_open=answering.num_open, is_draining=answering.is_draining
        )
        if error is not None:
            await answering.dialect.error_response(path, error)(scope, receive, send)
            return
        answering.num_open += 1
        handler = self._hot.get((method, path))
        try:
            if handler is None:
                await self._app(scope, receive, send)
            else:
                await self._answer(handler, scope, receive, send)
        finally:
            answering.num_open -= 1

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
            if BEGUN in scope or not self._answering.is_draining or task is None:
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
        await self._answering.dialect.error_response(scope["path"], refusal)(scope, receive, send)
