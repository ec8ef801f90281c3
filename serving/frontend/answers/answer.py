"""How an API turns what was generated into bytes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from serving.frontend.api.errors import ApiError
from serving.frontend.api.logprobs import TokenLogprob


class Collected(NamedTuple):
    """All of one choice, for an answer that is not streamed."""

    pieces: list[bytes]
    """The text of each token, escaped for JSON."""
    logprobs: list[TokenLogprob]
    tokens: Sequence[int] = ()
    """Its token ids, also those without text."""


class ChoiceEvents(Protocol):
    """The events of one streamed choice."""

    def first(self) -> bytes:
        """Return what comes before the first token."""
        ...

    def tokens(self, pieces: list[bytes]) -> bytes:
        """Return the events of tokens, whose texts are escaped for JSON."""
        ...

    def last(self) -> bytes:
        """Return what comes after the last token: the choice is over."""
        ...


class Answer(Protocol):
    """One API's way to write an answer."""

    def events(self, index: int) -> ChoiceEvents:
        """Return what writes a choice of a stream."""
        ...

    def end(self) -> bytes:
        """Return what comes after all choices of a stream."""
        ...

    def whole(self, choices: list[Collected]) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """Return the last event of a stream that has failed."""
        ...
