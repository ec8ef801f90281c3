"""What a stand-in for `vllm serve` answers, path by path."""

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.engines.mock import Mocker
from serving.frontend.answering import Answering
from serving.frontend.application import Route, make_app
from serving.frontend.config import FrontendConfig
from serving.frontend.model_info import ModelInfo, as_json
from serving.stand_in.config import StandInConfig
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.admission import Keys
from serving.stand_in.vllm.dialect import VERSION, dialect_of
from serving.stand_in.vllm.errors import as_json_only
from serving.stand_in.vllm.request_ids import RequestIds

OPEN_PATHS = ("/health", "/ping", "/metrics")


class VllmServer:
    """The application, its handlers, and the engine behind them."""

    def __init__(self, config: StandInConfig, engine: Mocker, models: OneModel) -> None:
        self.config = config
        self.engine = engine
        self.models = models
        self.answering = Answering(
            models, FrontendConfig(allow_kv_transfer_params=True), dialect_of(config, models.model)
        )
        self.info = ModelInfo(self.answering.reader)
        self._started = int(time.time())
        app = make_app(self._routes(), self.answering, Keys(config.http.api_keys), open_paths=OPEN_PATHS)
        self.app: ASGIApp = RequestIds(app) if config.http.enable_request_id_headers else app

    def _routes(self) -> list[Route]:
        answering, info = self.answering, self.info
        return [
            Route("/v1/completions", "POST", as_json_only(answering.complete)),
            Route("/v1/chat/completions", "POST", as_json_only(answering.chat)),
            Route("/v1/responses", "POST", as_json_only(answering.respond)),
            Route("/v1/messages", "POST", as_json_only(answering.message)),
            Route("/v1/models", "GET", self.list_models),
            Route("/health", "GET", self.health),
            Route("/version", "GET", self.version),
            Route("/tokenize", "POST", info.tokenize),
            Route("/detokenize", "POST", info.detokenize),
        ]

    async def health(self, request: Request) -> Response:
        """GET /health: an empty answer."""
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return as_json({"version": VERSION})

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
