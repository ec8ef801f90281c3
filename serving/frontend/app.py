"""The routes of the frontend, and what stands before them all: keys, limits, draining."""

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.frontend.answering import BEGUN, Answering
from serving.frontend.config import FrontendConfig
from serving.frontend.dispatch import dispatch
from serving.frontend.document import openapi
from serving.frontend.facts import Facts, as_json
from serving.frontend.intake import Intake
from serving.frontend.metrics import FrontendMetrics
from serving.frontend.models import Models, ServedModel
from serving.frontend.openai import ApiError
from serving.frontend.passthrough import hand_through
from serving.frontend.preparer import Kind
from serving.frontend.preprocess import HandedThrough, Prepared
from serving.runtime.client import ReplyStream
from serving.runtime.messages import CallError

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")
DEFECT = ApiError(500, "the frontend failed on this request; its log says why")
Handler = Callable[[Request], Awaitable[Response]]
Siblings = Callable[[], Awaitable[list[dict[str, Any]]]]


class Frontend:
    """The handlers."""

    def __init__(self, models: Models, config: FrontendConfig, siblings: Siblings | None = None) -> None:
        self.is_draining = False
        self.metrics = FrontendMetrics()
        self._models = models
        self.intake = Intake(models, config)
        self._config = config
        self._siblings = siblings
        self._answers: set[Answering] = set()
        self._handed_through: set[ReplyStream] = set()
        self.num_open = 0
        """Requests in progress."""

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, "completion")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, "chat")

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return as_json({"object": "list", "data": [_describe(model) for model in self._models.all()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return as_json(_describe(self.intake.find(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """GET /health: whether requests can be served."""
        models = self._models.all()
        endpoints = sorted({str(model.card.address) for model in models})
        instances = [
            {**dict(zip(("namespace", "component", "endpoint"), model.card.address, strict=True)), "instance_id": id}
            for model in models
            for id in sorted({worker.instance_id for worker in model.routing.workers()})
        ]
        facts = {"endpoints": endpoints, "instances": instances}
        if self.is_draining:
            return as_json({"status": "not_ready", "stage": "draining", **facts}, 503)
        if not instances:
            return as_json({"status": "unhealthy", "message": "No endpoints available", **facts}, 503)
        return as_json({"status": "healthy", **facts})

    async def live(self, request: Request) -> Response:
        """GET /live: whether the process is."""
        return as_json({"status": "live", "message": "Service is live"})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        others = await self._siblings() if self._siblings is not None else []
        self.metrics.keep_workers(self._models.instances())
        body = self.metrics.exposition(others, self._models.worker_gauges())
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    def state(self) -> dict[str, Any]:
        """Return what this process counted, for another that serves /metrics."""
        self.metrics.keep_workers(self._models.instances())
        return self.metrics.state()

    async def _answer(self, request: Request, kind: Kind) -> Response:
        started = time.perf_counter()
        model, prepared = await self.intake.take(request, kind)
        metrics = self.metrics.of(model.card.name)
        endpoint = "chat_completions" if kind == "chat" else "completions"
        if isinstance(prepared, HandedThrough):
            return hand_through(model, prepared, self._handed_through, endpoint=endpoint, metrics=metrics)
        assert isinstance(prepared, Prepared)
        try:
            asked = dispatch(
                prepared, model, metrics=metrics, config=self._config, started=started, id=_request_id(request)
            )
        except ApiError as error:
            metrics.count("requests", endpoint, "stream" if prepared.options.stream else "unary", "error")
            if error.status in (429, 503):
                metrics.count("model_rejection", endpoint)
            raise
        return asked if isinstance(asked, Response) else Answering(asked, self._answers)

    def end_all(self) -> None:
        """End all answers with an error: the process ends before they are done."""
        message = "this server ends before the answer is complete"
        for answering in list(self._answers):
            answering.fail(ApiError(503, message))
        for stream in list(self._handed_through):
            stream.abort(message, "draining")


class Guard:
    """Stands before every route: counts, and refuses what may not pass."""

    def __init__(self, app: ASGIApp, frontend: Frontend, config: FrontendConfig) -> None:
        self._app = app
        self._frontend = frontend
        self._key = config.api_key.encode()
        self._limit = config.max_inflight_requests
        self._hot: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): frontend.complete,
            ("POST", "/v1/chat/completions"): frontend.chat,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it with an error."""
        if scope["type"] != "http":
            return
        frontend = self._frontend
        if scope["path"] in ("/health", "/live"):
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is not None:
            await _error_response(error)(scope, receive, send)
            return
        frontend.num_open += 1
        handler = self._hot.get((scope["method"], scope["path"]))
        try:
            if handler is None:
                await self._app(scope, receive, send)
            else:
                await self._answer(handler, scope, receive, send)
        finally:
            frontend.num_open -= 1

    async def _answer(self, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer without the framework's layers between: they cost a tenth of a millisecond each time to first token."""
        try:
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except ClientDisconnect:
            return  # nobody is left to answer
        except ApiError as error:  # raised before anything was sent: see `Answering`
            refusal = error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if BEGUN in scope or not self._frontend.is_draining or task is None:
                raise
            task.uncancel()
            refusal = ApiError(503, "this server ends before the request is complete", headers={"connection": "close"})
        except Exception:
            log.exception("a request failed")
            if BEGUN in scope:
                raise  # the connection breaks off: better than an answer that looks whole
            refusal = DEFECT
        else:
            return
        await _error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._key:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            scheme, _, token = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token, self._key):
                error = ApiError(401, "no valid API key was given", code="invalid_api_key")
                error.headers["www-authenticate"] = "Bearer"
                return error
        if scope["method"] == "POST" and self._frontend.is_draining:
            return ApiError(503, "this server is about to end", headers={"connection": "close"})
        if scope["method"] == "POST" and self._frontend.num_open >= self._limit:
            return ApiError(429, f"{self._limit} requests are in progress; retry later")
        return None


def make_app(frontend: Frontend, config: FrontendConfig) -> ASGIApp:
    """Build the application."""
    app = FastAPI(title="dynabench frontend", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    document = msgspec.json.encode(openapi())
    facts = Facts(frontend.intake)

    async def describe(request: Request) -> Response:
        return Response(document, media_type="application/json")

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return _error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)
        path = request.url.path[:100]
        messages = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}
        message = messages.get(error.status_code, str(error.detail))
        return _error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))

    async def on_gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody is left to read it

    async def on_defect(_: Request, error: Exception) -> Response:
        return _error_response(DEFECT)

    routes: list[tuple[str, Any, str]] = [
        ("/v1/completions", frontend.complete, "POST"),
        ("/v1/chat/completions", frontend.chat, "POST"),
        ("/v1/models", frontend.models, "GET"),
        ("/v1/models/{name:path}", frontend.model, "GET"),
        ("/version", facts.version, "GET"),
        ("/tokenize", facts.tokenize, "POST"),
        ("/v1/tokenize", facts.tokenize, "POST"),
        ("/detokenize", facts.detokenize, "POST"),
        ("/v1/detokenize", facts.detokenize, "POST"),
        ("/tokenizer_info", facts.tokenizer_info, "GET"),
        ("/model_info", facts.model_info, "GET"),
        ("/get_model_info", facts.model_info, "GET"),
        ("/health", frontend.health, "GET"),
        ("/live", frontend.live, "GET"),
        ("/metrics", frontend.prometheus, "GET"),
        ("/openapi.json", describe, "GET"),
    ]
    for path, handler, method in routes:
        app.router.add_route(path, handler, methods=[method], include_in_schema=False)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_gone)
    app.add_exception_handler(CallError, on_defect)
    app.add_exception_handler(Exception, on_defect)
    guard = Guard(app, frontend, config)
    if not config.cors_allow_origins:
        return guard
    origins = [origin.strip() for origin in config.cors_allow_origins.split(",")]
    exposed = ["x-request-id", "x-worker-id", "x-worker-slot", "x-overlap-tokens", "retry-after"]
    return CORSMiddleware(
        guard, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
    )


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


def _describe(model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "dynabench",
        "max_model_len": card.context_length,
    }


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.match(given) else secrets.token_hex(16)
