"""Answers as bytes: server-sent events built from templates, and whole answers as one object."""

from typing import Any

import msgspec

from serving.frontend.api.errors import ApiError
from serving.runtime.world import world

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the last event of a stream that has failed."""
    return b"data: " + error.body() + b"\n\n"


def annotation(name: str, value: Any) -> bytes:
    """Return an annotation as Dynamo sends it: a named event whose value is a comment."""
    return b"event: " + name.encode() + b"\n: " + _encode(value) + b"\n\n"


def escape(text: str) -> bytes:
    """Return a text escaped for a JSON string."""
    return _encode(text)[1:-1]


def unescape(text: bytes) -> str:
    """Return the text of an escaped JSON string."""
    value: str = msgspec.json.decode(b'"' + text + b'"')
    return value


def usage(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object; the tokens of the reasoning are named if they are known."""
    found: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
    return (
        found if num_reasoning is None else found | {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    )


class CompletionFormat:
    """What all events of one answer share."""

    def __init__(self, id: str, model: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(world().wall_s()),
            "model": model,
        }

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the event with the usage."""
        return event(self.head | {"choices": [], "usage": usage})

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], **extras: dict[str, Any] | None) -> bytes:
        """Return an answer that is not streamed, with the extras that are not empty."""
        answer = self.head | {"choices": choices, "usage": usage}
        if self.is_chat:
            answer["object"] = "chat.completion"
        return _encode(answer | {name: value for name, value in extras.items() if value})

    def choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        if self.is_chat:
            return self.turn(index, {"role": "assistant", "content": text}, reason, logprobs)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def turn(self, index: int, message: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
        """Return one choice of a whole answer to a conversation."""
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


class ChoiceFormat:
    """The events of one choice, each with the usage so far if given; for a token, only its text is encoded.

    data: {"id":...,"choices":[{"index":0,"delta":{"content":"  once  "},"logprobs":null,"finish_reason":null}]}
    ------------------------- before -------------------------       ----------------- after ------------------
    """

    def __init__(self, completion: CompletionFormat, index: int) -> None:
        self._completion = completion
        self._index = index
        start = _encode(completion.head)[:-1].decode()
        delta = '"delta":{"content":"' if completion.is_chat else '"text":"'
        self._before = f'data: {start},"choices":[{{"index":{index},{delta}'.encode()
        self._quote = b'"}' if completion.is_chat else b'"'
        self._after = self._quote + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._between = self._after + self._before

    def first(self, usage: dict[str, Any] | None = None) -> bytes:
        """Return what comes before the first token: a chat's role."""
        if not self._completion.is_chat:
            return b""
        return self._event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, usage=usage)

    def tokens(self, texts: list[bytes]) -> bytes:
        """Return an event for each token; the texts are already escaped for JSON."""
        return self._before + self._between.join(texts) + self._after

    def token(self, text: bytes, logprobs: Any, **extras: dict[str, Any] | None) -> bytes:
        """Return the event of the tokens of a step, with their log-probabilities (None: there are none) and extras."""
        end = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":null}]'
        for name, value in extras.items():
            if value is not None:
                end += b',"' + name.encode() + b'":' + _encode(value)
        return self._before + text + self._quote + end + b"}\n\n"

    def delta(self, delta: dict[str, Any], logprobs: Any, usage: dict[str, Any] | None = None) -> bytes:
        """Return the event of a part of a chat's answer, with the log-probabilities of its tokens."""
        return self._event({"delta": delta, "logprobs": logprobs, "finish_reason": None}, usage=usage)

    def last(self, reason: str, logprobs: Any = None, **extras: dict[str, Any] | None) -> bytes:
        """Return the event with the finish reason and the extras that are not empty."""
        content: dict[str, Any] = {"delta": {}} if self._completion.is_chat else {"text": ""}
        return self._event({**content, "logprobs": logprobs, "finish_reason": reason}, **extras)

    def _event(self, choice: dict[str, Any], **extras: dict[str, Any] | None) -> bytes:
        fields = self._completion.head | {"choices": [{"index": self._index, **choice}]}
        return event(fields | {name: value for name, value in extras.items() if value})
