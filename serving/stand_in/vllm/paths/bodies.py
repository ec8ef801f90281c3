"""What requests ask besides answers: their query and their small bodies, checked as strictly as vLLM checks them."""

import json
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.answering import Handler
from serving.frontend.api.errors import ApiError
from serving.frontend.http.body import read_small_body
from serving.stand_in.vllm.answers.errors import INVALID, UNREADABLE, RefusedError

MAX_BYTES = 1 << 20
"""Largest body of a request that asks for no answer."""

NOT_JSON = "JSON decode error: {}"

TRUE = frozenset(("1", "true", "t", "yes", "y", "on"))
FALSE = frozenset(("0", "false", "f", "no", "n", "off"))


def done() -> Response:
    """Return an answer without content."""
    return Response()


def as_json_only(handler: Handler) -> Handler:
    """Return a handler that refuses bodies that do not say that they are JSON."""

    async def handle(request: Request) -> Response:
        check_is_json(request)
        return await handler(request)

    return handle


def not_modelled(why: str) -> Handler:
    """Return the handler of a path that vLLM has, and that only says why a stand-in does not answer there."""

    async def refuse(request: Request) -> Response:
        raise RefusedError(501, "NotImplementedError", f"{request.url.path} is not modelled by this stand-in: {why}")

    return refuse


def invalid(where: Literal["query", "body"], name: str, problem: str) -> ApiError:
    """Return the refusal of a request with an invalid field."""
    place = f"{where}.{name}" if name else where
    return ApiError(400, f"1 validation error:\n  {place}: {problem}", code=INVALID, param=place)


def flag(request: Request, name: str, default: bool) -> bool:
    """Return a boolean of the query.

    Raises:
        ApiError: it is none.
    """
    said = request.query_params.get(name)
    if said is None:
        return default
    if said.lower() not in TRUE | FALSE:
        raise invalid("query", name, f"expected true or false, not {said[:100]!r}")
    return said.lower() in TRUE


def choice(request: Request, name: str, choices: tuple[str, ...], default: str) -> str:
    """Return one of several words from the query.

    Raises:
        ApiError: it is none of them.
    """
    said = request.query_params.get(name, default)
    if said not in choices:
        raise invalid("query", name, f"expected {' or '.join(map(repr, choices))}, not {said[:100]!r}")
    return said


def whole_number(request: Request, name: str, least: int, most: int, default: int) -> int:
    """Return a whole number of the query.

    Raises:
        ApiError: it is none, or not within the bounds.
    """
    said = request.query_params.get(name, str(default))
    try:
        found = int(said)
    except ValueError:
        raise invalid("query", name, f"expected a whole number, not {said[:100]!r}") from None
    if not least <= found <= most:
        raise invalid("query", name, f"expected a number from {least} to {most}, not {found}")
    return found


def check_is_json(request: Request) -> None:
    """Check that a body says that it is JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].lower()
    if media_type != "application/json":
        problem = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(400, problem, code=INVALID)


async def body_of(request: Request, wording: str = NOT_JSON) -> Any:
    """Return the body of a request.

    Args:
        request: the request.
        wording: how a body that is not JSON is refused; {} stands for the reason.

    Raises:
        ApiError: it is not JSON, too large, or too slow.
    """
    return _decoded(await read_small_body(request, MAX_BYTES), wording)


def _decoded(body: bytearray, wording: str) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RefusedError(400, "Bad Request", wording.format(error)) from error
    except UnicodeDecodeError as error:
        raise RefusedError(400, "Bad Request", "JSON decode error: the body is not UTF-8") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or too deep
        raise ApiError(400, "There was an error parsing the body", code=UNREADABLE) from error


async def object_of(request: Request, wording: str = NOT_JSON) -> dict[str, Any]:
    """Return the body of a request, which must be an object.

    Raises:
        ApiError: it is none.
    """
    return _object(await body_of(request, wording))


def object_in(body: bytearray) -> dict[str, Any]:
    """Return the object that a body is.

    Raises:
        ApiError: it is none.
    """
    return _object(_decoded(body, NOT_JSON))


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise RefusedError(400, "Bad Request", "Request body must be a JSON object")
    return found


async def fields_of(request: Request, **types: type) -> dict[str, Any]:
    """Return fields that a body must have.

    Raises:
        ApiError: one is missing or of another type.
    """
    check_is_json(request)
    found = await body_of(request)
    if not isinstance(found, dict):
        raise invalid("body", "", f"expected an object, not {type(found).__name__}")
    for name, wanted in types.items():
        if name not in found:
            raise invalid("body", name, "Field required")
        if not isinstance(found[name], wanted):
            raise invalid("body", name, f"expected {wanted.__name__}, not {type(found[name]).__name__}")
    return found
