"""What vLLM's answers say about themselves: tokens, times, and which server it was."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from serving.frontend.generation.choice import Choice
from serving.stand_in.config import ApiConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """What a server's answers have."""

    fingerprint: str | None
    """Their system_fingerprint."""
    api: ApiConfig
    """What the server's settings say about them."""
    text_of: Callable[[int], str]
    """Returns a token's text."""
    on_search: "OnSearch"
    """Called when an answer, or a piece of a stream, was searched for tool calls."""


class OnSearch(Protocol):
    """Counts searches for tool calls."""

    def __call__(self, request_type: str, *, is_streamed: bool, has_called: bool) -> object:
        """Count one, in an answer to a request of this type."""
        ...


def usage(num_prompt: int, num_output: int, *, num_reasoning: int | None) -> dict[str, Any]:
    """Return the usage."""
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": None,
        "completion_tokens_details": None if num_reasoning is None else {"reasoning_tokens": num_reasoning},
    }


def metrics(choice: Choice) -> dict[str, Any]:
    """Return the times of a request, in milliseconds, as far as they are known."""
    attempts, stamps, count = choice.attempts, choice.attempts.stamps(), choice.num_completion
    admitted, first, last = stamps.get("admitted"), attempts.first_token_s, attempts.last_token_s
    decode_s = last - first
    inference_s = None if admitted is None else last - admitted
    return {
        "time_to_first_token_ms": None if admitted is None else (first - admitted) * 1000,
        "generation_time_ms": decode_s * 1000,
        "queue_time_ms": None
        if admitted is None or attempts.decode is None
        else (admitted - attempts.decode.sent_s) * 1000,
        "mean_itl_ms": decode_s / (count - 1) * 1000 if count > 1 else None,
        "tokens_per_second": count / inference_s if inference_s else None,
        "speculative_decoding": None,
    }


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, at any depth."""
    return {
        name: without_none(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None
    }
