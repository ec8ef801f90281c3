"""The messages of Anthropic's API, as chat messages.

A turn's blocks become several messages if they are several things: results of tools, one message each, and text. What
an assistant thought, said and called is one message. Neighbouring turns of the same role are one turn, as at Anthropic.
"""

from typing import Any, Literal

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, read_object
from serving.frontend.api.openai import Message, TextPart

Block = dict[str, Any]
Role = Literal["user", "assistant", "system"]


class Turn(msgspec.Struct, kw_only=True):
    """A message."""

    role: Role
    content: str | list[Block]


class CacheControl(msgspec.Struct, kw_only=True):
    """A breakpoint for caching; it asks for nothing, as whole blocks of every prompt are cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class TextBlock(msgspec.Struct, kw_only=True):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, kw_only=True):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, kw_only=True):
    """What a model at Anthropic thought, encrypted: only that model could read it, so it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(msgspec.Struct, kw_only=True):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


BlockType = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
BLOCKS: dict[str, dict[str, type[BlockType]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
        "tool_use": ToolUseBlock,
    },
    "system": {"text": TextBlock},
}
"""The blocks that a role's messages may have."""

NEUTRAL: Neutral = {"caller": ({"type": "direct"},)}
FAILED = "Error: "
"""In front of the result of a call that failed: a chat message has no other place for `is_error`."""


def chat_messages(turns: list[Block]) -> list[Message]:
    """Return the chat messages.

    Raises:
        ApiError: a block cannot be expressed, or is the result of a call that was not made.
    """
    messages: list[Message] = []
    calls: set[str] = set()
    for index, entry in enumerate(turns):
        where = f"messages[{index}]"
        turn = read_object(entry, Turn, where=where, neutral={})
        if not turn.content:
            raise ApiError(400, f"{where}: content must not be empty", param=where)
        content = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
        for number, block in enumerate(content):
            _add(messages, turn.role, _block(block, turn.role, f"{where}.content[{number}]"), calls, where)
    return messages


def system_content(system: str | list[Block]) -> str | list[TextPart]:
    """Return the content of the system prompt.

    Raises:
        ApiError: it has something other than text.
    """
    return system if isinstance(system, str) else _text_content(system, "system")


def _block(block: Block, role: str, where: str) -> BlockType:
    name, known = str(block.get("type"))[:100], BLOCKS[role]
    if name not in known:
        expected = ", ".join(known)
        raise ApiError(
            400, f"{where}: {name!r} is not supported in a {role} message; supported: {expected}", param=where
        )
    return read_object(block, known[name], where=where, neutral=NEUTRAL)


def _add(messages: list[Message], role: Role, block: BlockType, calls: set[str], where: str) -> None:
    match block:
        case TextBlock():
            message = _turn(messages, role)
            message.content = _with_text(message.content, block.text)
        case ThinkingBlock():
            message = _turn(messages, role)
            message.reasoning_content = (message.reasoning_content or "") + block.thinking
        case RedactedThinkingBlock():
            _turn(messages, role)
        case ToolUseBlock():
            calls.add(block.id)
            arguments = msgspec.json.encode(block.input).decode()
            call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
            message = _turn(messages, role)
            message.tool_calls = [*(message.tool_calls or []), call]
        case ToolResultBlock():
            if block.tool_use_id not in calls:
                problem = f"{where}: tool_result for {block.tool_use_id[:100]!r}, but no tool_use before it has this id"
                raise ApiError(400, problem, param=where)
            messages.append(Message("tool", _result(block, where), tool_call_id=block.tool_use_id))


def _turn(messages: list[Message], role: Role) -> Message:
    """Return the message that a block of this role belongs to."""
    if not messages or messages[-1].role != role:
        messages.append(Message(role))
    return messages[-1]


def _with_text(content: str | list[TextPart] | None, text: str) -> str | list[TextPart]:
    """Return a content with one more text; a single text is a string, which most templates expect."""
    if not content:
        return text
    return [*([TextPart(content)] if isinstance(content, str) else content), TextPart(text)]


def _result(block: ToolResultBlock, where: str) -> str | list[TextPart]:
    content = block.content or ""
    result = content if isinstance(content, str) else _text_content(content, f"{where}: tool_result")
    if not block.is_error:
        return result
    return FAILED + result if isinstance(result, str) else [TextPart(FAILED), *result]


def _text_content(blocks: list[Block], where: str) -> str | list[TextPart]:
    content: str | list[TextPart] = ""
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") != "text":
            name = str(block.get("type"))[:100]
            raise ApiError(400, f"{place}: {name!r} is not supported; supported: text", param=where.split(":")[0])
        content = _with_text(content, read_object(block, TextBlock, where=place, neutral=NEUTRAL).text)
    return content
