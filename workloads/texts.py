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


def turn_request(source: Source, row: Row, *, history: str = "", session: str, before: int | None) -> Request:
    """Make a request from a turn of aiperf, which waits for the request `before`, if any."""
    arrival_s, after, delay_s = row.timing(before)
    return request(
        source,
        row,
        turn_text(row),
        history=history,
        arrival_s=arrival_s,
        session=session,
        after=after,
        delay_s=delay_s,
    )


def turn_text(row: Row) -> str:
    """Return the text of a turn of aiperf."""
    texts = row.values.get("texts")
    if not isinstance(texts, list):
        return row.text("text")
    parts: list[Any] = []
    for text in texts:
        contents = text.get("contents", []) if isinstance(text, dict) else [text]
        parts += contents if isinstance(contents, list) else [contents]
    if not all(isinstance(part, str) for part in parts):
        raise row.fail("texts must be a list of texts, or of objects with contents")
    return "".join(parts)


def flatten(messages: list[dict[str, Any]]) -> str:
    """Join chat messages into one text, as a plain chat template would."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"<{message.get('role', 'user')}>\n{content}\n")
    return "".join(parts)
