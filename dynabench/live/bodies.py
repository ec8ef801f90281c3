"""The server to measure, and the bodies of the requests to it."""

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from workloads import Request
from workloads.tokens import TOKENS, as_words, prompt_tokens

EXTRA_FIELDS = {"extra_fields": ["routing", "timing"]}


class Target(NamedTuple):
    """The server to measure."""

    url: str
    model: str
    prompts: Literal["tokens", "text", "chat"] = "tokens"
    api_key: str = ""
    is_ours: bool = False
    """Whether every token arrives in its own event, so that events can be checked against the usage."""
    tokens: range = TOKENS
    """The tokens that prompts are made of."""
    has_nvext: bool = False
    """Whether answers report their routing and the times of their stages. If so, the server's mockers also accept the
    position of their EOS."""
    num_prefill_workers: int = 0
    """The number of workers that only prefill; workers that answer are numbered after them."""
    context: int | None = None
    """The most tokens of one request that the model supports, if known."""

    @property
    def headers(self) -> dict[str, str]:
        """Request headers."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json", "accept": "text/event-stream"} | key


class Bodies:
    """Makes the bodies of a workload's requests."""

    def __init__(self, target: Target, block_size: int, salt: str) -> None:
        self._target = target
        self._block_size = block_size
        self._salt = salt

    def is_chat(self, request: Request) -> bool:
        """Return whether a request goes to the chat endpoint."""
        prompts = self._target.prompts
        return prompts == "chat" or (prompts == "text" and isinstance(request.content, list))

    def of(self, request: Request) -> bytes:
        """Return the body of a request."""
        target = self._target
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": request.max_tokens(target.context),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ends == "length":
            body["ignore_eos"] = True
        if self.is_chat(request):
            body["messages"] = self._messages(request)
        else:
            body["prompt"] = self._tokens(request).tolist() if target.prompts == "tokens" else self._text(request)
        if target.has_nvext:
            body["nvext"] = self._extension(request)
        return msgspec.json.encode(body)

    def _extension(self, request: Request) -> dict[str, Any]:
        """Return our own frontend's extra fields: the wanted reports, the session, and where the mocker's EOS is."""
        session = {"session_id": request.session} if request.session else {}
        end = {"stop_after": request.output_length} if request.ends == "stop" else {}
        return EXTRA_FIELDS | session | end

    def _messages(self, request: Request) -> list[dict[str, Any]]:
        if isinstance(request.content, list):
            return _salted_chat(request.content, self._salt)
        return [{"role": "user", "content": self._text(request)}]

    def _text(self, request: Request) -> str:
        """Return the workload's text, or as many words as the prompt has tokens."""
        return (
            _salted(request.content, self._salt)
            if isinstance(request.content, str)
            else as_words(self._tokens(request))
        )

    def _tokens(self, request: Request) -> np.ndarray:
        return prompt_tokens(request, self._block_size, salt=self._salt, among=self._target.tokens)


def _salted(text: str, salt: str) -> str:
    """Put the salt before a text, so that nothing after it is cached from another run."""
    return f"{salt} {text}" if salt else text


def _salted_chat(messages: list[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Put the salt before the first message's text."""
    if not salt or not messages or not isinstance(messages[0].get("content"), str):
        return [{"role": "system", "content": salt}, *messages] if salt else messages
    return [messages[0] | {"content": _salted(messages[0]["content"], salt)}, *messages[1:]]
