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
