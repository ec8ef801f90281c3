"""What a workload says in the words of chat completions, in those of the Responses and the Messages API.

    chat                       Responses                       Messages
    a message                  an item                         a message; systems' in `system`
    tool_calls                 function_call items             tool_use blocks
    a tool's message           a function_call_output item     a tool_result block of a user's message
    tools, tool_choice         the same, without `function`    input_schema; auto, any, tool, none
    response_format            text.format                     output_config.format
    reasoning_effort           reasoning.effort                output_config.effort
    stop                       -                               stop_sequences

What has no other word (-, and fields that are not listed) is sent as it is: a server that does not know it says so.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from dynabench.apis import object_of
from dynabench.live.answer_message import calls_of

Fields = dict[str, Any]
SYSTEM = ("system", "developer")


def response_input(messages: list[Fields]) -> list[Fields]:
    """Return the input items of a response that say the same as chat messages."""
    items: list[Fields] = []
    for message in messages:
        role, content = message.get("role", "user"), message.get("content")
        if role == "tool":
            output = {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": _text(content)}
            items.append(output)
            continue
        if content:
            items.append(
                {"role": role, "content": _parts(content, _input_part if role != "assistant" else _output_part)}
            )
        items += [
            {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}
            for id, name, arguments in _calls(message)
        ]
    return items


def response_fields(fields: Fields) -> Fields:
    """Return the fields of a chat's body by their names in a response's."""
    fields = {**fields}
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [_without_kind(tool) for tool in tools]
    if isinstance(choice := fields.get("tool_choice"), dict):
        fields["tool_choice"] = _without_kind(choice)
    if isinstance(wanted := fields.pop("response_format", None), dict):
        schema = wanted.get("json_schema")
        form = {"type": wanted.get("type"), **object_of(schema)}
        fields["text"] = {**object_of(fields.get("text")), "format": form}
    if (effort := fields.pop("reasoning_effort", None)) is not None:
        fields["reasoning"] = {**object_of(fields.get("reasoning")), "effort": effort}
    return fields


def message_prompt(messages: list[Fields]) -> Fields:
    """Return `system` and `messages` of the Messages API that say the same as chat messages."""
    system = [_text(message.get("content")) for message in messages if message.get("role") in SYSTEM]
    turns: list[Fields] = []
    for message in messages:
        role, content = message.get("role", "user"), message.get("content")
        if role in SYSTEM:
            continue
        if role == "tool":
            role = "user"
            content = [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": _text(content)}]
        else:
            content = _parts(content, _block)
            if calls := [
                {"type": "tool_use", "id": id, "name": name, "input": _arguments(arguments)}
                for id, name, arguments in _calls(message)
            ]:
                content = [*_blocks(content), *calls]
        if turns and turns[-1]["role"] == role:  # turns alternate, and the results of several calls are in one
            turns[-1]["content"] = [*_blocks(turns[-1]["content"]), *_blocks(content)]
        else:
            turns.append({"role": role, "content": content})
    return ({"system": "\n\n".join(system)} if system else {}) | {"messages": turns}


def message_fields(fields: Fields) -> Fields:
    """Return the fields of a chat's body by their names in the Messages API."""
    fields = {**fields}
    if isinstance(tools := fields.get("tools"), list):
        fields["tools"] = [_message_tool(tool) for tool in tools]
    if (choice := fields.pop("tool_choice", None)) is not None:
        fields["tool_choice"] = _message_choice(choice)
    if (stop := fields.pop("stop", None)) is not None:
        fields["stop_sequences"] = stop if isinstance(stop, list) else [stop]
    if isinstance(schema := object_of(fields.get("response_format")).get("json_schema"), dict):
        del fields["response_format"]
        form = {"type": "json_schema", "schema": schema.get("schema")}
        fields["output_config"] = {**object_of(fields.get("output_config")), "format": form}
    if (effort := fields.pop("reasoning_effort", None)) is not None:
        fields["output_config"] = {**object_of(fields.get("output_config")), "effort": effort}
    return fields


def _without_kind(tool: Any) -> Any:
    """Lift what is in `{"type": kind, kind: {...}}` to the top."""
    kind = object_of(tool).get("type", "function")
    inner = object_of(tool).get(kind) if isinstance(kind, str) else None
    return {"type": kind, **inner} if isinstance(inner, dict) else tool


def _message_tool(tool: Any) -> Any:
    function = object_of(object_of(tool).get("function"))
    if not function:
        return tool
    named = {name: value for name, value in function.items() if name not in ("parameters", "strict")}
    return {**named, "input_schema": function.get("parameters") or {"type": "object", "properties": {}}}


def _message_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return {"type": "any" if choice == "required" else choice}
    name = object_of(object_of(choice).get("function")).get("name")
    return {"type": "tool", "name": name} if name else choice


def _calls(message: Fields) -> list[tuple[Any, Any, str]]:
    """Return id, name and arguments of a message's calls."""
    found = []
    for call in calls_of(message):
        function = object_of(call.get("function"))
        found.append((call.get("id"), function.get("name"), _text(function.get("arguments"))))
    return found


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"arguments": text}  # a model's calls need not be JSON, but this API takes objects only


def _text(content: Any) -> str:
    """Return a content's text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else msgspec.json.encode(content).decode()


def _parts(content: Any, translated: Callable[[Fields], Fields]) -> Any:
    if not isinstance(content, list):
        return content or ""
    return [translated(part) if isinstance(part, dict) else part for part in content]


def _input_part(part: Fields) -> Fields:
    if part.get("type") == "image_url":
        image = object_of(part.get("image_url"))
        return {"type": "input_image", "image_url": image.get("url"), "detail": image.get("detail", "auto")}
    return {**part, "type": "input_text"} if part.get("type") == "text" else part


def _output_part(part: Fields) -> Fields:
    return {**part, "type": "output_text"} if part.get("type") == "text" else part


def _block(part: Fields) -> Fields:
    if part.get("type") != "image_url":
        return part
    url = str(object_of(part.get("image_url")).get("url", ""))
    head, comma, data = url.partition(";base64,")
    if url.startswith("data:") and comma:
        source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
    else:
        source = {"type": "url", "url": url}
    return {"type": "image", "source": source}


def _blocks(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
