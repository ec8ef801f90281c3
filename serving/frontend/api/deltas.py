"""The parts of a chat's answer in OpenAI's form: deltas of a stream, or one message."""

from collections.abc import Iterable, Iterator
from typing import Any

from serving.frontend.api.answer_format import CallIds
from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning


class Deltas:
    """Turns parts into deltas, and counts the calls."""

    def __init__(self, call_ids: CallIds) -> None:
        self._call_ids = call_ids
        self._index = -1

    def of(self, parts: Iterable[Part]) -> Iterator[dict[str, Any]]:
        """Yield the delta of each part; parts without text have none."""
        for part in parts:
            match part:
                case CallStart(name, id):
                    self._index += 1
                    yield _calls({"index": self._index, **_call(self._call_ids.next(id), name)})
                case Arguments(text) if text:
                    yield _calls({"index": self._index, "function": {"arguments": text}})
                case Content(text) if text:
                    yield {"content": text}
                case Reasoning(text) if text:
                    yield {"reasoning_content": text}


def as_one(deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the deltas of a step as one, which has the text of each kind and one entry for each call; none stays none."""
    found: dict[str, Any] = {}
    for delta in deltas:
        for name, value in delta.items():
            if name == "tool_calls":
                found[name] = [*found.get(name, ()), *value]
            else:
                found[name] = found.get(name, "") + value
    if "tool_calls" in found:
        found["tool_calls"] = _by_index(found["tool_calls"])
    return [found] if found else []


def _by_index(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the entries of each call: clients that add up deltas expect one of each in an event."""
    joined: dict[int, dict[str, Any]] = {}
    for call in calls:
        first = joined.get(call["index"])
        if first is None:
            joined[call["index"]] = call
            continue
        function = first["function"]
        arguments = function.get("arguments", "") + call["function"]["arguments"]
        joined[call["index"]] = first | {"function": function | {"arguments": arguments}}
    return list(joined.values())


def message(parts: Iterable[Part], call_ids: CallIds) -> dict[str, Any]:
    """Return the message that consists of these parts; its content is null if it only calls tools."""
    content, reasoning, calls = "", "", list[dict[str, Any]]()
    for part in parts:
        match part:
            case CallStart(name, id):
                calls.append(_call(call_ids.next(id), name))
            case Arguments(text):
                calls[-1]["function"]["arguments"] += text
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
    found: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def _calls(call: dict[str, Any]) -> dict[str, Any]:
    return {"tool_calls": [call]}


def _call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": ""}}
