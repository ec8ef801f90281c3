"""The server of a stand-in for `vllm serve`."""

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from serving.engines.mock.engine import Mocker
from serving.frontend.answering import Answering
from serving.frontend.application import make_app
from serving.frontend.config import FrontendConfig
from serving.stand_in.config import StandInConfig
from serving.stand_in.local import LocalCalls
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.dialect import dialect_of
from serving.stand_in.vllm.metrics.http import Counted
from serving.stand_in.vllm.metrics.metrics import VllmMetrics
from serving.stand_in.vllm.paths.front import Everybody, Front
from serving.stand_in.vllm.paths.paths import routes
from serving.stand_in.vllm.queue_limits import QueueLimits

OPEN_PATHS = ("/health", "/ping", "/metrics")


class VllmServer:
    """The application, its handlers, and the engine behind them."""

    def __init__(self, config: StandInConfig, engine: Mocker, models: OneModel, calls: LocalCalls) -> None:
        """Build the application, and have the ranks of an engine observed, which do not run yet.

        Raises:
            ValueError: an adapter that is served from the start cannot be loaded.
        """
        self.config = config
        self.engine = engine
        self.models = models
        self.metrics = metrics = VllmMetrics(config, models.model.card.context_length)
        metrics.observe(engine)
        limits = QueueLimits(config.api, engine, calls, metrics)
        dialect = dialect_of(config, models.model, limits.check, metrics.count_tool_call)
        self.answering = Answering(models, FrontendConfig(allow_kv_transfer_params=True), dialect)
        self.app = self._app()

    def follow(self) -> None:
        """See `FamilyServer`."""
        self.metrics.follow()

    def close(self) -> None:
        """See `FamilyServer`."""
        self.metrics.close()

    def _app(self) -> ASGIApp:
        """Return the application: keys come before CORS, as in vLLM, so that a page never reads that its key is wrong."""
        http = self.config.http
        found = routes(self.config, self.engine, self.models, self.answering, self.metrics)
        app = make_app(Starlette(), found, self.answering, Everybody(), open_paths=OPEN_PATHS, is_bare=True)
        app = CORSMiddleware(
            Counted(app, self.metrics.http, found),
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
        )
        return Front(
            app,
            keys=http.api_keys,
            root_path=http.root_path,
            has_request_ids=http.enable_request_id_headers,
            paths=[route.path for route in found],
        )
