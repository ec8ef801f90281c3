"""Answers that must call tools: the schema to which an engine constrains them, and their script."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from serving.model.parsers.answer import ParsedAnswer, Script
from serving.model.parsers.json_calls import pass_rest, read_array
from serving.model.parsers.json_text import read_value

DEFINITIONS = ("$defs", "definitions")
RESOLVED = tuple(f"#/{key}/" for key in DEFINITIONS)


def calls_schema(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any], *, parallel: bool = True
) -> dict[str, Any]:
    """Return the JSON schema of an answer that calls tools.

    Args:
        tools: the tools, as OpenAI's API describes them.
        tool_choice: "required", for an array of {"name": ..., "parameters": {...}}, or OpenAI's object that names one
            function, for its arguments alone.
        parallel: whether there may be several calls.

    Raises:
        ValueError: the named function is none of the tools, or the definitions of one are no definitions.
    """
    functions = {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}
    name = chosen_name(tool_choice)
    if name:
        if name not in functions:
            raise ValueError(
                f"tool_choice names {name!r}, which is not in tools: {', '.join(functions) or 'there are none'}"
            )
        return functions[name]
    schema: dict[str, Any] = {"type": "array", "minItems": 1}
    for index, (name, parameters) in enumerate(functions.items()):
        _check_definitions(name, parameters)
        if not _fits(parameters, schema):
            place = f"parameters_{index}"
            functions[name] = {"$ref": f"#/$defs/{place}"}
            schema.setdefault("$defs", {})[place] = _moved(parameters, f"#/$defs/{place}")
            continue
        for key in DEFINITIONS:
            if own := parameters.get(key):
                schema.setdefault(key, {}).update(own)
    schema["items"] = {"anyOf": [_call(name, parameters) for name, parameters in functions.items()]}
    return schema if parallel else schema | {"maxItems": 1}


def chosen_name(tool_choice: str | Mapping[str, Any] | None) -> str:
    """Return the function that a tool_choice names, or nothing."""
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    return str(function["name"]) if isinstance(function, Mapping) and "name" in function else ""


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return dict(function.get("parameters") or {"type": "object", "properties": {}})


def _check_definitions(name: str, parameters: Mapping[str, Any]) -> None:
    for key in DEFINITIONS:
        own = parameters.get(key, {})
        if not isinstance(own, Mapping):
            raise ValueError(f"the parameters of {name!r}: {key} must be an object, not {own!r:.100}")


def _call(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: value for key, value in parameters.items() if key not in DEFINITIONS}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [name]}, "parameters": own},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _fits(parameters: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether the parameters' definitions may join those of other functions, with what refers to them as it is."""
    for key in DEFINITIONS:
        others = schema.get(key) or {}
        if any(others.get(name, own) != own for name, own in (parameters.get(key) or {}).items()):
            return False
    return all(target.startswith(RESOLVED) for target in _references(parameters))


def _references(schema: Any) -> Iterator[str]:
    """Yield what a schema refers to within itself."""
    unseen = [schema]
    while unseen:
        part = unseen.pop()
        unseen += part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ()
        target = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(target, str) and target.startswith("#"):
            yield target


def _moved(schema: Any, root: str) -> Any:
    """Return a schema that stands elsewhere: what it refers to starts at its new root."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    target = schema.get("$ref")
    return moved | {"$ref": root + target[1:]} if isinstance(target, str) and target.startswith("#") else moved


def read_required(answer: ParsedAnswer, name: str) -> Script[None]:
    """Read an answer that consists of calls, or of the arguments for one function."""
    answer.hold()
    yield from answer.space()
    text, at = yield from answer.unread()
    if not name:
        yield from read_array(answer, ())
    elif text.startswith("{", at):
        answer.start(name)
        _ = (yield from read_value(answer, answer.arguments)) or (yield from pass_rest(answer, ()))
    answer.give_up()
