"""The routes of the frontend, and what stands before them all: keys, limits, draining."""

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.frontend import openai
from serving.frontend.answering import BEGUN, Answering
from serving.frontend.config import FrontendConfig
from serving.frontend.document import openapi
from serving.frontend.metrics import FrontendMetrics
from serving.frontend.models import Models, ServedModel
from serving.frontend.openai import ApiError, ChatRequest, CompletionRequest
from serving.frontend.passthrough import hand_through
from serving.frontend.preprocess import prepare
from serving.model_card import ModelType
from serving.runtime.messages import CallError

log = logging.getLogger(__name__)

INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed off the event loop."""

MAX_URI_BYTES = 8 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_HEADERS = 100
BODY_TIMEOUT_S = 60.0
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
        self._config = config
        self._siblings = siblings
        self._answers: set[Answering] = set()
        self.num_open = 0
        """Requests in progress."""

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest, ModelType.Completion)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatRequest, ModelType.Chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [_describe(model) for model in self._models.all()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return _json(_describe(self._find(request.path_params["name"])))

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
            return _json({"status": "not_ready", "stage": "draining", **facts}, 503)
        if not instances:
            return _json({"status": "unhealthy", "message": "No endpoints available", **facts}, 503)
        return _json({"status": "healthy", **facts})

    async def live(self, request: Request) -> Response:
        """GET /live: whether the process is."""
        return _json({"status": "live", "message": "Service is live"})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        others = await self._siblings() if self._siblings is not None else []
        body = self.metrics.exposition(others, self._models.worker_gauges())
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _answer(self, request: Request, kind: type[openai.Request], whole: ModelType) -> Response:
        started = time.perf_counter()
        body = await self._body(request)
        if len(body) <= INLINE_BYTES:
            asked = openai.parse(body, kind)
        else:
            asked = await asyncio.to_thread(openai.parse, body, kind)
        model = self._find(asked.model)
        metrics = self.metrics.of(asked.model)
        endpoint = "chat_completions" if kind is ChatRequest else "completions"
        if model.card.model_type is whole:
            return await hand_through(model, msgspec.json.decode(body), endpoint=endpoint, metrics=metrics)
        if model.card.model_type is not ModelType.Backend:
            raise ApiError(404, f"model {asked.model!r} does not offer {request.url.path}", code="model_not_found")
        try:
            prepared = await prepare(
                asked, model, metrics=metrics, config=self._config, started=started, id=_request_id(request)
            )
        except ApiError as error:
            metrics.count("requests", endpoint, "stream" if asked.stream else "unary", "error")
            if error.status in (429, 503):
                metrics.count("model_rejection", endpoint)
            raise
        if isinstance(prepared, Response):
            return prepared
        return Answering(prepared, self._answers)

    def _find(self, name: str) -> ServedModel:
        model = self._models.get(name)
        if model is None:
            served = ", ".join(repr(model.card.name) for model in self._models.all()) or "none"
            shown = name if len(name) <= 128 else name[:128] + "..."
            message = f"model {shown!r} is not served here; served: {served}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return model

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "application/json").lower()
        form, _, parameters = kind.partition(";")
        charset = re.search(r"charset\s*=\s*\"?([\w-]+)", parameters)
        if form.strip() not in ("application/json", "application/octet-stream", "") or (
            charset is not None and charset[1] not in ("utf-8", "utf8", "us-ascii")
        ):
            raise ApiError(415, f"the content type must be application/json in UTF-8, not {kind[:100]}")
        limit = self._config.max_body_mb << 20
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise ApiError(413, f"the body is larger than {self._config.max_body_mb} MiB")
        except TimeoutError as error:
            raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from error
        return bytes(body)

    async def sweep(self) -> None:
        """For ever: hang up on clients that leave their answers unread."""
        limit = self._config.write_timeout_s
        while True:
            await asyncio.sleep(min(limit / 4, 5))
            now = time.perf_counter()
            for answering in list(self._answers):
                if answering.is_writing_since and now - answering.is_writing_since > limit:
                    log.info("a client that left its answer unread for %g s is hung up on", limit)
                    answering.hang_up()


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
        except Exception:
            log.exception("a request failed")
            if isinstance(scope.get(BEGUN), bool):
                raise  # the connection breaks off: better than an answer that looks whole
            refusal = DEFECT
        else:
            return
        await _error_response(refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = scope["headers"]
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_URI_BYTES:
            return ApiError(414, f"the address is longer than {MAX_URI_BYTES} bytes")
        if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            return ApiError(431, f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them")
        if self._key:
            given = next((value for name, value in headers if name == b"authorization"), b"")
            if not hmac.compare_digest(given, b"Bearer " + self._key):
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
    app = FastAPI(title="dynabench frontend", docs_url=None, redoc_url=None, openapi_url=None)
    document = msgspec.json.encode(openapi())

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
    return Guard(app, frontend, config)


def _error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


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
    return given if REQUEST_ID.match(given) else uuid.uuid4().hex
