"""OpenAI's HTTP vocabulary: what may be asked, within which limits, and how errors are told."""

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_CHOICES = 128
FEW = 64
"""Fields whose names are searched for in a body one by one."""

MAX_TOKENS = 1 << 20
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenPrompt = list[TokenId]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Annotation = Annotated[str, Meta(max_length=256)]
Label = Annotated[str, Meta(max_length=1024)]
COMPLETION_TOKENS = 16
"""What a completion without max_tokens may generate, as at OpenAI. A chat may fill the model's context."""

DIGITS = re.compile(r"[0-9]{1,10}")
DP_RANK = "dp_rank:"


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
    """Take the messages' text as the prompt, without the chat template."""
    annotations: Annotated[list[Annotation], Meta(max_length=32)] = []
    """`formatted_prompt`, `token_ids`, `llm_metrics`, `request_id`, `query_instance_id`, `dp_rank:N`."""
    backend_instance_id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Send it to this instance."""
    extra_fields: Annotated[list[Annotation], Meta(max_length=32)] = []
    """`worker_id`, `timing`, `routing`: what the answer's own `nvext` should hold."""
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    """Conversation the request belongs to; the `session` router mode keeps it on one worker."""


class Request(msgspec.Struct, kw_only=True):
    """What both kinds of completion share; null is the same as absent."""

    model: Annotated[str, Meta(min_length=1, max_length=10_000)]
    max_tokens: Tokens | None = None
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
    """See `NvExt.session_id`."""
    nvext: NvExt | None = None

    # What says nothing about the answer's text.
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
        """Alternatives wanted for each token, None if no log-probabilities are."""
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
        """See `Request`."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """See `Request`."""
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
    content: str | Annotated[list[TextPart], Meta(min_length=1)] | UnsetType | None = UNSET
    name: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET

    @property
    def size(self) -> int:
        """Characters of its content."""
        if isinstance(self.content, list):
            return sum(len(part.text) for part in self.content)
        return len(self.content or "")

    def for_template(self) -> dict[str, Any]:
        """Return it as templates expect it, with the content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        fields = {"role": self.role, "content": "" if content is UNSET or content is None else content}
        for name in ("name", "tool_calls", "tool_call_id"):
            if (value := getattr(self, name)) is not UNSET:
                fields[name] = value
        return fields


class ChatRequest(Request, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `Request`."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, as vLLM has it: a text or a conversation."""

    model: str | None = None
    """May be left out where there is one model."""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a text, false for a conversation, whose template has them."""
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=1 << 20)]


class ApiError(Exception):
    """An answer with OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", "1")
        if status in (408, 413, 414, 431):
            self.headers["connection"] = "close"  # the rest of the request is not read

    def body(self) -> bytes:
        """Encode the error object."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def parse(body: bytes | bytearray, kind: Any) -> Any:
    """Read a request.

    Raises:
        ApiError: it is not JSON, or not such a request.
    """
    try:
        asked = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        place = re.search(r" - at `\$\.(\w+)", text)
        missing = re.search(r"missing required field `(\w+)`", text)
        found = place or missing
        raise ApiError(400, f"the request is not valid: {text}", param=found[1] if found else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error or 'nested too deeply'}") from error
    if isinstance(asked, Request):
        _check(asked)
    elif isinstance(asked, TokenizeRequest) and (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "either prompt or messages was expected", param="prompt")
    return asked


def check_fields(body: bytes | bytearray, asked: Request) -> None:
    """Refuse what an engine of token ids would have to ignore: fields that nobody knows, or that none here can do.

    Raises:
        ApiError: there is such a field, or one is there twice.
    """
    fields = _decode_fields(body)
    _check_once(body, fields)
    known = FIELDS[type(asked)]
    for name, value in fields.items():
        if name not in known and bytes(value) != b"null":
            if name not in NEUTRAL:
                raise ApiError(400, f"unknown parameter: {name[:100]!r}", code="unknown_parameter", param=name[:100])
            if msgspec.json.decode(value) not in NEUTRAL[name]:
                raise ApiError(400, f"{name} is not supported", code="unsupported_parameter", param=name)
    if isinstance(asked, ChatRequest) and (asked.tool_choice == "required" or isinstance(asked.tool_choice, dict)):
        raise ApiError(400, "a required tool call is not supported", param="tool_choice")


def _check_once(body: bytes | bytearray, names: Collection[str]) -> None:
    """Refuse a body with a name twice. To be sure takes longer than all other checks, so only odd bodies are walked."""
    if len(names) <= FEW and b"\\u" not in body and all(body.count(b'"%b"' % name.encode()) == 1 for name in names):
        return
    seen: set[str] = set()
    for key in _decode_keys(body):
        if key.name in seen:
            raise ApiError(400, f"the request has {key.name[:100]!r} twice", param=key.name[:100])
        seen.add(key.name)


class _Key:
    """A key of an object; two of one name are two keys."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_keys = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=lambda _, name: _Key(name)).decode
FIELDS: dict[type[Request], frozenset[str]] = {
    kind: frozenset(field.encode_name for field in msgspec.structs.fields(kind))
    for kind in (CompletionRequest, ChatRequest)
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *(
                "allowed_token_ids",
                "audio",
                "cache_salt",
                "chat_template",
                "chat_template_kwargs",
                "custom_logit_processor",
            ),
            *(
                "custom_params",
                "documents",
                "ebnf",
                "function_call",
                "functions",
                "guided_choice",
                "guided_decoding_backend",
            ),
            *("guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "input_ids", "json_schema"),
            *("kv_transfer_params", "logits_processors", "lora_path", "mm_processor_kwargs", "moderation"),
            *("prompt_embeds", "prompt_logprobs", "reasoning", "reasoning_effort", "regex", "repetition_detection"),
            *("session_params", "stop_regex", "structured_outputs", "thinking", "thinking_token_budget"),
            *("truncate_prompt_tokens", "truncation_side", "verbosity", "vllm_xargs", "web_search_options"),
        ),
        (),
    ),
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "separate_reasoning": (True, False),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True, False),
    "suffix": ("",),
    "use_beam_search": (False,),
}
"""Fields of OpenAI, vLLM and SGLang that no engine here can do, with the values that ask for nothing."""


def _check(asked: Request) -> None:
    """Refuse what does not fit together, or what no engine here can do."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if isinstance(asked, CompletionRequest):
        _check_completion(asked)
    elif isinstance(asked, ChatRequest):
        _check_chat(asked)
        asked.max_tokens = asked.max_completion_tokens or asked.max_tokens
    limit = asked.max_tokens
    if limit is not None and (asked.min_tokens or 0) > limit:
        raise ApiError(400, f"min_tokens ({asked.min_tokens}) is larger than max_tokens ({limit})", param="min_tokens")
    if asked.logit_bias and not all(map(DIGITS.fullmatch, asked.logit_bias)):
        raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias")
    if asked.nvext is not None:
        for note in asked.nvext.annotations:
            if note.startswith(DP_RANK) and not DIGITS.fullmatch(note, len(DP_RANK)):
                raise ApiError(400, f"{DP_RANK}N takes the number of a data-parallel rank, not {note!r}", param="nvext")


def _check_completion(asked: CompletionRequest) -> None:
    if isinstance(asked.prompt, list) and len(set(map(type, asked.prompt))) > 1:
        raise ApiError(400, "prompt must be a text, token ids, or a list of either", param="prompt")
    prompts = asked.prompts()
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt must not be empty", param="prompt")
    choices = len(prompts) * (asked.n or 1)
    if choices > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts times n are {choices} answers; at most {MAX_CHOICES}", param="n")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise ApiError(400, "best_of other than n is not supported", param="best_of")


def _check_chat(asked: ChatRequest) -> None:
    for message in asked.messages:
        if message.role in ("user", "system") and (message.content is UNSET or message.content is None):
            raise ApiError(400, f"a {message.role} message needs content", param="messages")
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
