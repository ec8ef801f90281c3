"""The tools of a chat request: which of them its answer may call, and whether it must."""

from typing import Any, Literal

import msgspec

from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import ChatRequest
from serving.frontend.api.plain import check_plain

MAX_NAME = 256
"""Characters of a tool's name."""


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer may call tools."""

    tools: list[dict[str, Any]]
    """Those that it may call, in OpenAI's form."""
    choice: Literal["auto", "required", "named"] = "auto"
    """Whether the model decides, must call at least one, or must call the only one."""
    is_parallel: bool = True
    """Whether it may call several."""

    @property
    def is_forced(self) -> bool:
        """Whether it must call one."""
        return self.choice != "auto"

    @property
    def forced(self) -> str | dict[str, Any]:
        """The `tool_choice` of an answer that must call one."""
        return {"function": {"name": function_name(self.tools[0])}} if self.choice == "named" else "required"


def check_tools(request: ChatRequest) -> None:
    """Reject tools and a choice that are not of OpenAI's form, or do not fit together."""
    seen: dict[str, dict[str, Any]] = {}
    for tool in request.tools or ():
        if tool.get("type") != "function":
            raise ApiError(400, f"tools: expected type function, not {tool.get('type')!r:.100}", param="tools")
        if not _is_name(function_name(tool)):
            raise ApiError(400, f"tools: expected function: {{name, ...}}, a name of 1 to {MAX_NAME} characters", param="tools")  # fmt: skip
        name = function_name(tool)
        if seen.setdefault(name, tool) != tool:
            raise ApiError(400, f"tools: there are two different functions {name!r:.100}", param="tools")
        parameters = tool["function"].get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            problem = f"tools: the parameters of {name!r} must be a JSON schema, an object"
            raise ApiError(400, problem, param="tools")
    check_plain(request.tools or [], "tools")
    tool_use(request)


def tool_use(request: ChatRequest) -> ToolUse | None:
    """Return how the answer to a request may call tools, None if it may not.

    Raises:
        ApiError: its choice is not possible.
    """
    choice, tools = request.tool_choice, request.tools or []
    if choice == "none" or (choice in (None, "auto") and not tools):
        return None
    if not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    is_parallel = request.parallel_tool_calls is not False
    if not isinstance(choice, dict):
        return ToolUse(tools=tools, choice="required" if choice == "required" else "auto", is_parallel=is_parallel)
    if choice.get("type") == "function":
        return ToolUse(tools=_among(tools, [choice]), choice="named", is_parallel=False)
    allowed = choice.get("allowed_tools")
    if choice.get("type") == "allowed_tools" and isinstance(allowed, dict):
        mode, wanted = allowed.get("mode"), allowed.get("tools")
        if mode in ("auto", "required") and isinstance(wanted, list) and wanted:
            return ToolUse(tools=_among(tools, wanted), choice=mode, is_parallel=is_parallel)
    expected = "expected none, auto, required, a function or allowed_tools"
    raise ApiError(400, f"tool_choice: {expected}, not {choice!r:.100}", param="tool_choice")


def _among(tools: list[dict[str, Any]], wanted: list[Any]) -> list[dict[str, Any]]:
    """Return the tools that a choice names."""
    by_name = {function_name(tool): tool for tool in tools}
    found = []
    for choice in wanted:
        name = function_name(choice) if isinstance(choice, dict) else None
        if name not in by_name:
            raise ApiError(400, f"tool_choice: there is no tool {name!r:.100}", param="tool_choice")
        found.append(by_name[name])
    return found


def function_name(tool: dict[str, Any]) -> Any:
    """Return the name in a tool or a choice of one, None if it has none."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME
