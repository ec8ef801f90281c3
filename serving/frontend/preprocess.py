"""From an OpenAI request to prompts in token ids, checked and hashed. Pure: it runs here or in the model's preparer."""

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from serving.frontend.openai import (
    COMPLETION_TOKENS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    NvExt,
    Request,
    TokenizeRequest,
    check_fields,
)
from serving.model.card import ModelCard, ModelType
from serving.model.files import ModelFiles
from serving.model.template import PLAIN, ChatTemplate, TemplateError, source
from serving.model.tokenizer import Ids, load
from serving.router.hashing import block_hashes, sequence_hashes

MAX_WORK = 1 << 20
"""Tokens one request may ask for in all its choices together."""

MAX_ECHO = 1 << 21
"""Characters of prompts that one answer may repeat in all its choices together."""

MAX_LOGPROBS = 1 << 16
"""Log-probabilities of prompts that one request may ask for."""

MAX_DEPTH = 64
"""Levels of lists and objects in a request that is handed through."""

QUICK_TOKENS = 16_384
"""Token ids that are checked and hashed in about half a millisecond."""


class TextModel:
    """What turns requests of a model into token ids."""

    def __init__(self, card: ModelCard, files: ModelFiles, *, is_preparer: bool = False) -> None:
        """Load the tokenizer and the template.

        Args:
            card: what the model's workers registered.
            files: the model's files.
            is_preparer: whether a template of the model's own may run in this process.

        Raises:
            ModelError: one of them cannot be used.
        """
        self.card = card
        self.files = files
        self.tokenizer = load(files, encodes=True)
        self.template = ChatTemplate(files) if is_preparer or source(files) == PLAIN else None
        self.vocab_size = files.vocab_size
        """How many tokens the model has, if its files tell: engines may die of others."""


class Prompt:
    """A prompt in token ids, hashed once."""

    def __init__(self, tokens: Ids, block_size: int, hashes: list[int] | None = None) -> None:
        self.tokens = tokens
        self.block_size = block_size
        self.hashes = sequence_hashes(block_hashes(tokens, block_size)) if hashes is None else hashes
        """Sequence hashes of its full blocks."""


class Prepared(msgspec.Struct, kw_only=True, tag=True):
    """A request in token ids, and what else its answer needs of it."""

    options: Request
    is_chat: bool
    prompts: list[Prompt]
    limits: list[int]
    """Tokens that each prompt's answer may have."""
    has_own_limit: bool
    """Whether the limits are more than what the context leaves."""
    echoes: list[str]
    """The text that comes before each prompt's answer."""
    num_logprobs: int | None
    """Alternatives wanted for each token, None if no log-probabilities are."""
    num_prompt_logprobs: int | None
    """The same for the prompt's tokens."""
    formatted: str
    """The first prompt as text, where it is one and was asked for."""

    @property
    def extension(self) -> NvExt:
        """NVIDIA's extensions."""
        return self.options.nvext or NvExt()


class HandedThrough(msgspec.Struct, kw_only=True, tag=True):
    """A request that the engine takes as it is."""

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


AnyRequest = Request | TokenizeRequest | DetokenizeRequest
Taken = Prepared | HandedThrough | Tokenized | Detokenized


def is_quick(asked: AnyRequest, model: TextModel) -> bool:
    """Tell whether a request can be prepared while an event loop waits: no code of the model's, and little to encode."""
    if isinstance(asked, DetokenizeRequest):
        return len(asked.tokens) <= QUICK_TOKENS
    if model.card.model_type is not ModelType.Backend and isinstance(asked, Request):
        return True
    if isinstance(asked, ChatRequest) or (isinstance(asked, TokenizeRequest) and asked.messages is not None):
        raw = isinstance(asked, ChatRequest) and asked.nvext is not None and asked.nvext.use_raw_prompt
        if model.template is None and not raw:
            return False
        return sum(message.size for message in asked.messages or ()) <= model.tokenizer.num_quick
    if isinstance(asked, TokenizeRequest):
        return len(asked.prompt or "") <= model.tokenizer.num_quick
    assert isinstance(asked, CompletionRequest)
    prompts = asked.prompts()
    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    num_tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    return num_characters <= model.tokenizer.num_quick and num_tokens <= QUICK_TOKENS


def take(asked: AnyRequest, body: bytes | bytearray, model: TextModel) -> Taken:
    """Turn a request into what its model's engines are sent, or into tokens or text.

    Raises:
        ApiError: it cannot be served.
    """
    if isinstance(asked, TokenizeRequest):
        return tokenize(asked, model)
    if isinstance(asked, DetokenizeRequest):
        _check_tokens(asked.tokens, model, "tokens")
        return Detokenized(model.tokenizer.decode(asked.tokens))
    whole, name = (
        (ModelType.Chat, "chat completions")
        if isinstance(asked, ChatRequest)
        else (ModelType.Completion, "completions")
    )
    if model.card.model_type is whole:
        return hand_through(body)
    if model.card.model_type is not ModelType.Backend:
        raise ApiError(404, f"model {asked.model!r} does not offer {name}", code="model_not_found", param="model")
    check_fields(body, asked)
    return prepare(asked, model)


def prepare(asked: Request, model: TextModel) -> Prepared:
    """Turn a request into token ids.

    Raises:
        ApiError: it cannot be served.
    """
    _check_tokens(map(int, asked.logit_bias or ()), model, "logit_bias")
    echoes: list[str]
    if isinstance(asked, ChatRequest):
        raw = bool(asked.nvext is not None and asked.nvext.use_raw_prompt)
        tools = asked.tools if asked.tool_choice != "none" else None
        texts = [_joined(asked.messages) if raw else _render(asked.messages, tools, model)]
        prompts = [_encode(texts[0], model, "messages", special=raw)]
        echoes = [""]
    else:
        assert isinstance(asked, CompletionRequest)
        texts, prompts = _tokenize(asked, model)
        echoes = texts if asked.echo else [""] * len(prompts)
    param = "messages" if isinstance(asked, ChatRequest) else "prompt"
    if not all(map(len, prompts)):
        raise ApiError(400, "the prompt has no tokens", param=param)
    has_own_limit = asked.max_tokens is not None or isinstance(asked, CompletionRequest)
    limits = [_limit(asked, len(tokens), model, param) for tokens in prompts]
    num_choices = asked.n or 1
    if asked.num_prompt_logprobs is not None:
        num_values = sum(map(len, prompts)) * (1 + asked.num_prompt_logprobs) * num_choices
        if num_values > MAX_LOGPROBS:
            message = f"echo with logprobs would give {num_values} log-probabilities; at most {MAX_LOGPROBS} are given"
            raise ApiError(400, message, param="logprobs")
    if sum(map(len, echoes)) * num_choices > MAX_ECHO:
        raise ApiError(400, f"all choices together may echo at most {MAX_ECHO} characters", param="echo")
    if has_own_limit and sum(limits) * num_choices > MAX_WORK:
        raise ApiError(400, f"all choices together may have at most {MAX_WORK} tokens", param="n")
    return Prepared(
        options=asked,
        is_chat=isinstance(asked, ChatRequest),
        prompts=[Prompt(tokens, model.card.kv_cache_block_size) for tokens in prompts],
        limits=limits,
        has_own_limit=has_own_limit,
        echoes=echoes,
        num_logprobs=asked.num_logprobs,
        num_prompt_logprobs=asked.num_prompt_logprobs,
        formatted=texts[0] if asked.nvext is not None and "formatted_prompt" in asked.nvext.annotations else "",
    )


def tokenize(asked: TokenizeRequest, model: TextModel) -> Tokenized:
    """Return the tokens of a text or a conversation.

    Raises:
        ApiError: the template refuses the conversation, or the text is longer than the context by far.
    """
    is_chat = asked.messages is not None
    special = not is_chat if asked.add_special_tokens is None else asked.add_special_tokens
    text = asked.prompt or ""
    if asked.messages is not None:
        text = _render(asked.messages, asked.tools, model, add_generation_prompt=asked.add_generation_prompt)
    tokens = _encode(text, model, "messages" if is_chat else "prompt", special=special).tolist()
    return Tokenized(
        tokens=tokens, token_strs=list(map(model.tokenizer.text_of, tokens)) if asked.return_token_strs else None
    )


def hand_through(body: bytes | bytearray) -> HandedThrough:
    """Turn a request's body into what an engine that takes whole requests is sent.

    Raises:
        ApiError: it cannot travel.
    """
    request: dict[str, Any] = msgspec.json.decode(body)
    _check_plain(request)
    encoded = msgspec.Raw(msgspec.msgpack.encode(request))
    return HandedThrough(model=request["model"], stream=bool(request.get("stream")), request=encoded)


def _joined(messages: list[Message]) -> str:
    return "".join(message.for_template()["content"] for message in messages)


def _render(
    messages: list[Message], tools: list[dict[str, Any]] | None, model: TextModel, *, add_generation_prompt: bool = True
) -> str:
    assert model.template is not None
    seen = [message.for_template() for message in messages]
    try:
        return model.template.render(seen, tools, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


def _tokenize(asked: CompletionRequest, model: TextModel) -> tuple[list[str], list[Ids]]:
    """Return the prompts' texts (of token prompts only if they are to be echoed) and token ids."""
    texts: list[str] = []
    prompts: list[Ids] = []
    for prompt in asked.prompts():
        if isinstance(prompt, str):
            texts.append(prompt)
            prompts.append(_encode(prompt, model, "prompt", special=True))
        else:
            _check_tokens(prompt, model, "prompt")
            prompts.append(np.frombuffer(array("I", prompt), np.uint32))  # three times as fast as np.array
            texts.append(model.tokenizer.decode(prompt) if asked.echo else "")
    return texts, prompts


def _encode(text: str, model: TextModel, param: str, *, special: bool) -> Ids:
    """Return a text's tokens, unless it cannot fit: a text of megabytes need not be encoded to know that."""
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
    """Refuse tokens that the model does not have: an engine may fail on them for everyone."""
    size = model.vocab_size
    if size is not None and (largest := max(tokens, default=0)) >= size:
        raise ApiError(400, f"there is no token {largest}; the model has {size}", param=param)


def _limit(asked: Request, num_prompt: int, model: TextModel, param: str) -> int:
    """Return the tokens that may be generated."""
    context, limit = model.card.context_length, asked.max_tokens
    if num_prompt + (limit or 1) > context:
        wanted = f"{num_prompt} prompt tokens" + (f" and max_tokens of {limit}" if limit else "")
        message = f"this model's maximum context length is {context} tokens; the request has {wanted}"
        raise ApiError(400, message, code="context_length_exceeded", param=param)
    room = context - num_prompt
    if limit is None and isinstance(asked, CompletionRequest):
        return min(max(COMPLETION_TOKENS, asked.min_tokens or 0), room)
    return limit or room


def _check_plain(value: Any) -> None:
    """Refuse what does not travel: nesting that would exhaust a stack, integers beyond 64 bits."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                below += entry.values()
            elif isinstance(entry, list):
                below += entry
            elif isinstance(entry, int) and not -(1 << 63) <= entry < 1 << 64:
                raise ApiError(400, f"an integer of {entry.bit_length()} bits; at most 64 are supported")
        if not below:
            return
        level = below
    raise ApiError(400, f"the request is nested more than {MAX_DEPTH} levels deep")
