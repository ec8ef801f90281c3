"""The frontend's paths."""

from collections.abc import Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from serving.frontend.admission import KeyAndRoom
from serving.frontend.answering import Handler
from serving.frontend.api.messages.errors import PATH as MESSAGES
from serving.frontend.app import Frontend
from serving.frontend.application import Route, make_app
from serving.frontend.config import FrontendConfig

EXPOSED_HEADERS = ["x-request-id", "x-worker-id", "x-worker-slot", "x-overlap-tokens", "retry-after"]

OPEN_PATHS = ("/health", "/live")

ROUTES: tuple[tuple[str, str, Callable[[Frontend], Handler]], ...] = (
    ("/v1/completions", "POST", lambda frontend: frontend.answering.complete),
    ("/v1/chat/completions", "POST", lambda frontend: frontend.answering.chat),
    ("/v1/responses", "POST", lambda frontend: frontend.answering.respond),
    ("/v1/responses/{id}", "GET, DELETE", lambda frontend: frontend.answering.kept.answer),
    (MESSAGES, "POST", lambda frontend: frontend.answering.message),
    (f"{MESSAGES}/count_tokens", "POST", lambda frontend: frontend.info.message_tokens),
    ("/v1/embeddings", "POST", lambda frontend: frontend.answering.embed),
    ("/v1/score", "POST", lambda frontend: frontend.answering.score),
    ("/score", "POST", lambda frontend: frontend.answering.score),
    ("/v1/rerank", "POST", lambda frontend: frontend.answering.rerank),
    ("/rerank", "POST", lambda frontend: frontend.answering.rerank),
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


def frontend_app(frontend: Frontend, config: FrontendConfig) -> ASGIApp:
    """Build the frontend's application."""
    app = make_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        [Route(path, methods, handler(frontend)) for path, methods, handler in ROUTES],
        frontend.answering,
        KeyAndRoom(config),
        open_paths=OPEN_PATHS,
    )
    if not config.cors_allow_origins:
        return app
    origins = [origin.strip() for origin in config.cors_allow_origins.split(",")]
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED_HEADERS
    )
