"""The input of a response, as chat messages.

Items of one answer become one message, as chat templates expect it: what the model thought, what it said, what it
called. The items of an answer come in this order, so each of them that comes earlier starts the next message.
"""

from typing import Any, Literal, TypeGuard

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, read_object
from serving.frontend.api.openai import Message, TextPart
from serving.frontend.api.responses.sealed import unsealed

Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["system", "developer", "user", "assistant"]


class MessageItem(msgspec.Struct, kw_only=True):
    """What somebody said."""

    role: Role
    content: str | list[dict[str, Any]]
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: str | None = None
    """What the text is to the client, "commentary" or "final_answer"; models here are not trained to be told."""


class CallItem(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class OutputItem(msgspec.Struct, kw_only=True):
    """What a tool returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    name: str | None = None
    status: Status | None = None


class ReasoningItem(msgspec.Struct, kw_only=True):
    """What the model thought: in full, as `include` asked for it, or at least in short."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem
ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
DIRECT: tuple[Any, ...] = ({"type": "direct"},)
NEUTRAL: Neutral = {"annotations": ([],), "async": (False,), "caller": DIRECT, "created_by": (), "namespace": ()}


class _Text(msgspec.Struct):
    """A part of a content."""

    type: str
    text: str = ""
    refusal: str = ""


PART_NEUTRAL: Neutral = {"annotations": ([],), "logprobs": ([],), "prompt_cache_breakpoint": ({"mode": "explicit"},)}
"""A breakpoint asks for nothing: whole blocks of every prompt are cached."""


def chat_messages(items: list[dict[str, Any]]) -> list[Message]:
    """Return the messages.

    Raises:
        ApiError: an item cannot be expressed, or returns the output of a call that was not made.
    """
    messages: list[Message] = []
    calls: set[str] = set()
    for index, entry in enumerate(items):
        where = f"input[{index}]"
        item = _item(entry, where)
        match item:
            case MessageItem():
                _add_message(messages, item, where)
            case ReasoningItem():
                _add_reasoning(messages, item, where)
            case CallItem():
                calls.add(item.call_id)
                _add_call(messages, item)
            case OutputItem():
                if item.call_id not in calls:
                    message = f"No tool call found for function call output with call_id {item.call_id[:100]}."
                    raise ApiError(400, message, param="input")
                content = _content(item.output, f"{where}.output", ("input_text",))
                messages.append(Message("tool", content, tool_call_id=item.call_id))
    return messages


def _item(entry: dict[str, Any], where: str) -> Item:
    name = entry.get("type") or "message"
    if name not in ITEMS:
        known = ", ".join(ITEMS)
        raise ApiError(
            400, f"{where}: items of type {str(name)[:100]!r} are not supported; supported: {known}", param=where
        )
    return read_object(entry, ITEMS[name], where=where, neutral=NEUTRAL)


def _add_message(messages: list[Message], item: MessageItem, where: str) -> None:
    texts = ("output_text", "refusal", "input_text") if item.role == "assistant" else ("input_text",)
    content = _content(item.content, f"{where}.content", texts)
    if not content and item.role in ("user", "system"):
        raise ApiError(400, f"{where}: a {item.role} message needs content", param=where)
    last = messages[-1] if messages else None
    if item.role == "assistant" and _is_answer(last) and not last.content and not last.tool_calls:
        last.content = content
    else:
        messages.append(Message(item.role, content))


def _add_reasoning(messages: list[Message], item: ReasoningItem, where: str) -> None:
    thought = "".join(_texts(item.content or [], f"{where}.content", ("reasoning_text",)))
    if not thought and item.encrypted_content:
        thought = unsealed(item.encrypted_content, f"{where}.encrypted_content")
    thought = thought or "\n".join(_texts(item.summary, f"{where}.summary", ("summary_text",)))
    if not thought:
        return
    last = messages[-1] if messages else None
    if _is_answer(last) and not last.content and not last.tool_calls:
        last.reasoning_content = f"{last.thought}\n{thought}"
    else:
        messages.append(Message("assistant", reasoning_content=thought))


def _add_call(messages: list[Message], item: CallItem) -> None:
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    last = messages[-1] if messages else None
    if not _is_answer(last):
        last = Message("assistant")
        messages.append(last)
    last.tool_calls = [*(last.tool_calls or []), call]


def _is_answer(message: Message | None) -> TypeGuard[Message]:
    return message is not None and message.role == "assistant"


def _content(given: str | list[dict[str, Any]], where: str, types: tuple[str, ...]) -> str | list[TextPart]:
    """Return a content: one text if it has one part, which most templates expect."""
    if isinstance(given, str):
        return given
    texts = _texts(given, where, types)
    return texts[0] if len(texts) == 1 else list(map(TextPart, texts))


def _texts(parts: list[dict[str, Any]], where: str, types: tuple[str, ...]) -> list[str]:
    return [_text(part, f"{where}[{index}]", types) for index, part in enumerate(parts)]


def _text(part: dict[str, Any], where: str, types: tuple[str, ...]) -> str:
    if part.get("type") not in types:
        name, expected = str(part.get("type"))[:100], " or ".join(types)
        raise ApiError(400, f"{where}: content of type {name!r} is not supported; expected {expected}", param=where)
    text = read_object(part, _Text, where=where, neutral=PART_NEUTRAL)
    return text.refusal if text.type == "refusal" else text.text
