"""OpenAI's requests: their fields and the limits of each field."""

import re
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from serving.frontend.api.errors import ApiError
from serving.model.template import RESERVED

MAX_CHOICES = 128
MAX_KV_BYTES = 1 << 18
"""Maximum size of `kv_transfer_params` as JSON: enough for 100,000 tokens."""
MAX_TOKENS = 1 << 20
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenPrompt = list[TokenId]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Annotation = Annotated[str, Meta(max_length=256)]
Label = Annotated[str, Meta(max_length=1024)]
COMPLETION_TOKENS = 16
"""Tokens that a completion without max_tokens may generate, as at OpenAI. A chat may fill the model's context."""

DIGITS = re.compile(r"[0-9]{1,10}")
DP_RANK = "dp_rank:"
ANNOTATIONS = ("formatted_prompt", "token_ids", "llm_metrics", "request_id", "query_instance_id")
"""Annotations that Dynamo's clients may request in a stream; `llm_metrics` has no effect here."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NvExt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """NVIDIA's extensions."""

    ignore_eos: bool | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    """Use the messages' text as the prompt, without the chat template."""
    annotations: Annotated[list[Annotation], Meta(max_length=32)] | None = None
    """Those in `ANNOTATIONS`, `dp_rank:N`, and any `name:value`, which engines may read in Dynamo; none here does."""
    backend_instance_id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Send the request to this instance."""
    extra_fields: Annotated[list[Annotation], Meta(max_length=32)] | None = None
    """Fields for the `nvext` of the answer: `worker_id`, `timing`, `routing`."""
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    """Conversation that the request belongs to; the `session` router mode keeps it on one worker."""
    stop_after: Tokens | None = None
    """Number of the output token at which the mocker generates EOS; engines that run a model ignore it. Not in Dynamo."""

    @property
    def dp_rank(self) -> int | None:
        """The data-parallel rank to send the request to; `parse` has checked its digits."""
        ranks = (note.removeprefix(DP_RANK) for note in self.annotations or () if note.startswith(DP_RANK))
        return next(map(int, ranks), None)


class Request(msgspec.Struct, kw_only=True):
    """The fields that both kinds of completion share; null is the same as absent."""

    model: Annotated[str, Meta(min_length=1, max_length=10_000)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    """The same, but takes precedence. OpenAI has it for chats only, but proxies send it with either kind."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    """The same as `nvext.session_id`."""
    nvext: NvExt | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """From a client that directs disaggregated requests itself, as in vLLM: `do_remote_decode` to compute the prompt for
    another worker; for that worker, the params from the answer to the first request."""

    # These do not affect the answer's text.
    user: Label | None = None
    request_id: Label | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prediction: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives wanted for each token; None if no log-probabilities are wanted."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Request, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | TokenPrompt]
    """A text, token ids, or a list of either."""
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """The number that `logprobs` gives."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt, if it is echoed."""
        return self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """Part of a message's content."""

    text: str


class Message(msgspec.Struct, omit_defaults=True):
    """A chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, by its other name."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """Its content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def thought(self) -> str:
        """Its reasoning."""
        return self.reasoning_content or self.reasoning or ""

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it."""
        parts = self.content if isinstance(self.content, list) else []
        content: Any = [{"type": "text", "text": part.text} for part in parts] or self.content or ""
        fields: dict[str, Any] = {"role": self.role, "content": content}
        if self.thought:
            fields |= {"reasoning_content": self.thought, "reasoning": self.thought}
        for name in ("name", "tool_calls", "tool_call_id"):
            if value := getattr(self, name):
                fields[name] = value
        return fields


class ChatRequest(Request, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    reasoning_effort: Label | None = None
    """For the template, where it is also `enable_thinking`: false for "none"."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Default: true."""

    @property
    def num_logprobs(self) -> int | None:
        """The number that `top_logprobs` gives."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = self.reasoning_effort
        given = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return given | (self.chat_template_kwargs or {})


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, as in vLLM: a text or a conversation."""

    model: str | None = None
    """May be left out if only one model is served."""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a text; false for a conversation, as its template adds them."""
    add_generation_prompt: bool | None = None
    """Default: true."""
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]


AnyRequest = Request | TokenizeRequest | DetokenizeRequest
KindName = Literal["chat", "completion", "tokenize", "detokenize"]


class Kind(NamedTuple):
    """A kind of request that has a body."""

    type: type[AnyRequest]
    path: str
    summary: str
    endpoint: str = ""
    """Label of these requests in metrics; empty if they are not counted."""


KINDS: dict[KindName, Kind] = {
    "tokenize": Kind(TokenizeRequest, "/tokenize", "Return the tokens of a text or a conversation"),
    "detokenize": Kind(DetokenizeRequest, "/detokenize", "Return the text of tokens"),
    "completion": Kind(CompletionRequest, "/v1/completions", "Complete a prompt", "completions"),
    "chat": Kind(ChatRequest, "/v1/chat/completions", "Answer a conversation", "chat_completions"),
}


def parse(body: bytes | bytearray, type: Any) -> Any:
    """Read a request.

    Raises:
        ApiError: it is not JSON, or not such a request.
    """
    try:
        request = msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the request is not valid: {error}", param=_field_at_fault(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error or 'nested too deeply'}") from error
    if isinstance(request, Request):
        _check(request)
    elif isinstance(request, TokenizeRequest) and (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "expected either prompt or messages", param="prompt")
    return request


def _field_at_fault(message: str) -> str | None:
    """Return the field that msgspec's validation error is about."""
    field = re.search(r" - at `\$\.(\w+)", message) or re.search(r"missing required field `(\w+)`", message)
    return field[1] if field else None


def _check(request: Request) -> None:
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
        _check_kv_transfer(request.kv_transfer_params)
    if request.logit_bias and not all(map(DIGITS.fullmatch, request.logit_bias)):
        raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias")
    if request.nvext is not None:
        for note in request.nvext.annotations or ():
            if note.startswith(DP_RANK) and not DIGITS.fullmatch(note, len(DP_RANK)):
                raise ApiError(400, f"{DP_RANK}N needs the number of a data-parallel rank, not {note!r}", param="nvext")


def _check_kv_transfer(params: dict[str, Any]) -> None:
    """Reject params that say nothing about KV, or are too large."""
    parts = [params.get(name) is True for name in ("do_remote_decode", "do_remote_prefill")]
    if sum(parts) != 1:
        raise ApiError(
            400,
            "kv_transfer_params: expected do_remote_decode: true, or do_remote_prefill: true, and not both",
            param="kv_transfer_params",
        )
    if len(msgspec.json.encode(params)) > MAX_KV_BYTES:
        raise ApiError(400, f"kv_transfer_params may have at most {MAX_KV_BYTES:,} bytes", param="kv_transfer_params")


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
