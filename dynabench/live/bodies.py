"""The server to measure, and the bodies of the requests to it."""

import ssl
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dynabench.apis import Api, Prompts, Way, api_headers, object_of, way_of
from dynabench.images import ImageSize, data_url
from dynabench.live.tls import tls_context
from dynabench.live.translation import message_fields, message_prompt, response_fields, response_input
from dynabench.proxy import Proxy
from workloads import Request
from workloads.request import LIMIT
from workloads.texts import flatten
from workloads.tokens import TOKENS, as_words, prompt_tokens

EXTRA_FIELDS = {"extra_fields": ["routing", "timing", "num_tokens"]}
SECRET_LENGTH = 8
"""Fewest characters of a word that is hidden: shorter ones are no secrets, and are part of many other words."""

QUERY_WORDS = 32
DOCUMENT_WORDS = 128
"""Most words of a query, and of each document to be ranked."""
TRANSLATED = {"responses": response_fields, "messages": message_fields}
"""What makes the fields of a chat's body those of another API."""


class MeasuredServer(NamedTuple):
    """The server to measure."""

    url: str
    model: str
    prompts: Prompts | None = None
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
    proxy: str | None = None
    """The HTTP proxy on the way to it."""
    repeats_answers: bool = False
    """Whether later turns of a session repeat what it answered, not the workload's answers."""
    image_size: ImageSize | None = None
    """The size of the images that stand for a workload's media (None: it has none)."""
    is_streamed: bool = True
    """Whether it is asked for answers token by token."""
    api: Api | None = None
    """Where requests are sent (None: as `prompts` implies)."""

    @property
    def way(self) -> Way:
        """How prompts are sent."""
        return way_of(self.prompts, self.api)

    @property
    def headers(self) -> dict[str, str]:
        """Request headers of OpenAI's APIs."""
        return self.headers_of("chat")

    def headers_of(self, api: Api) -> dict[str, str]:
        """Return request headers."""
        whole = {} if self.is_streamed else {"accept": "application/json"}
        return (
            {"content-type": "application/json"} | api_headers(api, self.api_key) | whole | (self.extra_headers or {})
        )

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How its certificate is checked, None if connections are not encrypted."""
        return tls_context(self.url, ca_file=self.ca_file, insecure=self.insecure)

    @property
    def through(self) -> Proxy | None:
        """The proxy on the way to it."""
        return Proxy.at(self.proxy) if self.proxy is not None else None

    def masked(self, said: str) -> str:
        """Return what a server said without the secrets that it repeats."""
        secrets = [self.api_key, *(self.extra_headers or {}).values()]
        if self.through is not None:
            secrets.append(self.through.authorization)
        words = [word for value in secrets for word in value.split()]
        for word in sorted(words, key=len, reverse=True):
            said = said.replace(word, "***") if len(word) >= SECRET_LENGTH else said
        return said


class Bodies:
    """Makes the bodies of a workload's requests."""

    def __init__(self, target: MeasuredServer, block_size: int, salt: str) -> None:
        self._target = target
        self._way = target.way
        self._block_size = block_size
        self._salt = salt

    def api_of(self, request: Request) -> Api:
        """Return the API that a request is sent to."""
        return self._way.api_of(request)

    def has_token_events(self, request: Request) -> bool:
        """Return whether it is known how many tokens each event of an answer has, so that they can be checked against the usage.

        A forced call of a tool is split. Only OpenAI's older APIs have room for that number.
        """
        target = self._target
        if not target.is_ours or target.sends_text:
            return False
        match self.api_of(request):
            case "completions":
                return True
            case "chat":
                choice = self._fields(request, "chat").get("tool_choice")
                return not target.splits_answers and choice in (None, "none", "auto")
        return False

    def of(self, request: Request) -> bytes:
        """Return the body of a request."""
        match api := self.api_of(request):
            case "responses":
                body = self._response(request)
            case "messages":
                body = self._message(request)
            case "embeddings":
                body = self._whole(request) | {"input": self._prompt(request)}
            case "rerank":
                body = self._whole(request) | _ranking(self._plain_text(request))
            case _:
                body = self._completion(request, api)
        return msgspec.json.encode(body)

    def _completion(self, request: Request, api: Api) -> dict[str, Any]:
        """Return the body of a completion or a chat completion."""
        target, fields = self._target, self._fields(request, api)
        limit = request.limit_field if request.limit_field in fields else "max_tokens"
        body: dict[str, Any] = {
            **fields,
            "model": request.adapter or target.model,
            limit: request.max_tokens(target.context),
            "stream": target.is_streamed,
        }
        if target.is_streamed:
            body["stream_options"] = object_of((target.extra_body or {}).get("stream_options")) | {
                "include_usage": True
            }
        if request.ends == "length":
            body["ignore_eos"] = True
        if api == "chat":
            body["messages"] = self._messages(request)
        else:
            body["prompt"] = self._prompt(request)
        if target.is_ours:
            body["nvext"] = object_of(body.get("nvext")) | self._extension(request)
        return body

    def _response(self, request: Request) -> dict[str, Any]:
        """Return the body of a response, which the server need not keep. This API cannot ignore an EOS."""
        is_plain = not isinstance(request.content, list) and not request.media
        return {
            "store": False,
            **self._fields(request, "responses"),
            "model": request.adapter or self._target.model,
            "max_output_tokens": request.max_tokens(self._target.context),
            "stream": self._target.is_streamed,
            "input": self._text(request) if is_plain else response_input(self._messages(request)),
        }

    def _message(self, request: Request) -> dict[str, Any]:
        """Return the body of a message. This API cannot ignore an EOS."""
        return {
            **self._fields(request, "messages"),
            "model": request.adapter or self._target.model,
            "max_tokens": request.max_tokens(self._target.context),
            "stream": self._target.is_streamed,
            **message_prompt(self._messages(request)),
        }

    def _whole(self, request: Request) -> dict[str, Any]:
        """Return the fields of a request whose answer is not generated; a chat's fields mean nothing there."""
        return {**(self._target.extra_body or {}), "model": request.adapter or self._target.model}

    def _fields(self, request: Request, api: Api) -> dict[str, Any]:
        """Return the fields that the workload and the user add to a request's body; the user knows the API."""
        own = (request.extra_body or {}) if self._way.sends_fields(request) else {}
        if api in TRANSLATED and own:
            own = TRANSLATED[api]({name: value for name, value in own.items() if name != LIMIT})
        return {**own, **(self._target.extra_body or {})}

    def _extension(self, request: Request) -> dict[str, Any]:
        """Return our own frontend's extra fields: the wanted reports, the session, and where the mocker's EOS is."""
        session = {"session_id": request.session} if request.session else {}
        end = {"stop_after": request.output_length} if request.ends == "stop" else {}
        return EXTRA_FIELDS | session | end

    def _messages(self, request: Request) -> list[dict[str, Any]]:
        if isinstance(request.content, list):
            return _salted_chat(request.content, self._salt)
        if request.media and (size := self._target.image_size) is not None:
            return [{"role": "user", "content": self._with_images(request, size)}]
        return [{"role": "user", "content": self._text(request)}]

    def _with_images(self, request: Request, size: ImageSize) -> list[dict[str, Any]]:
        """Return words and images in the order of the prompt; equal ids are equal images within a run."""
        tokens, place, parts = self.tokens(request), 0, []
        for item in request.media:
            parts += _text_part(tokens[place : item.offset])
            parts.append({"type": "image_url", "image_url": {"url": data_url(f"{self._salt}:{item.id}", size)}})
            place = item.offset + item.tokens
        return parts + _text_part(tokens[place:])

    def _text(self, request: Request) -> str:
        """Return the workload's text, or as many words as the prompt has tokens."""
        return (
            _salted(request.content, self._salt) if isinstance(request.content, str) else as_words(self.tokens(request))
        )

    def _prompt(self, request: Request) -> str | list[int]:
        """Return the prompt of an API that takes token ids, or text."""
        return self.tokens(request).tolist() if self._way.prompts == "tokens" else self._plain_text(request)

    def _plain_text(self, request: Request) -> str:
        """Return the prompt as one text, also that of a chat."""
        if isinstance(request.content, list) and self._way.sends_content(request):
            return flatten(_salted_chat(request.content, self._salt))
        return self._text(request)

    def tokens(self, request: Request) -> np.ndarray:
        """Return the tokens of a prompt without text."""
        return prompt_tokens(request, self._block_size, salt=self._salt, among=self._target.tokens)


def _text_part(tokens: np.ndarray) -> list[dict[str, Any]]:
    return [{"type": "text", "text": as_words(tokens)}] if len(tokens) else []


def _ranking(text: str) -> dict[str, Any]:
    """Return a query and documents made of a text's words: the query is its beginning, but no more than half of it."""
    words = text.split()
    cut = max(min(QUERY_WORDS, len(words) // 2), 1)
    rest = words[cut:] or words
    documents = [" ".join(rest[start : start + DOCUMENT_WORDS]) for start in range(0, len(rest), DOCUMENT_WORDS)]
    return {"query": " ".join(words[:cut]), "documents": documents}


def _salted(text: str, salt: str) -> str:
    """Put the salt before a text, so that nothing after it is cached from another run."""
    return f"{salt} {text}" if salt else text


def _salted_chat(messages: list[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    """Put the salt before the first message's text."""
    if not salt or not messages or not isinstance(messages[0].get("content"), str):
        return [{"role": "system", "content": salt}, *messages] if salt else messages
    return [messages[0] | {"content": _salted(messages[0]["content"], salt)}, *messages[1:]]
