"""The application: each path and its handler, behind the guard."""

from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import PATH as MESSAGES
from serving.frontend.app import Frontend
from serving.frontend.config import FrontendConfig
from serving.frontend.guard import DEFECT, Guard, Handler, error_response
from serving.runtime.messages import CallError

EXPOSED_HEADERS = ["x-request-id", "x-worker-id", "x-worker-slot", "x-overlap-tokens", "retry-after"]

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
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=error.headers)
    path = request.url.path[:100]
    messages = {404: f"there is no {path}", 405: f"{path} does not accept {request.method}"}
    message = messages.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})), path)


async def _on_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is left to read it


async def _on_defect(request: Request, error: Exception) -> Response:
    return error_response(DEFECT, request.url.path)
