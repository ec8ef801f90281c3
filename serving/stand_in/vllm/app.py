"""What a stand-in for `vllm serve` answers, path by path."""

import time

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.engines.mock import Mocker
from serving.frontend.answering import Answering
from serving.frontend.application import Route, make_app
from serving.frontend.config import FrontendConfig
from serving.frontend.model_info import ModelInfo, as_json
from serving.stand_in.config import StandInConfig
from serving.stand_in.local import LocalCalls
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.admission import Keys
from serving.stand_in.vllm.dialect import VLLM
from serving.stand_in.vllm.metrics.http import Counted
from serving.stand_in.vllm.metrics.metrics import VllmMetrics

VERSION = "0.32.0"
"""The version of vLLM that this follows."""

OPEN_PATHS = ("/health", "/ping", "/metrics")


class VllmServer:
    """The application, its handlers, and the engine behind them."""

    def __init__(
        self, config: StandInConfig, engine: Mocker, models: OneModel, metrics: VllmMetrics, calls: LocalCalls
    ) -> None:
        self.config = config
        self.engine = engine
        self.calls = calls
        self.models = models
        self.metrics = metrics
        self.answering = Answering(models, FrontendConfig(allow_kv_transfer_params=True), VLLM)
        self.info = ModelInfo(self.answering.reader)
        self._started = int(time.time())
        routes = self._routes()
        app = make_app(routes, self.answering, Keys(config.http.api_keys), open_paths=OPEN_PATHS)
        self.app: ASGIApp = Counted(app, metrics.http, routes)

    def _routes(self) -> list[Route]:
        answering, info = self.answering, self.info
        return [
            Route("/v1/completions", "POST", answering.complete),
            Route("/v1/chat/completions", "POST", answering.chat),
            Route("/v1/responses", "POST", answering.respond),
            Route("/v1/messages", "POST", answering.message),
            Route("/v1/models", "GET", self.list_models),
            Route("/health", "GET", self.health),
            Route("/version", "GET", self.version),
            Route("/metrics", "GET", self.show_metrics),
            Route("/tokenize", "POST", info.tokenize),
            Route("/detokenize", "POST", info.detokenize),
        ]

    async def health(self, request: Request) -> Response:
        """GET /health: an empty answer."""
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return as_json({"version": VERSION})

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models: the model under each of its names."""
        card = self.models.model.card
        return as_json(
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": self._started,
                        "owned_by": "vllm",
                        "root": self.config.model,
                        "parent": None,
                        "max_model_len": card.context_length,
                    }
                    for name in self.models.names
                ],
            }
        )
