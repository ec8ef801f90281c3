"""How the APIs stream an answer: each event's data, as what chat completions would say.

API                    text, reasoning, calls                     end              usage           last event
completions, chat      choices                                    finish_reason    usage           [DONE]
responses              response.*.delta, an item's name           response.*       in that event   the same
messages               content_block_delta, a block's name        message_delta    in two events   message_stop
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from dynabench.apis import Api
from dynabench.live.event_types import (
    CompletionDetails,
    Delta,
    Event,
    EventChoice,
    EventFunction,
    EventUsage,
    PromptDetails,
    Stated,
    ToolCall,
    is_count,
)

Read = Callable[[bytes], Event | None]
"""Reads an event's data; None: it was the last event.

Raises:
    msgspec.DecodeError: it is not what the API's events are.
"""


class Grammar(NamedTuple):
    """The events of an API."""

    read: Read
    last: str
    """What ends a stream, beyond the event with the reason for the end; empty if nothing does."""


def _read_chat(data: bytes) -> Event | None:
    return None if data.strip() == b"[DONE]" else _chat.decode(data)


class ResponseUsage(msgspec.Struct):
    """The tokens of a response."""

    input_tokens: Stated = None
    output_tokens: Stated = None
    input_tokens_details: PromptDetails | None = None
    output_tokens_details: CompletionDetails | None = None

    @property
    def as_chat(self) -> EventUsage:
        """The same in a chat's words."""
        details = self.input_tokens_details, self.output_tokens_details
        return EventUsage(self.input_tokens, self.output_tokens, *details)


class IncompleteDetails(msgspec.Struct):
    """Why a response is not complete."""

    reason: str | None = None


class Response(msgspec.Struct):
    """A response so far."""

    usage: ResponseUsage | None = None
    error: Any = None
    incomplete_details: IncompleteDetails | None = None


class Item(msgspec.Struct):
    """A part of an output: a message, a call, or reasoning."""

    type: str | None = None
    name: Any = None
    call_id: Any = None


class ResponseEvent(msgspec.Struct):
    """An event of a response."""

    type: str
    output_index: Any = None
    delta: Any = None
    item: Item | None = None
    response: Response | None = None
    message: Any = None
    code: Any = None


def _read_response(data: bytes) -> Event | None:
    if data.strip() == b"[DONE]":
        return None
    event = _response.decode(data)
    kind = event.type
    if kind.endswith(".delta"):
        if not isinstance(event.delta, str) or not event.delta:
            return NOTHING
        if kind in ("response.output_text.delta", "response.refusal.delta"):
            return _added(event.delta)
        if kind == "response.function_call_arguments.delta":
            return _called(event.output_index, arguments=event.delta)
        return _thought(event.delta) if "reasoning" in kind else _called_other(event.delta)
    match kind:
        case "response.output_item.added":  # a call's name is generated, too
            item = event.item or Item()
            if not isinstance(item.name, str) or not item.name:
                return NOTHING
            is_function = item.type == "function_call"
            return _called(event.output_index, item.call_id, item.name) if is_function else _called_other(item.name)
        case "response.completed" | "response.incomplete":
            said = event.response or Response()
            usage = said.usage.as_chat if said.usage is not None else None
            end = response_end(kind.removeprefix("response."), said.incomplete_details)
            return Event([EventChoice(finish_reason=end)], usage)
        case "response.failed" | "response.cancelled":
            return Event([], error=(event.response and event.response.error) or kind)
        case "error":
            return Event([], error=event.message or event.code or kind)
    return NOTHING


def response_end(status: str, details: IncompleteDetails | None) -> str:
    """Return why a response with this status ended, in a chat's words."""
    if status == "completed":
        return "stop"
    reason = details.reason if details is not None else None
    return "length" if reason == "max_output_tokens" else reason or "incomplete"


class MessageUsage(msgspec.Struct):
    """The tokens of a message; those of the prompt are in three parts."""

    input_tokens: Stated = None
    cache_creation_input_tokens: Stated = None
    cache_read_input_tokens: Stated = None
    output_tokens: Stated = None
    output_tokens_details: dict[str, Any] | None = None

    @property
    def as_chat(self) -> EventUsage:
        """The same in a chat's words."""
        parts = (self.input_tokens, self.cache_creation_input_tokens, self.cache_read_input_tokens)
        wrong = [part for part in parts if part is not None and not is_count(part)]
        prompt = sum(filter(None, parts)) if self.input_tokens is not None and not wrong else (wrong or [None])[0]
        cached = None if self.cache_read_input_tokens is None else PromptDetails(self.cache_read_input_tokens)
        thought = (self.output_tokens_details or {}).get("thinking_tokens")
        details = CompletionDetails(thought) if isinstance(thought, int) and thought >= 0 else None
        return EventUsage(prompt, self.output_tokens, cached, details)


class Message(msgspec.Struct):
    """A message at its start."""

    usage: MessageUsage | None = None


class Block(msgspec.Struct):
    """A block of a message at its start."""

    type: str | None = None
    id: Any = None
    name: str | None = None
    text: str | None = None
    thinking: str | None = None
    data: str | None = None
    """Reasoning that only Anthropic can read."""


class MessageDelta(msgspec.Struct):
    """An addition to a block, or to the message."""

    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class MessageEvent(msgspec.Struct):
    """An event of a message."""

    type: str
    index: Any = None
    message: Message | None = None
    content_block: Block | None = None
    delta: MessageDelta | None = None
    usage: MessageUsage | None = None
    error: Any = None


def _read_message(data: bytes) -> Event | None:
    if data.strip() == b"[DONE]":
        return None
    event = _message.decode(data)
    match event.type:
        case "content_block_delta":
            delta = event.delta or MessageDelta()
            if delta.partial_json and not delta.thinking:
                return _called(event.index, arguments=delta.partial_json)
            return _thought(delta.thinking) if delta.thinking else _added(delta.text)
        case "content_block_start":
            block = event.content_block or Block()
            if thought := block.thinking or block.data:
                return _thought(thought)
            if not block.name:
                return _added(block.text)
            return _called(event.index, block.id, block.name) if block.type == "tool_use" else _called_other(block.name)
        case "message_start":
            usage = event.message.usage if event.message is not None else None
            said = usage.as_chat if usage is not None else None
            if said is not None:
                said.completion_tokens = None  # there are none yet, but Anthropic says 1
            return Event([], said)
        case "message_delta":
            reason = event.delta.stop_reason if event.delta is not None else None
            end = [EventChoice(finish_reason=STOP_REASONS.get(reason, reason))] if reason else []
            return Event(end, event.usage.as_chat if event.usage is not None else None)
        case "message_stop":
            return None
        case "error":
            return Event([], error=event.error or event.type)
    return NOTHING


STOP_REASONS = {
    "max_tokens": "length",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
}
"""What Anthropic calls the ends of answers, in OpenAI's words."""
NOTHING = Event([])


def _added(text: str | None) -> Event:
    return Event([EventChoice(delta=Delta(content=text))]) if text else NOTHING


def _thought(text: str | None) -> Event:
    return Event([EventChoice(delta=Delta(reasoning=text))]) if text else NOTHING


def _called(index: Any, id: Any = None, name: str | None = None, arguments: str | None = None) -> Event:
    call = ToolCall(index, id, EventFunction(name, arguments))
    return Event([EventChoice(delta=Delta(tool_calls=[call]))])


def _called_other(text: str) -> Event:
    """Return the call of a tool that is not the client's function."""
    return Event([EventChoice(delta=Delta(tool_calls=[ToolCall(custom=text)]))])


_chat = msgspec.json.Decoder(Event)
_response = msgspec.json.Decoder(ResponseEvent)
_message = msgspec.json.Decoder(MessageEvent)
CHAT = Grammar(_read_chat, "[DONE]")
GRAMMARS: dict[Api, Grammar] = {
    "completions": CHAT,
    "chat": CHAT,
    "responses": Grammar(_read_response, ""),
    "messages": Grammar(_read_message, "message_stop"),
}
"""Those of the APIs that stream."""
