"""OpenAI's HTTP vocabulary: what may be asked, within which limits, and how errors are told."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

MAX_CHOICES = 128
MAX_TOKENS = 1 << 20
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
TokenPrompt = list[TokenId]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Annotation = Annotated[str, Meta(max_length=256)]


class StreamOptions(msgspec.Struct):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class NvExt(msgspec.Struct, kw_only=True):
    """NVIDIA's extensions."""

    ignore_eos: bool | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool = False
    """Take the messages' text as the prompt, without the chat template."""
    annotations: Annotated[list[Annotation], Meta(max_length=32)] = []
    """`formatted_prompt`, `token_ids`, `llm_metrics`, `request_id`, `query_instance_id`, `dp_rank:N`."""
    backend_instance_id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    """Send it to this instance."""
    extra_fields: Annotated[list[Annotation], Meta(max_length=32)] = []
    """`worker_id`, `timing`, `routing`: what the answer's own `nvext` should hold."""
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    """Conversation the request belongs to; the `session` router mode keeps it on one worker."""


class ResponseFormat(msgspec.Struct):
    """What an answer should look like; text is what engines here can do."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Request(msgspec.Struct, kw_only=True):
    """What both kinds of completion share."""

    model: Annotated[str, Meta(min_length=1, max_length=10_000)]
    max_tokens: Tokens | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    seed: Int64 | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    nvext: NvExt | None = None

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most, None if not said."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted for each token, None if no log-probabilities are."""
        return None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Request, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | TokenPrompt]
    """A text, token ids, or a list of either."""
    echo: bool = False
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See `Request`."""
        return self.logprobs

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
    content: str | list[TextPart] | UnsetType | None = UNSET
    name: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET
    tool_call_id: str | UnsetType = UNSET

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
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """See `Request`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """See `Request`."""
        return (self.top_logprobs or 0) if self.logprobs else None


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
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


def parse(body: bytes, kind: Any) -> Any:
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
    _check(asked)
    return asked


def _check(asked: Request) -> None:
    """Refuse what does not fit together, or what no engine here can do."""
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    limit = asked.limit
    if limit is not None and asked.min_tokens > limit:
        raise ApiError(400, f"min_tokens ({asked.min_tokens}) is larger than max_tokens ({limit})", param="min_tokens")
    if asked.logit_bias and not all(token.isdigit() for token in asked.logit_bias):
        raise ApiError(400, "logit_bias maps token ids to numbers", param="logit_bias")
    if isinstance(asked, CompletionRequest):
        _check_completion(asked)
    elif isinstance(asked, ChatRequest):
        _check_chat(asked)


def _check_completion(asked: CompletionRequest) -> None:
    if isinstance(asked.prompt, list) and len({type(part) for part in asked.prompt}) > 1:
        raise ApiError(400, "prompt must be a text, token ids, or a list of either", param="prompt")
    prompts = asked.prompts()
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt must not be empty", param="prompt")
    choices = len(prompts) * (asked.n or 1)
    if choices > MAX_CHOICES:
        raise ApiError(400, f"{len(prompts)} prompts times n are {choices} answers; at most {MAX_CHOICES}", param="n")
    if asked.suffix:
        raise ApiError(400, "suffix is not supported", param="suffix")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise ApiError(400, "best_of other than n is not supported", param="best_of")


def _check_chat(asked: ChatRequest) -> None:
    for message in asked.messages:
        if message.role in ("user", "system") and (message.content is UNSET or message.content is None):
            raise ApiError(400, f"a {message.role} message needs content", param="messages")
    if asked.top_logprobs and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    for name in ("functions", "function_call", "chat_template", "chat_template_kwargs"):
        if getattr(asked, name) is not None:
            raise ApiError(400, f"{name} is not supported", param=name)
    if asked.tool_choice == "required" or isinstance(asked.tool_choice, dict):
        raise ApiError(400, "a required tool call is not supported", param="tool_choice")
    if asked.response_format is not None and asked.response_format.type != "text":
        raise ApiError(400, "response_format other than text is not supported", param="response_format")


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
