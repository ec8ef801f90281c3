"""The parts of a chat's answer in vLLM's form: deltas of a stream, or one message."""

from collections.abc import Iterable
from typing import Any

from serving.frontend.prepared import PreparedPrompt
from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning
from serving.runtime.world import world


def new_id() -> str:
    """Return what vLLM's ids end with."""
    return world().token_hex(8)


class VllmDeltas:
    """Turns parts into deltas, and counts the calls."""

    def __init__(self) -> None:
        self._index = -1

    def of(self, parts: Iterable[Part]) -> list[dict[str, Any]]:
        """Return the delta of each part; parts without text have none."""
        found: list[dict[str, Any]] = []
        for part in parts:
            match part:
                case CallStart(name, id):
                    self._index += 1
                    call = {"id": id or _call_id(), "type": "function", "index": self._index}
                    found.append({"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]})
                case Arguments(text) if text:
                    found.append({"tool_calls": [{"index": self._index, "function": {"arguments": text}}]})
                case Content(text) if text:
                    found.append({"content": text})
                case Reasoning(text) if text:
                    found.append({"reasoning": text})
        return found


def message(role: str, parts: Iterable[Part] | None = None, *, content: str = "") -> dict[str, Any]:
    """Return the message that consists of these parts, or of one text."""
    said: str | None = content
    thought: str | None = None
    calls = list[dict[str, Any]]()
    if parts is not None:
        said = None
        for part in parts:
            match part:
                case CallStart(name, id):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": id or _call_id(), "type": "function", "function": function})
                case Arguments(text):
                    calls[-1]["function"]["arguments"] += text
                case Content(text):
                    said = (said or "") + text
                case Reasoning(text):
                    thought = (thought or "") + text
    found: dict[str, Any] = {"role": role, "content": said, "refusal": None, "annotations": None, "audio": None}
    found["function_call"] = None
    return found | ({"tool_calls": calls} if calls else {}) | {"reasoning": thought}


def ids_of(prompt: PreparedPrompt) -> list[int]:
    """Return the token ids of a prompt."""
    found: list[int] = prompt.tokens.tolist()
    return found


def _call_id() -> str:
    return f"chatcmpl-tool-{new_id()}"
