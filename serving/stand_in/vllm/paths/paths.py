"""The paths of `vllm serve` 0.32 for a model that generates text; `tests/real_engines` compares them with the real ones."""

from collections.abc import Iterator

from serving.frontend.answering import Handler
from serving.frontend.application import HOT, Route
from serving.stand_in.vllm.paths.bodies import as_json_only, not_modelled
from serving.stand_in.vllm.paths.documents import REDIRECT, Documents
from serving.stand_in.vllm.paths.handlers import PathHandlers
from serving.stand_in.vllm.paths.unmodelled import NOT_MODELLED, PROFILING, SCALE_OUT, disabled, no_response

GET, POST, DELETE, SHOW = "GET", "POST", "DELETE", "GET, HEAD"

ANSWERS = (*HOT, "/invocations")
"""Paths whose POST requests are for the engine."""


def routes(rooms: PathHandlers) -> list[Route]:
    """Return every path that is there with these settings."""
    shown = [_route(*each) for each in _shown(rooms)]
    hidden = [_route(path, POST, disabled) for path in SCALE_OUT]
    return [
        *shown,
        *hidden,
        *([_route(*each) for each in _documents(shown, rooms)] if rooms.config.http.has_docs else ()),
    ]


def _route(path: str, methods: str, handler: Handler) -> Route:
    return Route(path, methods, as_json_only(handler) if path in HOT else handler)


def _shown(rooms: PathHandlers) -> Iterator[tuple[str, str, Handler]]:
    yield from _answers(rooms)
    yield from _facts(rooms)
    if rooms.adapters is not None and rooms.adapters.may_change:
        yield "/v1/load_lora_adapter", POST, rooms.adapters.on_load
        yield "/v1/unload_lora_adapter", POST, rooms.adapters.on_unload
        yield "/adapters", POST, rooms.adapters.on_register
        yield "/adapters/{adapter_name}", DELETE, rooms.adapters.on_unregister
    if rooms.config.is_dev_mode:
        yield from _development(rooms)
    has_profiler = bool(rooms.config.given.get("profiler_config"))
    for path, why in NOT_MODELLED.items():
        if has_profiler or path not in PROFILING:
            yield path, POST, not_modelled(why)


def _answers(rooms: PathHandlers) -> Iterator[tuple[str, str, Handler]]:
    answering = rooms.answering
    yield "/v1/completions", POST, answering.complete
    yield "/v1/chat/completions", POST, answering.chat
    yield "/v1/responses", POST, answering.respond
    yield "/v1/responses/{response_id}", GET, no_response
    yield "/v1/responses/{response_id}/cancel", POST, no_response
    yield "/v1/messages", POST, answering.message
    yield "/v1/messages/count_tokens", POST, rooms.tokens.on_count
    yield "/invocations", POST, rooms.invocations.on_invoke


def _facts(rooms: PathHandlers) -> Iterator[tuple[str, str, Handler]]:
    yield "/health", GET, rooms.health.on_health
    yield "/ping", GET, rooms.health.on_health
    yield "/ping", POST, rooms.health.on_health
    yield "/metrics", GET, rooms.health.on_metrics
    yield "/load", GET, rooms.health.on_load
    yield "/version", GET, rooms.health.on_version
    yield "/kv_event_sources", GET, rooms.health.on_kv_event_sources
    yield "/v1/models", GET, rooms.models.on_list
    yield "/tokenize", POST, rooms.tokens.on_tokenize
    yield "/detokenize", POST, rooms.tokens.on_detokenize
    if rooms.config.api.enable_tokenizer_info_endpoint:
        yield "/tokenizer_info", GET, rooms.tokens.on_tokenizer_info
    yield "/scale_elastic_ep", POST, rooms.scale.on_scale
    yield "/is_scaling_elastic_ep", POST, rooms.scale.on_is_scaling


def _development(rooms: PathHandlers) -> Iterator[tuple[str, str, Handler]]:
    """Yield the paths that are there only with VLLM_SERVER_DEV_MODE."""
    caches, dev, sleep, weights = rooms.caches, rooms.dev, rooms.sleep, rooms.weights
    yield "/reset_prefix_cache", POST, caches.reset_prefix
    yield "/reset_mm_cache", POST, caches.reset_other
    yield "/reset_encoder_cache", POST, caches.reset_other
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
    yield "/abort_requests", POST, rooms.progress.on_abort
    yield "/weight_info", GET, weights.on_info
    yield "/update_weight_version", POST, weights.on_new_version
    yield "/weight_checker", POST, weights.on_check
    for name in ("init", "shutdown"):
        yield f"/{name}_weight_transfer_engine", POST, weights.on_transfer
    for name in ("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"):
        yield f"/{name}", POST, weights.on_transfer


def _documents(shown: list[Route], rooms: PathHandlers) -> Iterator[tuple[str, str, Handler]]:
    documents = Documents(shown, rooms.config.http.root_path)
    yield "/openapi.json", SHOW, documents.on_schema
    yield "/docs", SHOW, documents.on_docs
    yield REDIRECT, SHOW, documents.on_redirect
    yield "/redoc", SHOW, documents.on_redoc
