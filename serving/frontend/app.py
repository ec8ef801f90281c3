"""The handlers of the frontend."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.answering import Answering
from serving.frontend.api.openapi import openapi
from serving.frontend.config import FrontendConfig
from serving.frontend.model_info import ModelInfo, json_response
from serving.frontend.models import Models
from serving.frontend.pool_metrics import pool_gauges
from serving.frontend.served_model import ServedModel
from serving.frontend.server_metrics import server_counts, server_metrics
from serving.runtime.outages import Outages

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
        self.answering = Answering(models, config)
        self.metrics = self.answering.metrics
        self.info = ModelInfo(self.answering.reader)
        self._models = models
        self._schema = msgspec.json.encode(openapi())
        self._siblings = siblings
        self._outages = outages
        models.on_leave = self._forget

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        models = [each for model in self._models.answering() for each in (model, *self._models.adapters_of(model))]
        return json_response({"object": "list", "data": [_describe(model) for model in models]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        return json_response(_describe(self.answering.reader.find(request.path_params["name"])))

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
        if self.answering.is_draining:
            return json_response({"status": "not_ready", "stage": "draining", **facts}, 503)
        if not any(model.workers.num_ranks for model in models):
            message = "; ".join(["No endpoints available", *self._models.absences(), *map(str, away)])
            return json_response({"status": "unhealthy", "message": message, **facts}, 503)
        if away:
            code = 503 if any(outages.carries_requests for outages in away) else 200
            return json_response({"status": "degraded", "message": "; ".join(map(str, away)), **facts}, code)
        return json_response({"status": "healthy", **facts})

    async def schema(self, request: Request) -> Response:
        """GET /openapi.json."""
        return Response(self._schema, media_type="application/json")

    async def live(self, request: Request) -> Response:
        """GET /live: whether the process is alive."""
        return json_response({"status": "live", "message": "Service is live"})

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

    def _forget(self, instance_id: int) -> None:
        """Forget the counts of an instance that is gone, and of those before it whose last answers ended after that."""
        self.metrics.keep_workers(self._models.instances() - {f"{instance_id:x}"})


def _describe(model: ServedModel) -> dict[str, Any]:
    """Describe a model as OpenAI does; one with an adapter is named by it, and has the model as its parent, as in vLLM."""
    card, adapter = model.card, model.adapter
    parent = {} if adapter is None else {"parent": card.name}
    return parent | {
        "id": card.name if adapter is None else adapter.name,
        "object": "model",
        "created": card.created,
        "owned_by": "dynabench",
        "max_model_len": card.context_length,
    }
