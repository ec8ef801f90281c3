"""Log-probabilities: convert what engines return to OpenAI's two forms."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol


class TokenLogprob(NamedTuple):
    """A token's text, its log-probability (None for the first token of a prompt) and its most likely alternatives."""

    text: str
    value: float | None
    top: list[dict[str, Any]] | None


class TokenNames(Protocol):
    """Names tokens, as a tokenizer does by their texts."""

    def text_of(self, token: int) -> str:
        """Return a token's name."""
        ...


class AsIds:
    """Names tokens by their ids, as vLLM does on request: not each has a text of its own."""

    def text_of(self, token: int) -> str:
        """See `TokenNames`."""
        return f"token_id:{token}"


def name_tokens(top: list[Any] | None, tokenizer: TokenNames) -> list[dict[str, Any]] | None:
    """Return the most likely tokens in OpenAI's form; engines may return them as (token id, log-probability)."""
    if top is None:
        return None
    return [entry if isinstance(entry, dict) else _named(entry, tokenizer) for entry in top]


def _named(entry: Sequence[Any], tokenizer: TokenNames) -> dict[str, Any]:
    text = tokenizer.text_of(entry[0])
    return {"token": text, "logprob": entry[1], "bytes": list(text.encode())}


class LogprobsFormat:
    """One choice's log-probabilities in OpenAI's form: by token for a chat, by column for a completion."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._offset = 0

    def value(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the object for the next tokens of the text."""
        return {"content": list(map(_chat_entry, tokens))} if self._is_chat else self._columns(tokens)

    def _columns(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.value for token in tokens],
            "top_logprobs": [
                {other["token"]: other["logprob"] for other in token.top} if token.top else None for token in tokens
            ],
            "text_offset": offsets,
        }


def _chat_entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.value,
        "bytes": list(token.text.encode()),
        "top_logprobs": token.top or [],
    }
