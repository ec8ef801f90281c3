"""Tools of a response, as a chat has them."""

from typing import Any, Literal

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, read_object

ChatTool = dict[str, Any]
Choice = Literal["none", "auto", "required"]
FUNCTION = "function"


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the client calls for the model."""

    name: str
    type: Literal["function"]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    """What the function returns; it is not shown to the model, as a chat has no place for it."""


class FunctionChoice(msgspec.Struct, kw_only=True):
    """The one function that the model must call."""

    type: Literal["function"]
    name: str


class AllowedTools(msgspec.Struct, kw_only=True):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


TOOL_NEUTRAL: Neutral = {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}


def chat_tool(tool: dict[str, Any], where: str) -> ChatTool:
    """Return a tool as a chat has it.

    Raises:
        ApiError: it is not a function.
    """
    if tool.get("type") != FUNCTION:
        name = str(tool.get("type"))[:100]
        raise ApiError(400, f"{where}: tools of type {name!r} are not supported; expected {FUNCTION}", param=where)
    function = read_object(tool, FunctionTool, where=where, neutral=TOOL_NEUTRAL)
    names = ("name", "description", "parameters", "strict")
    fields = {name: getattr(function, name) for name in names if getattr(function, name) is not None}
    return {"type": FUNCTION, "function": fields}


def chat_choice(choice: Choice | dict[str, Any] | None) -> Choice | dict[str, Any] | None:
    """Return a choice of tools as a chat has it.

    Raises:
        ApiError: it cannot be expressed.
    """
    if not isinstance(choice, dict):
        return choice
    match choice.get("type"):
        case "function":
            return _named(choice, "tool_choice")
        case "allowed_tools":
            allowed = read_object(choice, AllowedTools, where="tool_choice", neutral={})
            tools = [_named(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(allowed.tools)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": tools}}
    name = str(choice.get("type"))[:100]
    message = f"tool_choice of type {name!r} is not supported; expected function or allowed_tools"
    raise ApiError(400, message, param="tool_choice")


def _named(choice: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": FUNCTION, "function": {"name": read_object(choice, FunctionChoice, where=where, neutral={}).name}}
