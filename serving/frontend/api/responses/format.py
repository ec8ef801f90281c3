"""A response as events or as one object.

The answer's items follow each other; each is opened, filled and closed:

    part        item            opened by                  filled by                       closed by
    Reasoning   reasoning       item.added, part.added     reasoning_text.delta            .done, part.done, item.done
    Content     message         item.added, part.added     output_text.delta               .done, part.done, item.done
    CallStart   function_call   item.added                 function_call_arguments.delta   .done, item.done

A part of another kind, a further call and the end of the answer close the open item.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from serving.frontend.api.answer_format import CallIds, Spaces, Usage, joined, named_event
from serving.frontend.api.errors import ApiError
from serving.frontend.api.responses.request import ResponseOptions
from serving.frontend.api.responses.sealed import sealed
from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning

Fields = dict[str, Any]
Keep = Callable[[Fields], bool]
"""Keeps a response object for later requests; returns whether it fits."""
TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}
"""Types of the one part that such an item has."""


class ResponsesFormat:
    """Writes one response."""

    def __init__(
        self, options: ResponseOptions, *, seed: str, fingerprint: str, created_at: int, keep: Keep | None = None
    ) -> None:
        """Prepare to write it.

        Args:
            options: what it needs of its request.
            seed: what the ids of the response and of its items are made of; it must be unique.
            fingerprint: what the ids of its calls are made of.
            created_at: seconds since 1970.
            keep: keeps the whole response, if that is wanted.
        """
        self.id = f"resp_{seed}"
        self._output: list[Fields] = []
        """The items so far, without the open one."""
        self._keep = keep
        self._head = {"id": self.id, "object": "response", "created_at": created_at, **options.echo}
        self._seed = seed
        self._wants_sealed = options.wants_sealed
        self._spaces = Spaces()
        self._call_ids = CallIds(f"call_{fingerprint}")
        self._num_events = 0
        self._open: Fields | None = None
        self._texts: list[str] = []

    def first(self, usage: Usage) -> bytes:
        """Return the events before the first part."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def parts(self, parts: list[Part]) -> bytes:
        """Return the events of the next parts."""
        return b"".join(map(self._part, self._spaces.without(parts)))

    def last(self, reason: str, usage: Usage, *, stop: str | None = None) -> bytes:
        """Return the events that end the stream."""
        status = "incomplete" if reason == "length" else "completed"
        events = self._close(status)
        return events + self._event(f"response.{status}", response=self._complete(status, usage))

    def whole(self, parts: list[Part], reason: str, usage: Usage, *, stop: str | None = None) -> bytes:
        """Return the body of a response that is not streamed."""
        status = "incomplete" if reason == "length" else "completed"
        self.parts(joined(parts))
        self._close(status)
        return msgspec.json.encode(self._complete(status, usage))

    def failed(self, error: ApiError) -> bytes:
        """Return the events that end a stream that fails."""
        events = self._close("incomplete")
        events += self._event("error", code=_code(error), message=error.message, param=error.param)
        reason = {"code": _code(error), "message": error.message}
        return events + self._event("response.failed", response=self._response("failed", error=reason))

    def _part(self, part: Part) -> bytes:
        match part:
            case Content(text) if text:
                return self._text("message", "response.output_text.delta", text)
            case Reasoning(text) if text:
                return self._text("reasoning", "response.reasoning_text.delta", text)
            case CallStart(name, id):
                return self._add("function_call", "fc", call_id=self._call_ids.next(id), name=name, arguments="")
            case Arguments(text) if text:
                self._texts.append(text)
                return self._event("response.function_call_arguments.delta", **self._place(), delta=text)
        return b""

    def _text(self, type: str, name: str, text: str) -> bytes:
        """Return the event of the next text of an item that has one, and those that open it."""
        events = b""
        if self._open is None or self._open["type"] != type:
            events = self._add(type, "rs", summary=[], content=[]) if type == "reasoning" else self._add_message()
            events += self._event("response.content_part.added", **self._place(), content_index=0, part=_part(type, ""))
        self._texts.append(text)
        more: Fields = {"logprobs": []} if type == "message" else {}
        return events + self._event(name, **self._place(), content_index=0, delta=text, **more)

    def _add_message(self) -> bytes:
        return self._add("message", "msg", role="assistant", content=[])

    def _add(self, type: str, prefix: str, **fields: Any) -> bytes:
        """Close the open item and open the next."""
        events = self._close("completed")
        id = f"{prefix}_{self._seed}{len(self._output):02d}"
        self._open = {"id": id, "type": type, "status": "in_progress", **fields}
        return events + self._event("response.output_item.added", output_index=len(self._output), item=self._open)

    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one."""
        if self._open is None:
            return b""
        type, text, place = self._open["type"], "".join(self._texts), self._place()
        if type == "function_call":
            events = self._event("response.function_call_arguments.done", **place, arguments=text)
            content: Fields = {"arguments": text}
        else:
            part = _part(type, text)
            more: Fields = {"logprobs": []} if type == "message" else {}
            events = self._event(f"response.{TEXTS[type]}.done", **place, content_index=0, text=text, **more)
            events += self._event("response.content_part.done", **place, content_index=0, part=part)
            content = {"content": [part]}
            if type == "reasoning" and self._wants_sealed:
                content["encrypted_content"] = sealed(text)
        item = self._open | content | {"status": status}
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open, self._texts = None, []
        return events

    def _place(self) -> Fields:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}

    def _event(self, type: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": type, "sequence_number": number, **fields})

    def _complete(self, status: str, usage: Usage) -> Fields:
        """Return the complete response object; its `store` is whether it is kept, which depends on its size, too."""
        response = self._response(status, usage=usage)
        if self._keep is not None:
            response["store"] = True
            response["store"] = self._keep(response)
        return response

    def _response(self, status: str, *, usage: Usage | None = None, error: Fields | None = None) -> Fields:
        return self._head | {
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output,
            "usage": usage and _usage(usage),
        }


def _part(type: str, text: str) -> Fields:
    more: Fields = {"annotations": [], "logprobs": []} if type == "message" else {}
    return {"type": TEXTS[type], "text": text, **more}


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_completion,
    }


def _code(error: ApiError) -> str:
    """Return the code for a failure, among those that a response may have."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if error.status < 500 else "server_error"
