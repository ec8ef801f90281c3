"""From an OpenAI request to prompts in token ids, checked and hashed. Pure: it runs here or in a model's preparer."""

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import (
    COMPLETION_TOKENS,
    KINDS,
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    NvExt,
    Request,
    TokenizeRequest,
)
from serving.frontend.api.unsupported import check_fields
from serving.model.card import ModelCard, ModelType
from serving.model.context import refusal
from serving.model.files import ModelFiles
from serving.model.template import PLAIN, ChatTemplate, TemplateError, source
from serving.model.tokenizer import Ids, load
from serving.router.hashing import block_hashes, sequence_hashes

MAX_WORK = 1 << 20
"""Tokens that one request may ask for in all its choices together."""

MAX_ECHO = 1 << 21
"""Characters of prompts that one answer may repeat in all its choices together."""

MAX_LOGPROBS = 1 << 16
"""Log-probabilities of prompts that one request may ask for."""

MAX_DEPTH = 64
"""Nested levels of lists and objects in a request that is handed through."""

QUICK_TOKENS = 16_384
"""This many token ids are checked and hashed in about half a millisecond."""


class TextModel:
    """Turns requests for a model into token ids."""

    def __init__(self, card: ModelCard, files: ModelFiles, *, is_preparer: bool = False) -> None:
        """Load the tokenizer and the template.

        Args:
            card: the card that the model's workers registered.
            files: the model's files.
            is_preparer: whether the model's own template may run in this process.

        Raises:
            ModelError: one of them cannot be used.
        """
        self.card = card
        self.files = files
        self.tokenizer = load(files, encodes=True)
        self.template = ChatTemplate(files) if is_preparer or source(files) == PLAIN else None
        self.vocab_size = files.vocab_size
        """How many tokens the model has, if its files say so: other tokens may crash engines."""


class Prompt:
    """A prompt in token ids, hashed once."""

    def __init__(self, tokens: Ids, block_size: int, hashes: list[int] | None = None) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.hashes = sequence_hashes(block_hashes(tokens, block_size)) if hashes is None else hashes
        """Sequence hashes of its full blocks."""


class Prepared(msgspec.Struct, kw_only=True, tag=True):
    """A request in token ids, and what else its answer needs from the request."""

    options: Request
    is_chat: bool
    prompts: list[Prompt]
    limits: list[int]
    """Tokens that each prompt's answer may have."""
    has_own_limit: bool
    """Whether the limits are the request's own, rather than the room that the context leaves."""
    echoes: list[str]
    """The text that comes before each prompt's answer."""
    num_logprobs: int | None
    """Number of alternatives wanted for each token; None if no log-probabilities are wanted."""
    num_prompt_logprobs: int | None
    """The same for the prompt's tokens."""
    formatted: str
    """The first prompt as text, if it is text and was requested."""

    @property
    def endpoint(self) -> str:
        """The label under which it is counted."""
        return KINDS["chat" if self.is_chat else "completion"].endpoint

    @property
    def extension(self) -> NvExt:
        """NVIDIA's extensions."""
        return self.options.nvext or NvExt()


class HandedThrough(msgspec.Struct, kw_only=True, tag=True):
    """A request that the engine gets as it is."""

    model: str
    stream: bool
    request: msgspec.Raw
    """In msgpack."""


class Tokenized(msgspec.Struct, kw_only=True, tag=True):
    """The answer to a request for tokens."""

    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, tag=True):
    """The answer to a request for a text."""

    text: str


Preprocessed = Prepared | HandedThrough | Tokenized | Detokenized


def is_quick(request: AnyRequest, model: TextModel) -> bool:
    """Return whether an event loop can wait for a request to be prepared: none of the model's code, little to encode."""
    if isinstance(request, DetokenizeRequest):
        return len(request.tokens) <= QUICK_TOKENS
    if model.card.model_type is not ModelType.Backend and isinstance(request, Request):
        return True
    if isinstance(request, ChatRequest) or (isinstance(request, TokenizeRequest) and request.messages is not None):
        if model.template is None and not _is_raw(request):
            return False
        return _num_characters(request) <= model.tokenizer.num_quick
    if isinstance(request, TokenizeRequest):
        return len(request.prompt or "") <= model.tokenizer.num_quick
    assert isinstance(request, CompletionRequest)
    prompts = request.prompts()
    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    num_tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return num_characters <= model.tokenizer.num_quick and num_tokens <= QUICK_TOKENS


def _num_characters(request: ChatRequest | TokenizeRequest) -> int:
    """Return about how much text a conversation is, with everything else that its template may write."""
    messages = request.messages or ()
    more: list[Any] = [request.tools, *(message.tool_calls for message in messages)]
    if isinstance(request, ChatRequest):
        more += [request.documents, request.chat_template_kwargs]
    others = sum(len(msgspec.json.encode(each)) for each in more if each)
    return sum(len(message.text) + len(message.thought) for message in messages) + others


def preprocess(request: AnyRequest, body: bytes | bytearray, model: TextModel) -> Preprocessed:
    """Turn a request into the form for its model's engines, or into tokens or text.

    Raises:
        ApiError: it cannot be served.
    """
    if isinstance(request, TokenizeRequest):
        return tokenize(request, model)
    if isinstance(request, DetokenizeRequest):
        _check_tokens(request.tokens, model, "tokens")
        return Detokenized(model.tokenizer.decode(request.tokens))
    takes_whole, name = (
        (ModelType.Chat, "chat completions")
        if isinstance(request, ChatRequest)
        else (ModelType.Completion, "completions")
    )
    if model.card.model_type is takes_whole:
        return hand_through(body)
    if model.card.model_type is not ModelType.Backend:
        raise ApiError(404, f"model {request.model!r} does not offer {name}", code="model_not_found", param="model")
    check_fields(body, request)
    return prepare(request, model)


def prepare(request: Request, model: TextModel) -> Prepared:
    """Turn a request into token ids; a request over its limits is rejected before hashing.

    Raises:
        ApiError: it cannot be served.
    """
    _check_tokens(map(int, request.logit_bias or ()), model, "logit_bias")
    if isinstance(request, ChatRequest):
        encoded = [_encode_chat(request, model)]
    else:
        assert isinstance(request, CompletionRequest)
        encoded = [_encode_prompt(prompt, request, model) for prompt in request.prompts()]
    has_own_limit = request.max_tokens is not None or isinstance(request, CompletionRequest)
    echoes = [each.text if isinstance(request, CompletionRequest) and request.echo else "" for each in encoded]
    _check_totals(request, encoded, sum(map(len, echoes)), has_own_limit=has_own_limit)
    wants_formatted = request.nvext is not None and "formatted_prompt" in (request.nvext.annotations or ())
    return Prepared(
        options=request,
        is_chat=isinstance(request, ChatRequest),
        prompts=[Prompt(each.tokens, model.card.kv_cache_block_size) for each in encoded],
        limits=[each.limit for each in encoded],
        has_own_limit=has_own_limit,
        echoes=echoes,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        formatted=encoded[0].text if wants_formatted else "",
    )


def tokenize(request: TokenizeRequest, model: TextModel) -> Tokenized:
    """Return the tokens of a text or a conversation.

    Raises:
        ApiError: the template rejects the conversation, or the text is far longer than the context.
    """
    is_chat = request.messages is not None
    special = not is_chat if request.add_special_tokens is None else request.add_special_tokens
    text = request.prompt or ""
    if request.messages is not None:
        text = _render(
            request.messages, request.tools, model, add_generation_prompt=request.add_generation_prompt is not False
        )
    tokens = _encode(text, model, "messages" if is_chat else "prompt", special=special).tolist()
    return Tokenized(
        tokens=tokens, token_strs=list(map(model.tokenizer.text_of, tokens)) if request.return_token_strs else None
    )


def hand_through(body: bytes | bytearray) -> HandedThrough:
    """Turn a request's body into the form for engines that take whole requests.

    Raises:
        ApiError: it cannot be sent.
    """
    request: dict[str, Any] = msgspec.json.decode(body)
    _check_plain(request)
    encoded = msgspec.Raw(msgspec.msgpack.encode(request))
    return HandedThrough(model=request["model"], stream=bool(request.get("stream")), request=encoded)


class _Encoded(NamedTuple):
    """A prompt that fits."""

    text: str
    """For a prompt of token ids, only if it is to be echoed."""
    tokens: Ids
    limit: int
    """Tokens that may be generated."""


def _encode_chat(request: ChatRequest, model: TextModel) -> _Encoded:
    is_raw = _is_raw(request)
    tools = request.tools if request.tool_choice != "none" else None
    more = {
        "documents": request.documents,
        "add_generation_prompt": request.add_generation_prompt is not False,
        "variables": request.template_variables,
    }
    text = _joined(request.messages) if is_raw else _render(request.messages, tools, model, **more)
    tokens = _encode(text, model, "messages", special=is_raw)
    return _Encoded(text, tokens, _limit(request, len(tokens), model, "messages"))


def _encode_prompt(prompt: str | list[int], request: CompletionRequest, model: TextModel) -> _Encoded:
    if isinstance(prompt, str):
        tokens = _encode(prompt, model, "prompt", special=True)
        return _Encoded(prompt, tokens, _limit(request, len(tokens), model, "prompt"))
    limit = _limit(request, len(prompt), model, "prompt")
    _check_tokens(prompt, model, "prompt")
    tokens = np.frombuffer(array("I", prompt), np.uint32)  # three times as fast as np.array
    return _Encoded(model.tokenizer.decode(prompt) if request.echo else "", tokens, limit)


def _check_totals(request: Request, encoded: list[_Encoded], num_echoed: int, *, has_own_limit: bool) -> None:
    """Reject a request whose choices together would be too much."""
    num_choices = request.n or 1
    if request.num_prompt_logprobs is not None:
        num_values = sum(len(each.tokens) for each in encoded) * (1 + request.num_prompt_logprobs) * num_choices
        if num_values > MAX_LOGPROBS:
            message = f"echo with logprobs would return {num_values} log-probabilities; the limit is {MAX_LOGPROBS}"
            raise ApiError(400, message, param="logprobs")
    if num_echoed * num_choices > MAX_ECHO:
        raise ApiError(400, f"all choices together may echo at most {MAX_ECHO} characters", param="echo")
    if has_own_limit and sum(each.limit for each in encoded) * num_choices > MAX_WORK:
        raise ApiError(400, f"all choices together may have at most {MAX_WORK} tokens", param="n")


def _is_raw(request: ChatRequest | TokenizeRequest) -> bool:
    """Return whether the messages' text is the prompt, without the template."""
    return isinstance(request, ChatRequest) and bool(request.nvext is not None and request.nvext.use_raw_prompt)


def _joined(messages: list[Message]) -> str:
    return "".join(message.text for message in messages)


def _render(messages: list[Message], tools: list[dict[str, Any]] | None, model: TextModel, **more: Any) -> str:
    assert model.template is not None
    plain = [message.for_template() for message in messages]
    try:
        return model.template.render(plain, tools, **more)
    except TemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


def _encode(text: str, model: TextModel, param: str, *, special: bool) -> Ids:
    """Return a text's tokens, unless it is too long to fit: a text of megabytes need not be encoded to know that."""
    longest, context = model.tokenizer.longest_token, model.card.context_length
    if longest is not None and len(text) > longest * context:
        raise ApiError(
            400,
            f"this model's maximum context length is {context} tokens, of at most {longest} characters each; "
            f"the prompt has {len(text)} characters",
            code="context_length_exceeded",
            param=param,
        )
    return model.tokenizer.encode(text, special=special)


def _check_tokens(tokens: Iterable[int], model: TextModel, param: str) -> None:
    """Reject tokens that the model does not have: an engine may fail on them for everyone."""
    size = model.vocab_size
    if size is not None and (largest := max(tokens, default=0)) >= size:
        raise ApiError(400, f"there is no token {largest}; the model has {size} tokens", param=param)


def _limit(request: Request, num_prompt: int, model: TextModel, param: str) -> int:
    """Return the number of tokens that may be generated after a prompt.

    Raises:
        ApiError: the prompt is empty, or does not fit into the model's context.
    """
    if not num_prompt:
        raise ApiError(400, "the prompt has no tokens", param=param)
    context, limit = model.card.context_length, request.max_tokens
    if (message := refusal(context, num_prompt, limit)) is not None:
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    room = context - num_prompt
    if limit is None and isinstance(request, CompletionRequest):
        return min(max(COMPLETION_TOKENS, request.min_tokens or 0), room)
    return min(limit or room, room)


def _check_plain(value: Any) -> None:
    """Reject what cannot be sent: nesting that would exhaust a stack, integers beyond 64 bits."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below += entry.values()
            elif isinstance(entry, list):
                below += entry
            elif isinstance(entry, int) and not -(1 << 63) <= entry < 1 << 64:
                raise ApiError(
                    400, f"the request has an integer of {entry.bit_length()} bits; at most 64 are supported"
                )
        if not below:
            return
        level = below
    raise ApiError(400, f"the request is nested more than {MAX_DEPTH} levels deep")
