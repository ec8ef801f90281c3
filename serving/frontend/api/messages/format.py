"""A message as events or as one object.

The message's blocks follow each other; each is opened, filled and closed:

    part        block       opened by               filled by                         closed by
    Reasoning   thinking    content_block_start     thinking_delta, signature_delta   content_block_stop
    Content     text        content_block_start     text_delta                        content_block_stop
    CallStart   tool_use    content_block_start     input_json_delta                  content_block_stop

A part of another kind, a further call and the end of the answer close the open block.
"""

from typing import Any

import msgspec
import pydantic_core

from serving.frontend.api.answer_format import CallIds, Spaces, Usage, joined, named_event
from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import error_fields
from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning

Fields = dict[str, Any]


class MessagesFormat:
    """Writes one message."""

    def __init__(self, model: str, *, seed: str, fingerprint: str) -> None:
        """Prepare to write it.

        Args:
            model: its name.
            seed: what the id of the message is made of; it must be unique.
            fingerprint: what the ids of its calls are made of.
        """
        self.id = f"msg_{seed}"
        self._model = model
        self._seed = seed
        self._spaces = Spaces()
        self._call_ids = CallIds(f"toolu_{fingerprint}")
        self._blocks: list[Fields] = []
        self._texts: list[str] = []
        self._is_open = False

    def first(self, usage: Usage) -> bytes:
        """Return the events before the first part."""
        message = self._message([], usage=_usage(usage))
        return named_event({"type": "message_start", "message": message}) + named_event({"type": "ping"})

    def parts(self, parts: list[Part]) -> bytes:
        """Return the events of the next parts."""
        return b"".join(map(self._part, self._spaces.without(parts)))

    def last(self, reason: str, usage: Usage, *, stop: str | None = None) -> bytes:
        """Return the events that end the stream."""
        delta = {"type": "message_delta", "delta": self._end(reason, stop), "usage": _usage(usage)}
        return self._close() + named_event(delta) + named_event({"type": "message_stop"})

    def whole(self, parts: list[Part], reason: str, usage: Usage, *, stop: str | None = None) -> bytes:
        """Return the body of a message that is not streamed."""
        self.parts(joined(parts))
        self._close()
        return msgspec.json.encode(self._message(self._blocks, usage=_usage(usage), **self._end(reason, stop)))

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a stream that fails."""
        return named_event(error_fields(error))

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text) if text:
                return self._opened("text", text="") + self._delta("text_delta", "text", text)
            case Reasoning(text) if text:
                events = self._opened("thinking", thinking="", signature="")
                return events + self._delta("thinking_delta", "thinking", text)
            case CallStart(name, id):
                return self._close() + self._open("tool_use", id=self._call_ids.next(id), name=name, input={})
            case Arguments(text) if text:
                return self._delta("input_json_delta", "partial_json", text)
        return b""

    def _opened(self, type: str, **fields: Any) -> bytes:
        """Return the events that open a block of a type, unless one is open."""
        if self._is_open and self._blocks[-1]["type"] == type:
            return b""
        return self._close() + self._open(type, **fields)

    def _open(self, type: str, **fields: Any) -> bytes:
        block = {"type": type, **fields}
        self._blocks.append(block)
        self._is_open = True
        return self._event("content_block_start", content_block=block)

    def _delta(self, type: str, name: str, text: str) -> bytes:
        self._texts.append(text)
        return self._event("content_block_delta", delta={"type": type, name: text})

    def _close(self) -> bytes:
        """Close the open block, if there is one."""
        if not self._is_open:
            return b""
        block, text, events = self._blocks[-1], "".join(self._texts), b""
        match block["type"]:
            case "text":
                block["text"] = text
            case "tool_use":
                block["input"] = _object(text)
            case "thinking":
                # Nothing here verifies a signature, but some clients do not send back thinking that has none.
                signature = f"sig_{self._seed}{len(self._blocks):02d}"
                block |= {"thinking": text, "signature": signature}
                events = self._event("content_block_delta", delta={"type": "signature_delta", "signature": signature})
        self._is_open, self._texts = False, []
        return events + self._event("content_block_stop")

    def _event(self, type: str, **fields: Any) -> bytes:
        return named_event({"type": type, "index": len(self._blocks) - 1, **fields})

    def _end(self, reason: str, stop: str | None) -> Fields:
        """Return why the message ended."""
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        has_calls = any(block["type"] == "tool_use" for block in self._blocks)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

    def _message(self, content: list[Fields], **fields: Any) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **fields,
        }


def _object(arguments: str) -> Fields:
    """Return the arguments of a call; those that were cut off as far as they are complete, as Anthropic's clients do."""
    try:
        found = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _usage(usage: Usage) -> Fields:
    """Return the usage; Anthropic's `input_tokens` are those that were not in a cache."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning},
    }
