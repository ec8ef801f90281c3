"""The kinds of requests that have a body: their types and paths; and how a body is read and checked."""

import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from serving.frontend.api.embedding import EmbeddingRequest, RerankRequest, ScoreRequest
from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.request import CountRequest, MessagesRequest
from serving.frontend.api.openai import (
    DP_RANK,
    MAX_CHOICES,
    MAX_KV_BYTES,
    ChatRequest,
    CompletionRequest,
    Message,
    OpenAiRequest,
    TokenId,
    Tools,
)
from serving.frontend.api.responses.request import ResponsesRequest
from serving.model.template import RESERVED

DIGITS = re.compile(r"[0-9]{1,10}")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize, as in vLLM: a text or a conversation."""

    model: str | None = None
    """May be left out if only one model is served."""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    """Default: true for a text; false for a conversation, as its template adds them."""
    add_generation_prompt: bool | None = None
    """Default: true."""
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]


AboutEmbeddings = EmbeddingRequest | ScoreRequest | RerankRequest
LikeChat = ResponsesRequest | CountRequest
"""Requests that ask for what a chat request could ask for."""

AnyRequest = OpenAiRequest | TokenizeRequest | DetokenizeRequest | AboutEmbeddings | LikeChat
KindName = Literal[
    "chat",
    "completion",
    "response",
    "message",
    "message_tokens",
    "embedding",
    "score",
    "rerank",
    "tokenize",
    "detokenize",
]


class RequestKind(NamedTuple):
    """A kind of request that has a body."""

    type: type[AnyRequest]
    path: str
    summary: str
    endpoint: str = ""
    """Label of these requests in metrics; empty if they are not counted."""


KINDS: dict[KindName, RequestKind] = {
    "tokenize": RequestKind(TokenizeRequest, "/tokenize", "Return the tokens of a text or a conversation"),
    "detokenize": RequestKind(DetokenizeRequest, "/detokenize", "Return the text of tokens"),
    "completion": RequestKind(CompletionRequest, "/v1/completions", "Complete a prompt", "completions"),
    "chat": RequestKind(ChatRequest, "/v1/chat/completions", "Answer a conversation", "chat_completions"),
    "response": RequestKind(ResponsesRequest, "/v1/responses", "Answer as OpenAI's Responses API does", "responses"),
    "message": RequestKind(MessagesRequest, "/v1/messages", "Answer as Anthropic's Messages API does", "messages"),
    "message_tokens": RequestKind(
        CountRequest, "/v1/messages/count_tokens", "Count a message's tokens, as Anthropic does"
    ),
    "embedding": RequestKind(EmbeddingRequest, "/v1/embeddings", "Return the embeddings of texts", "embeddings"),
    "score": RequestKind(ScoreRequest, "/v1/score", "Return how similar texts are", "score"),
    "rerank": RequestKind(
        RerankRequest, "/v1/rerank", "Return documents in order of their similarity to a text", "rerank"
    ),
}


LABELS = frozenset({
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier",
    "service_tier", "store", "user",
})  # fmt: skip
WITHOUT_EFFECT: dict[KindName, frozenset[str]] = {
    "completion": LABELS,
    "chat": LABELS | {"verbosity"},
    "response": LABELS - {"prediction", "request_id", "store"} | {"max_tool_calls"},
    "message": frozenset({"cache_control", "metadata"}),
    "message_tokens": frozenset({"cache_control"}),
    "embedding": frozenset({"user"}),
    "score": frozenset({"user"}),
    "rerank": frozenset({"user"}),
}
"""Fields that are accepted, checked, and change nothing; a response repeats some of them."""

OTHER_PART = re.compile(r"^Invalid value ('\w+') - at `\$\.(messages\[\d+\]\.content\[\d+\])\.type`$")
"""What msgspec says of parts of a message that are not text."""


def parse_request(body: bytes | bytearray, type: Any) -> Any:
    """Read a request.

    Raises:
        ApiError: it is not JSON, or not such a request.
    """
    try:
        request = msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        said = OTHER_PART.sub(r"\2 has type \1, which is not supported; expected 'text'", str(error))
        raise ApiError(400, f"the request is not valid: {said}", param=_field_at_fault(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error or 'nested too deeply'}") from error
    if isinstance(request, OpenAiRequest):
        check_request(request)
    elif isinstance(request, TokenizeRequest) and (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "expected either prompt or messages", param="prompt")
    return request


def _field_at_fault(message: str) -> str | None:
    """Return the field that msgspec's validation error is about."""
    field = re.search(r" - at `\$\.(\w+)", message) or re.search(r"missing required field `(\w+)`", message)
    return field[1] if field else None


def check_request(request: OpenAiRequest) -> None:
    """Reject fields that do not fit together, or that no engine here supports."""
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if isinstance(request, CompletionRequest):
        _check_completion(request)
    elif isinstance(request, ChatRequest):
        _check_chat(request)
    request.max_tokens = request.max_completion_tokens or request.max_tokens
    limit = request.max_tokens
    if limit is not None and (request.min_tokens or 0) > limit:
        raise ApiError(
            400, f"min_tokens ({request.min_tokens}) is larger than max_tokens ({limit})", param="min_tokens"
        )
    if request.kv_transfer_params is not None:
        request.kv_transfer_params = _kv_transfer(request.kv_transfer_params)
    if request.logit_bias and not all(map(DIGITS.fullmatch, request.logit_bias)):
        raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias")
    if request.nvext is not None:
        for note in request.nvext.annotations or ():
            if note.startswith(DP_RANK) and not DIGITS.fullmatch(note, len(DP_RANK)):
                raise ApiError(400, f"{DP_RANK}N needs the number of a data-parallel rank, not {note!r}", param="nvext")


def _kv_transfer(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return params that ask for a part of the work; as in vLLM, those that do not are of no account.

    Raises:
        ApiError: they ask for both parts, or are too large.
    """
    parts = [params.get(name) is True for name in ("do_remote_decode", "do_remote_prefill")]
    if all(parts):
        raise ApiError(
            400,
            "kv_transfer_params: expected do_remote_decode: true, or do_remote_prefill: true, and not both",
            param="kv_transfer_params",
        )
    if len(msgspec.json.encode(params)) > MAX_KV_BYTES:
        raise ApiError(400, f"kv_transfer_params may have at most {MAX_KV_BYTES:,} bytes", param="kv_transfer_params")
    return params if any(parts) else None


def _check_completion(request: CompletionRequest) -> None:
    if isinstance(request.prompt, list) and len(set(map(type, request.prompt))) > 1:
        raise ApiError(400, "prompt must be a text, token ids, or a list of either", param="prompt")
    prompts = request.prompts()
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt must not be empty", param="prompt")
    choices = len(prompts) * (request.n or 1)
    if choices > MAX_CHOICES:
        raise ApiError(
            400, f"{len(prompts)} prompts times n make {choices} answers; the limit is {MAX_CHOICES}", param="n"
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of other than n is not supported", param="best_of")


def _check_chat(request: ChatRequest) -> None:
    for message in request.messages:
        if message.role in ("user", "system") and message.content in (None, []):
            raise ApiError(400, f"a {message.role} message needs content", param="messages")
    if reserved := RESERVED.intersection(request.chat_template_kwargs or {}):
        problem = f"chat_template_kwargs must not have {min(reserved)}, which is a field of the request"
        raise ApiError(400, problem, param="chat_template_kwargs")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
