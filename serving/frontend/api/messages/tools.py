"""Tools of Anthropic's API, as a chat has them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, read_object
from serving.frontend.api.messages.blocks import CacheControl

CUSTOM = (None, "custom")
"""Types of tools that the client runs; all others are Anthropic's own."""


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """Whether arguments are sent while they are generated; they always are."""


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether the model calls tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool, for type `tool`."""
    disable_parallel_tool_use: bool | None = None

    @property
    def is_parallel(self) -> bool | None:
        """Whether several calls are allowed, if it says so."""
        return None if self.disable_parallel_tool_use is None else not self.disable_parallel_tool_use


NEUTRAL: Neutral = {"allowed_callers": (["direct"],), "defer_loading": (False,), "input_examples": ([],)}


def chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool as a chat has it.

    Raises:
        ApiError: it is not one that the client runs.
    """
    if tool.get("type") not in CUSTOM:
        name = str(tool.get("type"))[:100]
        raise ApiError(400, f"{where}: tools of type {name!r} are not supported; expected custom", param=where)
    custom = read_object(tool, Tool, where=where, neutral=NEUTRAL)
    fields = {
        "name": custom.name,
        "description": custom.description,
        "parameters": custom.input_schema,
        "strict": custom.strict,
    }
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def chat_choice(choice: ToolChoice) -> Literal["none", "auto", "required"] | dict[str, Any]:
    """Return a choice as a chat has it.

    Raises:
        ApiError: it names no tool, or should not.
    """
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(400, "tool_choice: expected a name with type tool, and with no other", param="tool_choice")
    match choice.type:
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}
        case "any":
            return "required"
    return choice.type
