"""The APIs that the load generator speaks, and what an address says about the one to use."""

from typing import Any, Literal, NamedTuple, get_args
from urllib.parse import urlsplit

from serving.runtime.config import masked
from workloads import Request

Api = Literal["completions", "chat", "responses", "messages", "embeddings", "rerank"]
"""OpenAI's completions, chat completions, responses and embeddings, Anthropic's messages, and Cohere's rerank."""
Prompts = Literal["tokens", "text", "chat"]
PATHS: dict[Api, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
"""Where requests of each API go, below the address of a server."""
VERSION = "/v1"
TAKE_TOKENS = ("completions", "embeddings")
"""APIs that take token ids."""
HAVE_TURNS = ("chat", "responses", "messages")
"""APIs whose prompts are messages of both sides."""
WHOLE = ("embeddings", "rerank")
"""APIs whose answers are not streamed and have no tokens."""


class Endpoint(NamedTuple):
    """What an address of a server means."""

    base: str
    """The address below which /v1 is."""
    api: Api | None
    """The API that its path names, if it names one."""


def endpoint_of(url: str) -> Endpoint:
    """Read an address with or without trailing parts: /v1, or the path of an API such as /v1/chat/completions.

    Raises:
        ValueError: it is no address of a server, or has a path that requests cannot be sent below.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url must begin with http:// or https://, not {url!r}")
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ValueError(
            f"url {masked(url)} has parts after its path, which are not sent; expected http://host:port/v1"
        )
    path = parts.path.rstrip("/")
    for api in get_args(Api):
        if path.endswith(PATHS[api]):
            return Endpoint(_with_path(url, path.removesuffix(PATHS[api])), api)
    if path.endswith(tuple(known.removeprefix(VERSION) for known in PATHS.values())):
        raise ValueError(f"url {masked(url)} names an API without {VERSION} before it; expected one of {_paths()}")
    return Endpoint(_with_path(url, path.removesuffix(VERSION)), None)


def _with_path(url: str, path: str) -> str:
    return urlsplit(url)._replace(path=path.rstrip("/")).geturl()


def _paths() -> str:
    return ", ".join(PATHS.values())


class Way(NamedTuple):
    """How prompts are sent: what they are made of, and to which API."""

    prompts: Literal["tokens", "text"] = "tokens"
    api: Api | None = None
    """None: chats as chats, and other texts to completions."""

    def api_of(self, request: Request) -> Api:
        """Return the API that a request is sent to."""
        if self.api is not None:
            return self.api
        return "chat" if self.prompts == "text" and isinstance(request.content, list) else "completions"

    def sends_content(self, request: Request) -> bool:
        """Return whether a request's own text is sent."""
        if request.content is None or self.prompts == "tokens":
            return False
        return self.api != "completions" or isinstance(request.content, str)

    def sends_fields(self, request: Request) -> bool:
        """Return whether the fields of a request's body are sent: with its text, to models that generate."""
        return self.api not in WHOLE and self.sends_content(request)

    def __str__(self) -> str:
        """Describe it by its settings."""
        return f"prompts={self.prompts}" + (f", api={self.api}" if self.api else "")


def way_of(prompts: Prompts | None, api: Api | None) -> Way:
    """Return how prompts are sent: `prompts` says what they are made of, `api` where they go; each has a default.

    Raises:
        ValueError: the two exclude each other.
    """
    if prompts == "chat":
        if api not in (None, "chat"):
            raise ValueError(f"prompts is 'chat', but api is {api!r}; use --prompts text, or leave it out")
        return Way("text", "chat")
    if prompts == "tokens" and api is not None and api not in TAKE_TOKENS:
        raise ValueError(
            f"prompts is 'tokens', but api is {api!r}: only {' and '.join(TAKE_TOKENS)} take token ids; use --prompts text"
        )
    if prompts is None:
        prompts = "tokens" if api in (None, "completions") else "text"
    return Way(prompts, api)


def one_api(api: Api | None, of_url: Api | None, url: str) -> Api | None:
    """Return the API that a setting or the path of an address names.

    Raises:
        ValueError: they name different ones.
    """
    if api is not None and of_url is not None and api != of_url:
        raise ValueError(f"api is {api!r}, but the url {masked(url)} is that of {of_url!r}; leave one of them out")
    return api or of_url


def api_headers(api: Api, api_key: str) -> dict[str, str]:
    """Return the headers of an API: its version, and the key where its servers look for it."""
    key = {"authorization": f"Bearer {api_key}"} if api_key else {}
    key |= {"accept": "application/json" if api in WHOLE else "text/event-stream"}
    if api != "messages":
        return key
    # Anthropic looks for the key in x-api-key, vLLM and SGLang in authorization.
    return {"anthropic-version": "2023-06-01"} | ({"x-api-key": api_key} if api_key else {}) | key


def object_of(value: Any) -> dict[str, Any]:
    """Return a value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}
