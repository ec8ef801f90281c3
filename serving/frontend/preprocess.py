"""From an OpenAI request to prompts in token ids, checked and hashed. Pure: it runs here or in a model's preparer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from serving.frontend.api.embedding import EmbeddingRequest, ScoreRequest
from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import strictly
from serving.frontend.api.kinds import (
    AboutEmbeddings,
    AnyRequest,
    DetokenizeRequest,
    LikeChat,
    TokenizeRequest,
    check_request,
)
from serving.frontend.api.messages.request import MessagesRequest
from serving.frontend.api.openai import ChatRequest, CompletionRequest, Message, OpenAiRequest
from serving.frontend.api.plain import check_plain
from serving.frontend.api.responses.request import ResponsesRequest
from serving.frontend.api.structure import constraint
from serving.frontend.api.tools import check_tools, tool_use
from serving.frontend.api.vllm_options import VllmOptions
from serving.frontend.prepared import (
    Detokenized,
    Embeddable,
    HandedThrough,
    Prepared,
    PreparedPrompt,
    Preprocessed,
    Tokenized,
)
from serving.frontend.shape import combined, honoured, shape_of
from serving.frontend.text_model import TextModel, check_tokens, encode_text, given
from serving.model.card import ModelType
from serving.model.context import refusal
from serving.model.template import TemplateError
from serving.model.tokenizer import Ids

MAX_WORK = 1 << 20
"""Tokens that one request may ask for in all its choices together."""

MAX_ECHO = 1 << 21
"""Characters of prompts that one answer may repeat in all its choices together."""

MAX_LOGPROBS = 1 << 16
"""Log-probabilities of prompts that one request may ask for."""

NAMES_IN_RESPONSES = {"max_tokens": "max_output_tokens", "messages": "input"}
"""What a response's request calls the fields of the chat that it is translated to."""

QUICK_TOKENS = 16_384
"""This many token ids are checked and hashed in about half a millisecond."""


def is_quick(request: AnyRequest, model: TextModel) -> bool:
    """Return whether an event loop can wait for a request to be prepared: none of the model's code, little to encode."""
    if isinstance(request, DetokenizeRequest):
        return len(request.tokens) <= QUICK_TOKENS
    if model.card.model_type is not ModelType.Backend and isinstance(request, OpenAiRequest):
        return True
    if isinstance(request, OpenAiRequest) and request.vllm.chat_template:
        return False  # anybody may have written it, and a short one may never end
    if isinstance(request, LikeChat):
        return model.template is not None and len(msgspec.json.encode(request)) <= model.tokenizer.num_quick
    if isinstance(request, ChatRequest) or (isinstance(request, TokenizeRequest) and request.messages is not None):
        if model.template is None and not _is_raw(request):
            return False
        return _num_characters(request) <= model.tokenizer.num_quick
    if isinstance(request, TokenizeRequest):
        return len(request.prompt or "") <= model.tokenizer.num_quick
    if isinstance(request, AboutEmbeddings):
        return False
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
    if not isinstance(request, OpenAiRequest):
        model.reading.check(request, body, model)
    if isinstance(request, TokenizeRequest):
        return tokenize(request, model)
    if isinstance(request, AboutEmbeddings):
        return embeddable(request, model)
    if isinstance(request, DetokenizeRequest):
        check_tokens(request.tokens, model, "tokens")
        return Detokenized(model.tokenizer.decode(request.tokens))
    if isinstance(request, LikeChat):
        return translated(request, model)
    takes_whole, name = (
        (ModelType.Chat, "chat completions")
        if isinstance(request, ChatRequest)
        else (ModelType.Completion, "completions")
    )
    if model.card.model_type is takes_whole:
        return hand_through(body)
    if model.card.model_type is not ModelType.Backend:
        raise ApiError(404, f"model {request.model!r} does not offer {name}", code="model_not_found", param="model")
    model.reading.check(request, body, model)
    return prepare(request, model)


def prepare(request: OpenAiRequest, model: TextModel) -> Prepared:
    """Turn a request into token ids; a request over its limits is rejected before hashing.

    Raises:
        ApiError: it cannot be served.
    """
    check_tokens(list(map(int, request.logit_bias or ())), model, "logit_bias")
    use, wanted = None, constraint(request)
    if isinstance(request, ChatRequest):
        check_tools(request)
        use = tool_use(request)
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
        kind="chat" if isinstance(request, ChatRequest) else "completion",
        shape=shape_of(request, use, wanted, encoded[0].text, model.card) if isinstance(request, ChatRequest) else None,
        constraint=honoured(combined(use, wanted), model.card),
        tools=use.tools if use is not None and not use.is_forced else None,
        prompts=[PreparedPrompt(each.tokens, model.card.kv_cache_block_size) for each in encoded],
        limits=[each.limit for each in encoded],
        has_own_limit=has_own_limit,
        echoes=echoes,
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        formatted=encoded[0].text if wants_formatted else "",
        vllm=request.vllm,
        prompt_text=encoded[0].text if request.vllm.return_prompt_text else None,
    )


def translated(request: LikeChat, model: TextModel) -> Prepared | Tokenized:
    """Turn a request of another API into token ids, by way of the chat request that asks for the same.

    Raises:
        ApiError: it cannot be served.
    """
    if model.card.model_type is not ModelType.Backend:
        name = "responses" if isinstance(request, ResponsesRequest) else "messages"
        raise ApiError(404, f"model {request.model!r} does not offer {name}", code="model_not_found", param="model")
    check_plain(msgspec.to_builtins(request))
    with strictly(model.is_strict):
        chat = request.to_chat()
    check_request(chat)
    if not isinstance(request, ResponsesRequest | MessagesRequest):
        return Tokenized(tokens=_chat_tokens(chat, model)[1].tolist(), token_strs=None)
    try:
        prepared = prepare(chat, model)
    except ApiError as error:
        if isinstance(request, ResponsesRequest):
            error.param = NAMES_IN_RESPONSES.get(error.param or "", error.param)
        raise
    prepared.kind = "message"
    if isinstance(request, ResponsesRequest):
        prepared.kind, prepared.response = "response", request.options()
    return prepared


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
    tokens = encode_text(text, model, "messages" if is_chat else "prompt", special=special).tolist()
    return Tokenized(
        tokens=tokens, token_strs=list(map(model.tokenizer.text_of, tokens)) if request.return_token_strs else None
    )


def embeddable(request: AboutEmbeddings, model: TextModel) -> Embeddable:
    """Turn texts whose embeddings are wanted into token ids.

    Raises:
        ApiError: the model's engine returns none, or the texts are too long.
    """
    if not model.card.has_embeddings or model.card.role != "aggregated":
        problem = f"the engine of model {model.card.name!r} returns no embeddings"
        raise ApiError(400, problem, code="unsupported_parameter", param="model")
    name = model.card.name
    match request:
        case EmbeddingRequest():
            prompts = _embeddable(request.inputs(), model, "input")
            is_base64 = request.encoding_format == "base64"
            return Embeddable(
                kind="embedding", model=name, prompts=prompts, is_base64=is_base64, dimensions=request.dimensions
            )
        case ScoreRequest():
            first, second = request.pairs()
            return Embeddable(kind="score", model=name, prompts=_embeddable([*first, *second], model, "documents"))
        case _:
            prompts = _embeddable([request.query, *request.documents], model, "documents")
            shown = None if request.return_documents is False else request.documents
            return Embeddable(kind="rerank", model=name, prompts=prompts, top_n=request.top_n, documents=shown)


def _embeddable(inputs: Sequence[str | list[int]], model: TextModel, param: str) -> list[PreparedPrompt]:
    found, size = [], model.card.kv_cache_block_size
    for each in inputs:
        tokens = encode_text(each, model, param, special=True) if isinstance(each, str) else given(each, model, param)
        if not len(tokens):
            raise ApiError(400, "a text has no tokens", param=param)
        if (message := refusal(model.card.context_length, len(tokens), None)) is not None:
            raise ApiError(400, message, code="context_length_exceeded", param=param)
        found.append(tokens)
    if sum(map(len, found)) > MAX_WORK:
        raise ApiError(400, f"all texts together may have at most {MAX_WORK} tokens", param=param)
    return [PreparedPrompt(tokens, size) for tokens in found]


def hand_through(body: bytes | bytearray) -> HandedThrough:
    """Turn a request's body into the form for engines that take whole requests.

    Raises:
        ApiError: it cannot be sent.
    """
    request: dict[str, Any] = msgspec.json.decode(body)
    check_plain(request)
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
    text, tokens = _chat_tokens(request, model)
    return _Encoded(text, tokens, model.reading.limit(request, len(tokens), model, "messages"))


def _chat_tokens(request: ChatRequest, model: TextModel) -> tuple[str, Ids]:
    """Return the prompt of a conversation, as text and in tokens."""
    is_raw = _is_raw(request)
    more = {
        "documents": request.documents,
        "add_generation_prompt": request.add_generation_prompt is not False,
        "variables": request.template_variables,
        "template": request.vllm.chat_template,
    }
    text = _joined(request.messages) if is_raw else _render(request.messages, request.shown_tools, model, **more)
    if request.vllm.continue_final_message:
        text = _cut_after(text, request.messages[-1].text)
    tokens = encode_text(text, model, "messages", special=is_raw or bool(request.vllm.add_special_tokens))
    return text, _truncated(tokens, request.vllm, model)


def _cut_after(prompt: str, last: str) -> str:
    """Return a prompt up to the end of its last message's text, which the answer continues.

    Raises:
        ApiError: the template does not repeat it.
    """
    found = prompt.rfind(last.strip())
    if found < 0:
        raise ApiError(400, "continue_final_message: the chat template does not show the last message as it is")
    return prompt[: found + len(last.strip())]


def _truncated(tokens: Ids, options: VllmOptions, model: TextModel) -> Ids:
    """Return the tokens that a request wants kept."""
    kept = options.truncate_prompt_tokens
    if kept is None or len(tokens) <= (kept := model.card.context_length if kept < 0 else kept):
        return tokens
    return tokens[len(tokens) - kept :] if options.truncation_side == "left" else tokens[:kept]


def _encode_prompt(prompt: str | list[int], request: CompletionRequest, model: TextModel) -> _Encoded:
    options = request.vllm
    if isinstance(prompt, str):
        tokens = encode_text(prompt, model, "prompt", special=options.add_special_tokens is not False)
        tokens = _truncated(tokens, options, model)
        return _Encoded(prompt, tokens, model.reading.limit(request, len(tokens), model, "prompt"))
    limit = model.reading.limit(request, len(prompt), model, "prompt")
    tokens = _truncated(given(prompt, model, "prompt"), options, model)
    return _Encoded(model.tokenizer.decode(prompt) if request.echo else "", tokens, limit)


def _check_totals(request: OpenAiRequest, encoded: list[_Encoded], num_echoed: int, *, has_own_limit: bool) -> None:
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
