"""Requests for embeddings, and for what is computed from them: scores of pairs and rankings of documents, as in vLLM."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import Label, TokenId, TokenPrompt

MAX_INPUTS = 2048
"""Texts in one request, as at OpenAI."""

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    model: str | None = None
    """May be left out if only one model is served; so in all requests here."""
    input: str | Annotated[list[str | TokenId | TokenPrompt], Meta(min_length=1, max_length=1 << 20)]
    """A text, token ids, or a list of either."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    """Accepted if it is the number that the model has."""
    user: Label | None = None

    def inputs(self) -> list[str | list[int]]:
        """Return each text or list of token ids.

        Raises:
            ApiError: there are too many, or they are of different kinds.
        """
        if isinstance(self.input, str):
            return [self.input]
        kinds = set(map(type, self.input))
        if kinds == {int}:
            return [self.input]  # type: ignore[list-item]
        if len(kinds) > 1:
            raise ApiError(400, "input must be a text, token ids, or a list of either", param="input")
        if len(self.input) > MAX_INPUTS:
            raise ApiError(400, f"input has {len(self.input)} texts; at most {MAX_INPUTS} are allowed", param="input")
        return self.input  # type: ignore[return-value]


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score: how similar texts are, one against each of several, or pair by pair."""

    model: str | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    text_1: str | Texts | None = None
    """The former name of `queries`."""
    text_2: str | Texts | None = None
    """The former name of `documents`."""
    user: Label | None = None

    def pairs(self) -> tuple[list[str], list[str]]:
        """Return as many first texts as second texts.

        Raises:
            ApiError: they do not match.
        """
        for name, former in {"queries": "text_1", "documents": "text_2"}.items():
            if getattr(self, name) and getattr(self, former):
                raise ApiError(400, f"expected {name} or {former}, not both", param=former)
        first, second = _texts(self.queries or self.text_1), _texts(self.documents or self.text_2)
        if not first or not second:
            raise ApiError(400, "expected queries and documents", param="documents" if first else "queries")
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            problem = f"expected one query, or as many as documents ({len(second)}), not {len(first)}"
            raise ApiError(400, problem, param="queries")
        return first, second


class RerankRequest(msgspec.Struct, kw_only=True):
    """POST /v1/rerank: documents in the order of their similarity to a text."""

    model: str | None = None
    query: str
    documents: Texts
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """How many of the best are returned (default, and 0: all)."""
    return_documents: bool | None = None
    """Whether the answer has their texts (default: true)."""
    user: Label | None = None


def _texts(value: str | list[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else value or []
