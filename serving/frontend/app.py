"""The handlers of the frontend."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from serving.frontend import nvext
from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.selection import answer_of
from serving.frontend.answers.sending import CompletionResponse
from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, KindName
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
from serving.runtime.outages import Outages

REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")

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
        if not any(model.workers.num_ranks for model in models):
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
