"""The OpenAPI schema of the frontend, derived from the request types."""

from typing import Any

import msgspec

from serving.frontend.api.kinds import KINDS
from serving.frontend.api.messages.request import CountRequest

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

ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


FACTS = {
    "/v1/models": "List the models",
    "/version": "Return the version",
    "/tokenizer_info": "Return a model's tokenizer settings",
    "/model_info": "Return facts about a model",
    "/health": "Report whether requests can be served",
    "/live": "Report whether the process lives",
}
"""Requests without a body."""

METRICS = {
    "summary": "Prometheus metrics",
    "responses": {"200": {"description": "metrics", "content": {"text/plain": {}}}},
}


def openapi() -> dict[str, Any]:
    """Return the schema."""
    types = [kind.type for kind in KINDS.values()]
    _, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE)
    paths: dict[str, Any] = {path: {"get": _operation(summary, get=True)} for path, summary in FACTS.items()}
    paths["/metrics"] = {"get": METRICS}
    for kind in KINDS.values():
        schema = {"$ref": REFERENCE.format(name=kind.type.__name__)}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        error = "AnthropicError" if issubclass(kind.type, CountRequest) else "Error"
        paths[kind.path] = {"post": _operation(kind.summary, error=error) | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynabench frontend", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR}},
    }


def _operation(summary: str, *, error: str = "Error", get: bool = False) -> dict[str, Any]:
    refusal = {"application/json": {"schema": {"$ref": REFERENCE.format(name=error)}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if not get:
        content["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    if get:
        responses["503"] = {
            "description": "not available now",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    else:
        for status in (400, 401, 404, 408, 413, 415, 429, 500, 502, 503):
            responses[str(status)] = {"description": "an error", "content": refusal}
    return {"summary": summary, "responses": responses}
