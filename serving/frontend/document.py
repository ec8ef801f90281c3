"""The OpenAPI document, derived from the request types."""

from typing import Any

import msgspec

from serving.frontend.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REFERENCE = "#/components/schemas/{name}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi() -> dict[str, Any]:
    """Return the document."""
    kinds = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    asks = {
        "/tokenize": ("TokenizeRequest", "Return the tokens of a text or a conversation"),
        "/detokenize": ("DetokenizeRequest", "Return the text of tokens"),
        "/v1/completions": ("CompletionRequest", "Complete a prompt"),
        "/v1/chat/completions": ("ChatRequest", "Answer a conversation"),
    }
    tells = {
        "/v1/models": "List the models",
        "/version": "Return the version",
        "/tokenizer_info": "Return a model's tokenizer settings",
        "/model_info": "Return facts of a model",
        "/health": "Tell whether requests can be served",
        "/live": "Tell whether the process lives",
    }
    paths: dict[str, Any] = {path: {"get": _operation(text, get=True)} for path, text in tells.items()}
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus metrics",
            "responses": {"200": {"description": "metrics", "content": {"text/plain": {}}}},
        }
    }
    for path, (name, text) in asks.items():
        body = {"required": True, "content": {"application/json": {"schema": {"$ref": REFERENCE.format(name=name)}}}}
        paths[path] = {"post": _operation(text) | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynabench frontend", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}},
    }


def _operation(summary: str, *, get: bool = False) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if not get:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if get:
        responses["503"] = {"description": "not now", "content": {"application/json": {"schema": {"type": "object"}}}}
    else:
        for status in (400, 401, 404, 408, 413, 415, 429, 500, 502, 503):
            responses[str(status)] = {"description": "an error", "content": error}
    return {"summary": summary, "responses": responses}
