"""An application: routes, behind the guard, whose failures are answered in one dialect."""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import NamedTuple

import starlette.routing
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from serving.frontend.answering import Answering, Handler
from serving.frontend.api.errors import ApiError, NoRouteError
from serving.frontend.guard import DEFECT, Admission, Guard
from serving.runtime.messages import CallError

HOT = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Paths whose POST handlers are called without the framework's layers."""


class Route(NamedTuple):
    """A path, its methods, which the answer to another method names, and its handler."""

    path: str
    methods: str
    handler: Handler


def make_app(
    app: Starlette,
    routes: Iterable[Route],
    answering: Answering,
    admission: Admission,
    *,
    open_paths: Collection[str],
    is_bare: bool = False,
) -> ASGIApp:
    """Complete an application.

    Args:
        app: the application, without routes.
        routes: its routes.
        answering: the requests in progress.
        admission: which requests may pass.
        open_paths: requests to these paths are neither guarded nor counted.
        is_bare: whether unknown paths and methods are answered as by any server that is built on FastAPI, and HEAD is one
            of them where no route names it.
    """
    app.router.redirect_slashes = False
    hot: dict[tuple[str, str], Handler] = {}
    for path, methods, handler in routes:
        accepted = methods.split(", ")
        app.router.add_route(path, handler, methods=accepted, include_in_schema=False)
        if is_bare:
            added = app.router.routes[-1]
            assert isinstance(added, starlette.routing.Route)
            added.methods = set(accepted)
        if path in HOT:
            hot["POST", path] = handler
    for kind, answer in _failures(answering).items():
        app.add_exception_handler(kind, _bare if is_bare and kind is HTTPException else answer)
    return Guard(app, answering, admission, hot=hot, open_paths=open_paths)


async def _bare(_: Request, error: Exception) -> Response:
    """Answer an unknown path or method as FastAPI does."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def _failures(answering: Answering) -> dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    """Return what answers each kind of failure."""

    def refused(request: Request, error: ApiError) -> Response:
        return answering.dialect.error_response(request.url.path, error)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refused(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)
        path = request.url.path[:100]
        messages = {404: f"there is no {path}", 405: f"{path} does not accept {request.method}"}
        message = messages.get(error.status_code, str(error.detail))
        return refused(request, NoRouteError(error.status_code, message, headers=dict(error.headers or {})))

    async def on_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody is left to read it

    async def on_defect(request: Request, error: Exception) -> Response:
        return refused(request, DEFECT)

    return {
        ApiError: on_api_error,
        HTTPException: on_http_error,
        ClientDisconnect: on_gone,
        CallError: on_defect,
        Exception: on_defect,
    }
