"""How a server words what every server says: answers and errors."""

from collections.abc import Callable
from typing import NamedTuple

from serving.frontend.answers.accepted import AcceptedRequest
from serving.frontend.answers.answer import Answer
from serving.frontend.answers.selection import answer_of
from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import body_at
from serving.frontend.kept_responses import Turn


class Dialect(NamedTuple):
    """See the module."""

    answer: Callable[[AcceptedRequest, Turn | None], Answer]
    """Returns what writes an accepted request's answer."""
    error_body: Callable[[str, ApiError], bytes]
    """Returns the body of an error, in the form of the API that a path belongs to."""


OPENAI = Dialect(answer_of, body_at)
"""That of OpenAI, Anthropic and Dynamo."""
