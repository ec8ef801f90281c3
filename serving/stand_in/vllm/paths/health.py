"""What probes and balancers ask: whether the server lives, how much it does, what it is."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.answering import Answering
from serving.frontend.model_info import json_response
from serving.stand_in.config import KvEventsConfig, StandInConfig
from serving.stand_in.vllm.flags.arguments import version
from serving.stand_in.vllm.kv_events.endpoints import endpoint_of
from serving.stand_in.vllm.metrics.metrics import VllmMetrics
from serving.stand_in.vllm.paths.bodies import done


class Health:
    """The handlers."""

    def __init__(self, config: StandInConfig, answering: Answering, metrics: VllmMetrics) -> None:
        self._metrics = metrics
        self._answering = answering
        self._counts_load = config.api.enable_server_load_tracking
        self._sources = {
            str(rank): _source(config.kv_events, rank)
            for rank in range(config.ranks.first, config.ranks.first + config.engine.dp_size)
            if config.kv_events is not None
        }

    async def on_health(self, request: Request) -> Response:
        """GET /health, GET and POST /ping: an engine that has failed ends the process, so that nobody answers."""
        return done()

    async def on_load(self, request: Request) -> Response:
        """GET /load: requests in progress, if they are counted."""
        return json_response({"server_load": self._answering.num_answering if self._counts_load else 0})

    async def on_version(self, request: Request) -> Response:
        """GET /version."""
        return json_response({"version": version()})

    async def on_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def on_kv_event_sources(self, request: Request) -> Response:
        """GET /kv_event_sources: where each rank publishes KV events."""
        return json_response(self._sources)


def _source(config: KvEventsConfig, rank: int) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint_of(config.endpoint, rank),
        "replay_endpoint": None if config.replay_endpoint is None else endpoint_of(config.replay_endpoint, rank),
        "buffer_steps": config.buffer_steps,
        "hwm": config.hwm,
        "max_queue_size": config.max_queue_size,
        "topic": config.topic,
    }
