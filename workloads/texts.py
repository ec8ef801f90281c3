"""Requests from texts: count tokens, name blocks, and supply the answer's length if it is missing."""

from typing import Any

import msgspec

from workloads.request import LIMIT, Request
from workloads.row import Row
from workloads.source import Source

OURS = ("messages", "prompt", "model", "stream", "stream_options", "ignore_eos", "priority")
"""Fields of a body that a request has elsewhere, or that its client decides."""
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
    extra_body: dict[str, Any] | None = None,
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
    return Request(
        arrival_s,
        len(tokens),
        length,
        ids,
        session,
        after,
        delay_s,
        content,
        priority=priority,
        extra_body=extra_body,
    )


def num_tokens(source: Source, text: str) -> int:
    """Count the tokens of a text, at least one."""
    return max(len(source.encode(text)), 1)


def prompt_request(source: Source, row: Row) -> Request:
    """Make a request from `{"prompt"}` or `{"text"}`."""
    return request(source, row, row.text("prompt" if "prompt" in row.values else "text"))


def body_request(source: Source, row: Row) -> Request:
    """Make a request from the body of an OpenAI API request, all of whose fields it keeps.

    Raises:
        WorkloadError: it has neither messages nor a prompt.
    """
    dropped = {*OURS, *LENGTHS} - {LIMIT}
    extra = {name: value for name, value in row.values.items() if name not in dropped}
    if "messages" in row.values:
        content = [item.values for item in row.items("messages")]
        return request(source, row, content, history=_tools(row), extra_body=extra or None)
    if "prompt" in row.values:
        return request(source, row, row.text("prompt"), extra_body=extra or None)
    raise row.fail("messages or prompt is missing")


def _tools(row: Row) -> str:
    """Return the tools that a model may call, as a plain chat template puts them before the messages."""
    if not row.has("tools") or row.values.get("tool_choice") == "none":
        return ""
    return "".join(f"<tool>\n{_json(tool.values)}\n" for tool in row.items("tools"))


def flatten(messages: list[dict[str, Any]]) -> str:
    """Join chat messages into one text, as a plain chat template would."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        parts.append(f"<{message.get('role', 'user')}>\n{content}\n")
        calls = message.get("tool_calls")
        parts += [f"<call>\n{_json(call)}\n" for call in calls] if isinstance(calls, list) else []
    return "".join(parts)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
