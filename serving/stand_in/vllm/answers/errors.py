"""How vLLM words errors: the kinds of bodies and their types."""

import http
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from serving.frontend.api.errors import ApiError, NoRouteError
from serving.frontend.api.sse import DONE, event

INVALID = "invalid"
"""Code of an error in a field that pydantic found: vLLM calls its type by the phrase of the status."""

LATE = "late"
"""Code of an error that vLLM finds once the answer to a request for a stream has begun."""

BUSY = "busy"
"""Code of a request that is turned away because too much waits."""

UNREADABLE = "unreadable"
"""Code of a body that is no text."""

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}

MAX_ERRORS = 10
MAX_INPUT = 200
"""Characters of a faulty value that are repeated."""

WHOLE = {"prompt": "input_text", "messages": "input_text"}
"""What vLLM calls the field at fault if a text is too long to be encoded."""

MARKERS = frozenset({
    "function-wrap", "nullable", "union", "default", "str", "int", "float", "bool", "bytes", "list", "dict", "none",
    "NamedTool", "ResponseFormat", "StructuralTagFormat", "LegacyStructuralTagFormat",
})  # fmt: skip
"""Parts of pydantic's paths that are no fields."""


class RefusedError(ApiError):
    """An error whose type does not follow from its status."""

    def __init__(self, status: int, type: str, message: str, param: str | None = None) -> None:
        super().__init__(status, message, param=param)
        self.type = type


def refused(message: str, param: str | None = None, value: Any = None) -> ApiError:
    """Return the error for a request whose fields are read, but cannot be honoured."""
    details = [f"{name}={shown}" for name, shown in (("parameter", param), ("value", value)) if shown is not None]
    return ApiError(400, f"{message} ({', '.join(details)})" if param else message, param=param)


def late(error: ApiError) -> ApiError:
    """Return the same error for a request whose answer is to be streamed."""
    return ApiError(error.status, error.message, code=LATE, param=error.param)


def invalid(faults: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error for a body with these faults, as pydantic lists them."""
    param = ".".join(_fields(faults[0]["loc"]))
    label = "error" if len(faults) == 1 else "errors"
    lines = [f"{len(faults)} validation {label}:", *(f"  {_shown(fault)}" for fault in faults[:MAX_ERRORS])]
    if len(faults) > MAX_ERRORS:
        lines.append(f"  ...and {len(faults) - MAX_ERRORS} more {label}")
    return ApiError(400, "\n".join(lines), code=INVALID, param=param)


def error_object(error: ApiError) -> dict[str, Any]:
    """Return the body of an error of vLLM's own."""
    phrase = http.HTTPStatus(error.status).phrase
    type = phrase if error.code in (INVALID, BUSY) else TYPES.get(error.status, phrase)
    if isinstance(error, RefusedError):
        type = error.type
    param = error.param
    if error.code == "context_length_exceeded":
        param = WHOLE.get(param or "", param)
    elif param == "messages":
        param = None  # vLLM does not name what a template refuses
    return {"error": {"message": error.message, "type": type, "param": param, "code": error.status}}


def error_event(error: ApiError) -> bytes:
    """Return the last events of a stream that has failed."""
    return event(error_object(error)) + DONE


def error_response(path: str, error: ApiError) -> Response:
    """Return an error as vLLM's server answers it on a path."""
    if error.code == LATE:
        return Response(error_event(error), headers={"content-type": "text/event-stream; charset=utf-8"})
    body: Any = error_object(error)
    if error.code == UNREADABLE:
        body = {"detail": error.message}
    elif isinstance(error, NoRouteError):
        body = {"detail": http.HTTPStatus(error.status).phrase}
    elif error.status == 401:
        body = {"error": "Unauthorized"}
    elif path == "/v1/messages" and error.code != INVALID:
        body = {"type": "error", "error": {name: body["error"][name] for name in ("type", "message")}}
    headers = {name: value for name, value in error.headers.items() if name.lower() in ("allow", "connection")}
    return Response(msgspec.json.encode(body), error.status, headers=headers, media_type="application/json")


def _fields(location: tuple[int | str, ...]) -> list[str]:
    """Return the parts of a path that name fields and places in lists."""
    parts = map(str, location)
    return [
        part for part in parts if part.lower() not in MARKERS and part not in MARKERS and not set(part) & set("[](){}")
    ]


def _shown(fault: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in fault.items() if name != "url"}
    return shown | {"loc": ".".join(_fields(fault["loc"])), "input": _input(fault.get("input"))}


def _input(value: Any) -> str:
    if isinstance(value, list | dict | tuple):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = str(value)
    return text if len(text) <= MAX_INPUT else f"{text[:MAX_INPUT]}...[truncated]"
