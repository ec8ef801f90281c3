"""The routes of the frontend, and the guard in front of them."""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.frontend import nvext
from serving.frontend.admission import Admission
from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.selection import answer_of
from serving.frontend.answers.sending import BEGUN, CompletionResponse
from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, KindName
from serving.frontend.api.messages.errors import PATH as MESSAGES
from serving.frontend.api.messages.errors import body_at
from serving.frontend.api.openapi import openapi
from serving.frontend.config import FrontendConfig
from serving.frontend.embeddings import embed
from serving.frontend.generation.choice import start_choices, until_placed
from serving.frontend.kept_responses import KeptResponses, Turn
from serving.frontend.metrics import FrontendMetrics, ModelMetrics, pool_gauges
from serving.frontend.model_info import ModelInfo, as_json
from serving.frontend.models import Models, ServedModel
from serving.frontend.passthrough import hand_through
from serving.frontend.prepared import Embeddable, HandedThrough, Prepared
from serving.frontend.request import RequestReader, unless_gone
from serving.frontend.server_metrics import server_counts, server_metrics
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import CallError
from serving.runtime.outages import Outages

log = logging.getLogger(__name__)

REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")
DEFECT = ApiError(500, "the frontend failed on this request; its log says why")
EXPOSED_HEADERS = ["x-request-id", "x-worker-id", "x-worker-slot", "x-overlap-tokens", "retry-after"]

Handler = Callable[[Request], Awaitable[Response]]
Siblings = Callable[[], Awaitable[list[dict[str, Any]]]]


class Frontend:
    """The handlers."""

    def __init__(
        self,
        models: Models,
        config: FrontendConfig,
        siblings: Siblings | None = None,
        outages: Sequence[Outages] = (),
    ) -> None:
        """Prepare to answer.

        Args:
            models: what is served.
            config: our settings.
            siblings: asks the other processes on our port for their counts (none: we are alone).
            outages: of the servers that we need.
        """
        self.is_draining = False
        self.metrics = FrontendMetrics()
        self.reader = RequestReader(models, config, self.metrics)
        self.num_open = 0
        """Requests in progress."""
        self._models = models
        self._config = config
        self._schema = msgspec.json.encode(openapi())
        self._siblings = siblings
        self._outages = outages
        self.kept = KeptResponses(config)
        self.info = ModelInfo(self.reader)
        self._responses: set[CompletionResponse] = set()
        self._handed_through: set[ReplyStream] = set()

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, "completion")

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, "chat")

    async def respond(self, request: Request) -> Response:
        """POST /v1/responses."""
        return await self._answer(request, "response")

    async def message(self, request: Request) -> Response:
        """POST /v1/messages."""
        return await self._answer(request, "message")

    async def embed(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        return await self._embed(request, "embedding")

    async def score(self, request: Request) -> Response:
        """POST /v1/score."""
        return await self._embed(request, "score")

    async def rerank(self, request: Request) -> Response:
        """POST /v1/rerank."""
        return await self._embed(request, "rerank")

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return as_json({"object": "list", "data": [_describe(model) for model in self._models.answering()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return as_json(_describe(self.reader.find(request.path_params["name"])))

    async def health(self, request: Request) -> Response:
        """GET /health: whether requests can be served, and what they would need that is away."""
        models = self._models.all()
        pools = self._models.pools()
        endpoints = sorted({str(pool.card.address) for pool in pools})
        instances = [
            {
                **dict(zip(("namespace", "component", "endpoint"), pool.card.address, strict=True)),
                "instance_id": id,
                "worker_type": pool.card.role,
            }
            for pool in pools
            for id in sorted({rank.instance_id for rank in pool.ranks()})
        ]
        away = [outages for outages in self._outages if outages.is_away]
        facts = {
            "endpoints": endpoints,
            "instances": instances,
            **({"away": [each.name for each in away]} if away else {}),
        }
        if self.is_draining:
            return as_json({"status": "not_ready", "stage": "draining", **facts}, 503)
        if not any(model.routing.num_ranks for model in models):
            message = "; ".join(["No endpoints available", *self._models.absences(), *map(str, away)])
            return as_json({"status": "unhealthy", "message": message, **facts}, 503)
        if away:
            code = 503 if any(outages.carries_requests for outages in away) else 200
            return as_json({"status": "degraded", "message": "; ".join(map(str, away)), **facts}, code)
        return as_json({"status": "healthy", **facts})

    async def schema(self, request: Request) -> Response:
        """GET /openapi.json."""
        return Response(self._schema, media_type="application/json")

    async def live(self, request: Request) -> Response:
        """GET /live: whether the process is alive."""
        return as_json({"status": "live", "message": "Service is live"})

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics."""
        others = await self._siblings() if self._siblings is not None else []
        self.metrics.keep_workers(self._models.instances())
        servers = server_metrics([server_counts(self._outages), *(other["servers"] for other in others)])
        models = (other["models"] for other in others)
        body = self.metrics.exposition(models, [*pool_gauges(self._models), *servers])
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    def state(self) -> dict[str, Any]:
        """Return what this process has counted, for another process that serves /metrics."""
        self.metrics.keep_workers(self._models.instances())
        return {"models": self.metrics.state(), "servers": server_counts(self._outages)}

    def end_all(self) -> None:
        """End all answers with an error: the process exits before they are done."""
        message = "the server shut down before the answer was complete"
        for response in list(self._responses):
            response.fail(ApiError(503, message))
        for stream in list(self._handed_through):
            stream.abort(message, "draining")

    async def _embed(self, request: Request, kind: KindName) -> Response:
        model, asked = await self.reader.read(request, kind)
        assert isinstance(asked, Embeddable)
        metrics, endpoint = self.metrics.of(model.card.name), KINDS[kind].endpoint
        metrics.count("input_tokens", by=sum(len(prompt.tokens) for prompt in asked.prompts))
        metrics.inflight += 1
        status = "error"
        try:
            response = await unless_gone(request, embed(model, asked, _request_id(request)))
            status = "success"
        except ApiError as error:
            if error.status in (429, 503):
                metrics.count("model_rejection", endpoint)
            raise
        except ClientDisconnect:
            status = "cancelled"
            raise
        finally:
            metrics.inflight -= 1
            metrics.count("requests", endpoint, "unary", status)
        return response

    async def _answer(self, request: Request, kind: KindName) -> Response:
        started = time.perf_counter()
        turn = Turn(self.kept) if kind == "response" else None
        model, prepared = await self.reader.read(request, kind, turn.complete if turn is not None else None)
        metrics = self.metrics.of(model.card.name)
        if isinstance(prepared, HandedThrough):
            return hand_through(model, prepared, self._handed_through, endpoint=KINDS[kind].endpoint, metrics=metrics)
        assert isinstance(prepared, Prepared)
        _count_prompts(prepared, metrics)
        request_id = _request_id(request)
        try:
            if "query_instance_id" in (prepared.extension.annotations or ()):
                return nvext.instance_query(model, prepared.prompts[0], request_id)
            choices = start_choices(prepared, model, self._config, request_id)
            if not all(choice.attempts.is_placed for choice in choices):
                await unless_gone(request, until_placed(choices))
        except ApiError as error:
            metrics.count("requests", prepared.endpoint, "stream" if prepared.options.stream else "unary", "error")
            if error.status in (429, 503):
                metrics.count("model_rejection", prepared.endpoint)
            raise
        for choice in choices:
            metrics.observe("router_overlap_share", choice.num_overlap_tokens / choice.num_prompt)
            metrics.count("router_decisions", f"{choice.attempts.prompt_placement.rank.instance_id:x}")
        accepted = AcceptedRequest(prepared=prepared, id=request_id, choices=choices, metrics=metrics, started=started)
        return CompletionResponse(accepted, answer_of(accepted, turn), self._responses)


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
            await _error_response(error, scope["path"])(scope, receive, send)
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
        await _error_response(refusal, scope["path"])(scope, receive, send)


ROUTES: tuple[tuple[str, str, Callable[[Frontend], Handler]], ...] = (
    ("/v1/completions", "POST", lambda frontend: frontend.complete),
    ("/v1/chat/completions", "POST", lambda frontend: frontend.chat),
    ("/v1/responses", "POST", lambda frontend: frontend.respond),
    ("/v1/responses/{id}", "GET, DELETE", lambda frontend: frontend.kept.answer),
    (MESSAGES, "POST", lambda frontend: frontend.message),
    (f"{MESSAGES}/count_tokens", "POST", lambda frontend: frontend.info.message_tokens),
    ("/v1/embeddings", "POST", lambda frontend: frontend.embed),
    ("/v1/score", "POST", lambda frontend: frontend.score),
    ("/score", "POST", lambda frontend: frontend.score),
    ("/v1/rerank", "POST", lambda frontend: frontend.rerank),
    ("/rerank", "POST", lambda frontend: frontend.rerank),
    ("/v1/models", "GET", lambda frontend: frontend.models),
    ("/v1/models/{name:path}", "GET", lambda frontend: frontend.model),
    ("/version", "GET", lambda frontend: frontend.info.version),
    ("/tokenize", "POST", lambda frontend: frontend.info.tokenize),
    ("/v1/tokenize", "POST", lambda frontend: frontend.info.tokenize),
    ("/detokenize", "POST", lambda frontend: frontend.info.detokenize),
    ("/v1/detokenize", "POST", lambda frontend: frontend.info.detokenize),
    ("/tokenizer_info", "GET", lambda frontend: frontend.info.tokenizer_info),
    ("/model_info", "GET", lambda frontend: frontend.info.model_info),
    ("/get_model_info", "GET", lambda frontend: frontend.info.model_info),
    ("/health", "GET", lambda frontend: frontend.health),
    ("/live", "GET", lambda frontend: frontend.live),
    ("/metrics", "GET", lambda frontend: frontend.prometheus),
    ("/openapi.json", "GET", lambda frontend: frontend.schema),
)
"""Each path, once; its methods, which the answer to another method names; and its handler."""


def make_app(frontend: Frontend, config: FrontendConfig) -> ASGIApp:
    """Build the application."""
    app = FastAPI(title="dynabench frontend", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for path, methods, handler in ROUTES:
        app.router.add_route(path, handler(frontend), methods=methods.split(", "), include_in_schema=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(CallError, _on_defect)
    app.add_exception_handler(Exception, _on_defect)
    guard = Guard(app, frontend, config)
    if not config.cors_allow_origins:
        return guard
    origins = [origin.strip() for origin in config.cors_allow_origins.split(",")]
    return CORSMiddleware(
        guard, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    path = request.url.path[:100]
    messages = {404: f"there is no {path}", 405: f"{path} does not accept {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    return _error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})), path)


async def _on_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is left to read it


async def _on_defect(request: Request, error: Exception) -> Response:
    return _error_response(DEFECT, request.url.path)


def _error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form of the API that a path belongs to."""
    return Response(body_at(path, error), error.status, headers=error.headers, media_type="application/json")


def _count_prompts(prepared: Prepared, metrics: ModelMetrics) -> None:
    metrics.count("input_tokens", by=sum(len(prompt.tokens) for prompt in prepared.prompts))
    for prompt in prepared.prompts:
        metrics.observe("input_sequence_tokens", len(prompt.tokens))


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
