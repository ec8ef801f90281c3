"""Requests from texts: count tokens, name blocks, and supply the answer's length if it is missing."""

from typing import Any

from workloads.request import Request
from workloads.row import Row
from workloads.source import Source

LENGTHS = ("output_length", "output_tokens", "output_len", "max_tokens", "max_completion_tokens", "max_output_tokens")


def request(
    source: Source,
    row: Row,
    content: Any,
    *,
    output: int | None = None,
    history: str = "",
    arrival_s: float = 0.0,
    session: str = "",
    after: tuple[int, ...] = (),
    delay_s: float = 0.0,
) -> Request:
    """Make a request from a text or from chat messages.

    Raises:
        WorkloadError: the prompt is empty.
    """
    tokens = source.encode(history + (content if isinstance(content, str) else flatten(content)))
    if not tokens:
        raise row.fail("the prompt is empty")
    length = output or row.count(*LENGTHS, default=source.default_osl)
    ids, priority = source.namer.named(tokens), row.priority()
    return Request(arrival_s, len(tokens), length, ids, session, after, delay_s, content, priority=priority)


def num_tokens(source: Source, text: str) -> int:
    """Count the tokens of a text, at least one."""
    return max(len(source.encode(text)), 1)


def prompt_request(source: Source, row: Row) -> Request:
    """Make a request from `{"prompt"}` or `{"text"}`."""
    return request(source, row, row.text("prompt" if "prompt" in row.values else "text"))


def body_request(source: Source, row: Row) -> Request:
    """Make a request from the body of an OpenAI API request.

    Raises:
        WorkloadError: it has neither messages nor a prompt.
    """
    if "messages" in row.values:
        return request(source, row, [item.values for item in row.items("messages")])
    if "prompt" in row.values:
        return request(source, row, row.text("prompt"))
    raise row.fail("messages or prompt is missing")


def flatten(messages: list[dict[str, Any]]) -> str:
    """Join chat messages into one text, as a plain chat template would."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"<{message.get('role', 'user')}>\n{content}\n")
    return "".join(parts)
