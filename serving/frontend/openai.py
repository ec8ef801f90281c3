"""OpenAI's HTTP vocabulary: requests, errors, and answers as bytes from a template."""

import json
import time
from typing import Any

import msgspec

MAX_TOKENS_LIMIT = 1 << 20


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool = False


class Message(msgspec.Struct):
    """A chat message."""

    role: str
    content: str


class CompletionRequest(msgspec.Struct, kw_only=True):
    """POST /v1/completions."""

    model: str
    prompt: str | list[int]
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """POST /v1/chat/completions."""

    model: str
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class ApiError(Exception):
    """An answer with OpenAI's error body."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> bytes:
        """Encode the error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class Answer:
    """The bytes of one answer, streamed or whole, for chat or text completion."""

    def __init__(self, id: int, model: str, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{id}",
            "object": ("chat.completion.chunk" if is_chat else "text_completion"),
            "created": int(time.time()),
            "model": model,
        }
        start = json.dumps(self._head)[:-1]
        delta = '"delta":{"content":"' if is_chat else '"text":"'
        end = (
            '"},"logprobs":null,"finish_reason":null}]}\n\n'
            if is_chat
            else '","logprobs":null,"finish_reason":null}]}\n\n'
        )
        self._before = f'data: {start},"choices":[{{"index":0,{delta}'.encode()
        self._after = end.encode()

    def first(self) -> bytes:
        """Return what precedes the first token: a chat's role."""
        if not self._is_chat:
            return b""
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return _event(self._head | {"choices": [choice]})

    def tokens(self, texts: list[bytes]) -> bytes:
        """Return one event for each token's text, which is JSON-safe."""
        between = self._after + self._before
        return self._before + between.join(texts) + self._after

    def last(self, reason: str, usage: dict[str, Any] | None) -> bytes:
        """Return the end of a stream: finish reason, usage if asked for, [DONE]."""
        content: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        events = _event(self._head | {"choices": [{"index": 0, **content, "finish_reason": reason}]})
        if usage is not None:
            events += _event(self._head | {"choices": [], "usage": usage})
        return events + b"data: [DONE]\n\n"

    def whole(self, text: str, reason: str, usage: dict[str, Any]) -> bytes:
        """Return an answer that is not streamed."""
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        )
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        head = self._head | {"object": "chat.completion" if self._is_chat else "text_completion"}
        return msgspec.json.encode(head | {"choices": [choice], "usage": usage})


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
