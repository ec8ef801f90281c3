"""The server to measure, and the bodies of the requests to it."""

import ssl
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dynabench.arm import sends_content
from dynabench.live.tls import tls_context
from workloads import Request
from workloads.tokens import TOKENS, as_words, prompt_tokens

EXTRA_FIELDS = {"extra_fields": ["routing", "timing", "num_tokens"]}
SECRET_LENGTH = 8
"""Fewest characters of a word that is hidden: shorter ones are no secrets, and are part of many other words."""


class MeasuredServer(NamedTuple):
    """The server to measure."""

    url: str
    model: str
    prompts: Literal["tokens", "text", "chat"] = "tokens"
    api_key: str = ""
    is_ours: bool = False
    """Whether it is our own frontend: answers report their routing, the times of their stages and how many tokens an event
    has, if not one; and mockers accept the position of their EOS."""
    sends_text: bool = False
    """Whether the engine behind our own frontend sends text, whose pieces are not tokens."""
    splits_answers: bool = False
    """Whether parsers split chats' answers into text, reasoning and calls of tools, whose events are not tokens."""
    tokens: range = TOKENS
    """The tokens that prompts are made of."""
    num_prefill_workers: int = 0
    """The number of workers that only prefill; workers that answer are numbered after them."""
    context: int | None = None
    """The most tokens of one request that the model supports, if known."""
    extra_headers: dict[str, str] | None = None
    """Further headers of requests, by lower-case name."""
    extra_body: dict[str, Any] | None = None
    """Further fields of each body."""
    ca_file: str | None = None
    insecure: bool = False
    """Whether any certificate is accepted."""

    @property
    def headers(self) -> dict[str, str]:
        """Request headers."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"content-type": "application/json", "accept": "text/event-stream"} | key | (self.extra_headers or {})

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How its certificate is checked, None if connections are not encrypted."""
        return tls_context(self.url, ca_file=self.ca_file, insecure=self.insecure)

    def masked(self, said: str) -> str:
        """Return what a server said without the secrets that it repeats."""
        words = [word for value in (self.api_key, *(self.extra_headers or {}).values()) for word in value.split()]
        for word in sorted(words, key=len, reverse=True):
            said = said.replace(word, "***") if len(word) >= SECRET_LENGTH else said
        return said


class Bodies:
    """Makes the bodies of a workload's requests."""

    def __init__(self, target: MeasuredServer, block_size: int, salt: str) -> None:
        self._target = target
        self._block_size = block_size
        self._salt = salt

    def is_chat(self, request: Request) -> bool:
        """Return whether a request goes to the chat endpoint."""
        prompts = self._target.prompts
        return prompts == "chat" or (prompts == "text" and isinstance(request.content, list))

    def has_token_events(self, request: Request) -> bool:
        """Return whether it is known how many tokens each event of an answer has, so that they can be checked against the usage.

        A forced call of a tool is split.
        """
        target = self._target
        if not target.is_ours or target.sends_text:
            return False
        if not self.is_chat(request):
            return True
        return not target.splits_answers and self._fields(request).get("tool_choice") in (None, "none", "auto")

    def of(self, request: Request) -> bytes:
        """Return the body of a request."""
        target, fields = self._target, self._fields(request)
        limit = request.limit_field if request.limit_field in fields else "max_tokens"
        body: dict[str, Any] = {
            **fields,
            "model": request.adapter or target.model,
            limit: request.max_tokens(target.context),
            "stream": True,
            "stream_options": _object((target.extra_body or {}).get("stream_options")) | {"include_usage": True},
        }
        if request.ends == "length":
            body["ignore_eos"] = True
        if self.is_chat(request):
            body["messages"] = self._messages(request)
        else:
            body["prompt"] = self._tokens(request).tolist() if target.prompts == "tokens" else self._text(request)
        if target.is_ours:
            body["nvext"] = _object(body.get("nvext")) | self._extension(request)
        return msgspec.json.encode(body)

    def _fields(self, request: Request) -> dict[str, Any]:
        """Return the fields that the workload and the user add to a request's body."""
        own = request.extra_body if sends_content(request, self._target.prompts) else None
        return {**(own or {}), **(self._target.extra_body or {})}

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


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _salted(text: str, salt: str) -> str:
    """Put the salt before a text, so that nothing after it is cached from another run."""
    return f"{salt} {text}" if salt else text


def _salted_chat(messages: list[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Put the salt before the first message's text."""
    if not salt or not messages or not isinstance(messages[0].get("content"), str):
        return [{"role": "system", "content": salt}, *messages] if salt else messages
    return [messages[0] | {"content": _salted(messages[0]["content"], salt)}, *messages[1:]]
