"""How bodies become requests, and what is checked once their model is known: as here, or as another server does it."""

from pkgutil import resolve_name
from typing import Any, Protocol

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import KINDS, AnyRequest, KindName, parse_request
from serving.frontend.api.openai import COMPLETION_TOKENS, CompletionRequest, OpenAiRequest
from serving.frontend.api.unsupported import check_fields
from serving.model.card import ModelCard
from serving.model.context import refusal

Body = bytes | bytearray


class ReadModel(Protocol):
    """What a reading needs to know of the model that a request is for."""

    card: ModelCard
    vocab_size: int | None
    """How many tokens the model has, if its files say so."""


class Reading(Protocol):
    """See the module."""

    def parse(self, body: Body, kind: KindName) -> AnyRequest:
        """Read a request.

        Raises:
            ApiError: it is none.
        """
        ...

    def check(self, request: AnyRequest, body: Body, model: ReadModel) -> None:
        """Refuse what its model's engine could not honour.

        Raises:
            ApiError: there is such a thing.
        """
        ...

    def limit(self, request: OpenAiRequest, num_prompt: int, model: ReadModel, param: str) -> int:
        """Return the number of tokens that may be generated after a prompt, which came in this field.

        Raises:
            ApiError: the prompt is empty, or does not fit into the model's context.
        """
        ...


class OwnReading:
    """OpenAI's API with extensions; fields without effect are refused."""

    def __init__(self, *, is_strict: bool = False) -> None:
        self._is_strict = is_strict

    def parse(self, body: Body, kind: KindName) -> AnyRequest:
        """See `Reading`."""
        request: AnyRequest = parse_request(body, KINDS[kind].type)
        return request

    def check(self, request: AnyRequest, body: Body, model: ReadModel) -> None:
        """See `Reading`."""
        check_fields(body, request, is_strict=self._is_strict)

    def limit(self, request: OpenAiRequest, num_prompt: int, model: ReadModel, param: str) -> int:
        """See `Reading`."""
        if not num_prompt:
            raise ApiError(400, "the prompt has no tokens", param=param)
        context, limit = model.card.context_length, request.max_tokens
        if (message := refusal(context, num_prompt, limit)) is not None:
            fits = num_prompt < context
            field = _name_of_limit(request) if fits else param
            raise ApiError(400, message, code="context_length_exceeded", param=field)
        room = context - num_prompt
        if limit is None and isinstance(request, CompletionRequest):
            return min(max(COMPLETION_TOKENS, request.min_tokens or 0), room)
        return min(limit or room, room)


OWN = OwnReading()


class ReadingElsewhere(msgspec.Struct, frozen=True):
    """A reading as it travels to the process that reads long requests."""

    name: str
    """Where its class is, as `module:name`."""
    settings: dict[str, Any]
    """Its arguments."""

    def make(self) -> Reading:
        """Return it."""
        made: Reading = resolve_name(self.name)(**self.settings)
        return made


def _name_of_limit(request: OpenAiRequest) -> str:
    """Return the field that set the limit, of two that can."""
    return "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
