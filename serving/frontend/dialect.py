"""How a server words what every server says: requests, answers and errors."""

import re
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import Answer
from serving.frontend.answers.selection import answer_of
from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import body_at
from serving.frontend.kept_responses import ResponseTurn
from serving.frontend.prepared import Prepared
from serving.frontend.reading import OWN, Reading
from serving.runtime.world import world

REQUEST_ID = re.compile(r"[\w.:-]{1,128}\Z")


class Dialect(NamedTuple):
    """See the module."""

    answer: Callable[[AcceptedRequest, ResponseTurn | None], Answer]
    """Returns what writes an accepted request's answer."""
    error_response: Callable[[str, ApiError], Response]
    """Returns an error in the form of the API that a path belongs to."""
    reading: Reading
    """Reads bodies."""
    received: Callable[[Request, Prepared | None], str]
    """Adds what headers ask for to a request, if it is one for an answer; returns its id."""
    headers: Callable[[AcceptedRequest], dict[str, str]]
    """Returns the headers of an answer."""
    begins_at_once: bool = False
    """Whether a stream begins before there is a token, so that failures are part of it."""


def error_response(path: str, error: ApiError) -> Response:
    """Return an error as OpenAI's API has it, or Anthropic's."""
    return Response(body_at(path, error), error.status, headers=error.headers, media_type="application/json")


def received(request: Request, prepared: Prepared | None) -> str:
    """Return the id that a client gave, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.match(given) else world().token_hex(16)


OPENAI = Dialect(answer_of, error_response, OWN, received, AcceptedRequest.headers)
"""That of OpenAI, Anthropic and Dynamo."""
