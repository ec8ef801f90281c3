"""Errors as Anthropic's clients see them."""

from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS

PATH = KINDS["message"].path
"""At and below it, errors are those of Anthropic."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_fields(error: ApiError) -> dict[str, Any]:
    """Return the object that describes an error, in an answer or a stream."""
    type = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": type, "message": error.message}}


def body_at(path: str, error: ApiError) -> bytes:
    """Return the body of an answer that is an error, in the form of the API that a path belongs to."""
    is_anthropic = path == PATH or path.startswith(f"{PATH}/")
    return msgspec.json.encode(error_fields(error)) if is_anthropic else error.body()
