"""Answers as bytes: streamed events from a template, whole answers as one object."""

import time
from typing import Any

import msgspec

_encode = msgspec.json.encode


class AnswerFormat:
    """What all events of one answer share."""

    def __init__(self, id: str, model: str, *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the event with the usage."""
        return event(self.head | {"choices": [], "usage": usage})

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], nvext: dict[str, Any] | None) -> bytes:
        """Return an answer that is not streamed."""
        answer = self.head | {"choices": choices, "usage": usage}
        if self.is_chat:
            answer["object"] = "chat.completion"
        return _encode(answer | {"nvext": nvext} if nvext else answer)

    def choice(self, index: int, text: str, reason: str | None, logprobs: Any) -> dict[str, Any]:
        """Return one choice of a whole answer."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        )
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


class ChoiceFormat:
    """The events of one choice; nothing is encoded for a token but its text."""

    def __init__(self, answer: AnswerFormat, index: int) -> None:
        self._answer = answer
        self._index = index
        start = _encode(answer.head)[:-1].decode()
        delta = '"delta":{"content":"' if answer.is_chat else '"text":"'
        self._before = f'data: {start},"choices":[{{"index":{index},{delta}'.encode()
        self._quote = b'"}' if answer.is_chat else b'"'
        self._after = self._quote + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._between = self._after + self._before

    def first(self) -> bytes:
        """Return what precedes the first token: a chat's role."""
        if not self._answer.is_chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return event(self._answer.head | {"choices": [{"index": self._index, "delta": delta, "finish_reason": None}]})

    def tokens(self, texts: list[bytes]) -> bytes:
        """Return an event for each token's text, which is escaped for JSON."""
        return self._before + self._between.join(texts) + self._after

    def token(self, text: bytes, logprobs: Any, usage: dict[str, Any] | None = None) -> bytes:
        """Return the event of a token with its log-probabilities, None if there are none, and the usage so far."""
        end = b',"logprobs":' + _encode(logprobs) + b',"finish_reason":null}]'
        if usage is not None:
            end += b',"usage":' + _encode(usage)
        return self._before + text + self._quote + end + b"}\n\n"

    def last(self, reason: str, nvext: dict[str, Any] | None) -> bytes:
        """Return the event with the finish reason."""
        content: dict[str, Any] = {"delta": {}} if self._answer.is_chat else {"text": ""}
        value = self._answer.head | {
            "choices": [{"index": self._index, **content, "logprobs": None, "finish_reason": reason}]
        }
        return event(value | {"nvext": nvext} if nvext else value)


DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def annotation(name: str, value: Any) -> bytes:
    """Return an annotation as Dynamo sends it: a named event whose value is a comment."""
    return b"event: " + name.encode() + b"\n: " + _encode(value) + b"\n\n"
