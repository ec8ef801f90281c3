"""A streamed answer as the message of a chat that later turns repeat: its text and its calls of tools."""

from typing import Any

import msgspec

from dynabench.apis import object_of
from dynabench.live.event_types import EventChoice, EventFunction, ToolCall

Message = dict[str, Any]


class AnswerMessage:
    """Collects what the events of an answer add; reasoning is left out, as chat clients do."""

    __slots__ = ("_calls", "_has_others", "_places", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._calls: list[tuple[Any, list[EventFunction]]] = []  # id, and the pieces of name and arguments
        self._places: dict[Any, int] = {}  # an event's index of a call -> its place among the calls
        self._has_others = False

    def add(self, choice: EventChoice) -> None:
        """Take up what an event adds."""
        self._texts.append(choice.content)
        delta = choice.delta
        if delta is None:
            return
        self._has_others |= bool(delta.function_call)
        for call in delta.tool_calls or ():
            self._add_call(call)

    def whole(self) -> Message | None:
        """Return the message; None if there is nothing that can be repeated.

        That is an answer of reasoning only, or with a call that is not of a function, or has no id, no name, or arguments
        that are no JSON object, such as one that the limit of the answer's length has cut.
        """
        calls = [_call(id, pieces) for id, pieces in self._calls]
        text = "".join(self._texts)
        if self._has_others or None in calls or not (text or calls):
            return None
        message: Message = {"role": "assistant", "content": text or None}
        return message | {"tool_calls": calls} if calls else message

    def _add_call(self, call: ToolCall) -> None:
        if call.custom:
            self._has_others = True
        # Some servers send no index: then an id begins a call, and what has none belongs to the last one.
        place = self._places.get(call.index) if call.index is not None else len(self._calls) - 1
        if place is None or place < 0 or (call.index is None and call.id):
            place = len(self._calls)
            self._calls.append((call.id, []))
            if call.index is not None:
                self._places[call.index] = place
        if call.function is not None:
            self._calls[place][1].append(call.function)


def calls_of(message: Message) -> list[Message]:
    """Return the calls of tools in a message."""
    calls = message.get("tool_calls")
    return [object_of(call) for call in calls] if isinstance(calls, list) else []


def _call(id: Any, pieces: list[EventFunction]) -> Message | None:
    """Return a call, None if it cannot be repeated."""
    name = "".join(piece.name for piece in pieces if isinstance(piece.name, str))
    said = [piece.arguments for piece in pieces if piece.arguments]
    arguments = "".join(each if isinstance(each, str) else msgspec.json.encode(each).decode() for each in said)
    if not (isinstance(id, str) and id and name and _is_object(arguments)):
        return None
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(arguments or "{}"), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
