"""The paths of `vllm serve` 0.32 for a model that generates text; `tests/real_engines` compares them with the real ones."""

from collections.abc import Iterator

from serving.engines.mock.engine import Mocker
from serving.frontend.answering import Answering, Handler
from serving.frontend.application import HOT, Route
from serving.stand_in.config import StandInConfig
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.metrics.metrics import VllmMetrics
from serving.stand_in.vllm.paths.bodies import as_json_only, not_modelled
from serving.stand_in.vllm.paths.control import Control
from serving.stand_in.vllm.paths.dev import Development
from serving.stand_in.vllm.paths.documents import REDIRECT, Documents
from serving.stand_in.vllm.paths.fixed import Scale, Weights
from serving.stand_in.vllm.paths.health import Health
from serving.stand_in.vllm.paths.invocations import Invocations
from serving.stand_in.vllm.paths.lora import Adapters
from serving.stand_in.vllm.paths.models import ModelPaths
from serving.stand_in.vllm.paths.sleep import Sleep
from serving.stand_in.vllm.paths.tokens import Tokens
from serving.stand_in.vllm.paths.unmodelled import NOT_MODELLED, PROFILING, SCALE_OUT, disabled, no_response

GET, POST, DELETE, SHOW = "GET", "POST", "DELETE", "GET, HEAD"

ANSWERS = (*HOT, "/invocations")
"""Paths whose POST requests are for the engine."""

Entry = tuple[str, str, Handler]


def routes(
    config: StandInConfig, engine: Mocker, models: OneModel, answering: Answering, metrics: VllmMetrics
) -> list[Route]:
    """Return every path that is there with these settings.

    Raises:
        ValueError: an adapter that is served from the start cannot be loaded.
    """
    entries = [*_answers(answering, models), *_facts(config, models, answering, metrics), *_adapters(config, models)]
    if config.is_dev_mode:
        entries += _development(config, engine, metrics)
    has_profiler = bool(config.given.get("profiler_config"))
    entries += [
        (path, POST, not_modelled(why)) for path, why in NOT_MODELLED.items() if has_profiler or path not in PROFILING
    ]
    shown = [_route(*each) for each in entries]
    hidden = [_route(path, POST, disabled) for path in SCALE_OUT]
    documents = _documents(shown, config.http.root_path) if config.http.has_docs else ()
    return [*shown, *hidden, *(_route(*each) for each in documents)]


def _route(path: str, methods: str, handler: Handler) -> Route:
    return Route(path, methods, as_json_only(handler) if path in HOT else handler)


def _answers(answering: Answering, models: OneModel) -> Iterator[Entry]:
    yield "/v1/completions", POST, answering.complete
    yield "/v1/chat/completions", POST, answering.chat
    yield "/v1/responses", POST, answering.respond
    yield "/v1/responses/{response_id}", GET, no_response
    yield "/v1/responses/{response_id}/cancel", POST, no_response
    yield "/v1/messages", POST, answering.message
    yield "/v1/messages/count_tokens", POST, Tokens(answering.reader, models).on_count
    yield "/invocations", POST, Invocations(answering, models.names[0]).on_invoke


def _facts(config: StandInConfig, models: OneModel, answering: Answering, metrics: VllmMetrics) -> Iterator[Entry]:
    health, tokens = Health(config, answering, metrics), Tokens(answering.reader, models)
    scale = Scale(config.ranks.size)
    yield "/health", GET, health.on_health
    yield "/ping", GET, health.on_health
    yield "/ping", POST, health.on_health
    yield "/metrics", GET, health.on_metrics
    yield "/load", GET, health.on_load
    yield "/version", GET, health.on_version
    yield "/kv_event_sources", GET, health.on_kv_event_sources
    yield "/v1/models", GET, ModelPaths(models, config.model).on_list
    yield "/tokenize", POST, tokens.on_tokenize
    yield "/detokenize", POST, tokens.on_detokenize
    if config.api.enable_tokenizer_info_endpoint:
        yield "/tokenizer_info", GET, tokens.on_tokenizer_info
    yield "/scale_elastic_ep", POST, scale.on_scale
    yield "/is_scaling_elastic_ep", POST, scale.on_is_scaling


def _adapters(config: StandInConfig, models: OneModel) -> Iterator[Entry]:
    if config.lora is None:
        return
    adapters = Adapters(config.lora, models)
    if config.lora.may_change:
        yield "/v1/load_lora_adapter", POST, adapters.on_load
        yield "/v1/unload_lora_adapter", POST, adapters.on_unload
        yield "/adapters", POST, adapters.on_register
        yield "/adapters/{adapter_name}", DELETE, adapters.on_unregister


def _development(config: StandInConfig, engine: Mocker, metrics: VllmMetrics) -> Iterator[Entry]:
    """Yield the paths that are there only with VLLM_SERVER_DEV_MODE."""
    control, dev = Control(engine), Development(config, engine)
    sleep, weights = Sleep(engine, metrics), Weights()
    yield "/reset_prefix_cache", POST, control.reset_prefix
    yield "/reset_mm_cache", POST, control.reset_other
    yield "/reset_encoder_cache", POST, control.reset_other
    yield "/collective_rpc", POST, dev.on_collective_rpc
    yield "/server_info", GET, dev.on_server_info
    yield "/get_world_size", GET, dev.on_world_size
    yield "/sleep", POST, sleep.on_sleep
    yield "/wake_up", POST, sleep.on_wake_up
    yield "/is_sleeping", GET, sleep.on_is_sleeping
    yield "/release_kv_cache_memory", POST, sleep.on_release_kv
    yield "/pause", POST, sleep.on_pause
    yield "/resume", POST, sleep.on_resume
    yield "/is_paused", GET, sleep.on_is_paused
    yield "/abort_requests", POST, control.on_abort
    yield "/weight_info", GET, weights.on_info
    yield "/update_weight_version", POST, weights.on_new_version
    yield "/weight_checker", POST, weights.on_check
    for name in ("init", "shutdown"):
        yield f"/{name}_weight_transfer_engine", POST, weights.on_transfer
    for name in ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"):
        yield f"/{name}", POST, weights.on_transfer


def _documents(shown: list[Route], root_path: str) -> Iterator[Entry]:
    documents = Documents(shown, root_path)
    yield "/openapi.json", SHOW, documents.on_schema
    yield "/docs", SHOW, documents.on_docs
    yield REDIRECT, SHOW, documents.on_redirect
    yield "/redoc", SHOW, documents.on_redoc
