"""The requests that vLLM 0.32 accepts for completions and chats: its fields, types and ranges.

They are pydantic's models, as vLLM's are, because clients see pydantic's findings: which texts pass for numbers, which field
is at fault, how many faults there are. What fits together is in `checks`; unknown fields are accepted.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serving.frontend.api.openai import COMPLETION_TOKENS
from serving.stand_in.vllm.requests.messages import Message

MAX_STOPS = 64
Int64 = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
TokenId = Annotated[int, Field(ge=0)]
Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None
Extra = dict[str, str | int | float | list[str | int | float]]


class VllmFields(BaseModel):
    """What its fields leave open is accepted, and has no effect."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(VllmFields):
    """Options of a streamed answer."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JsonSchema(VllmFields):
    """A schema for the answer."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(VllmFields):
    """OpenAI's constraint on the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuralTagFormat(VllmFields):
    """vLLM's for tags within the answer."""

    type: Literal["structural_tag"]
    format: Any


class LegacyStructuralTagFormat(VllmFields):
    """The same in its former form."""

    type: Literal["structural_tag"]
    structures: list[Any]
    triggers: list[str]


class StructuredOutputs(VllmFields):
    """vLLM's constraint on the answer."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class RepetitionDetection(VllmFields):
    """Which patterns end an answer that repeats them."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class Sampling(VllmFields):
    """What completions and chats have in common."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: Stop = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    watermarking: bool | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=(1 << 63) - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] = []
    response_format: ResponseFormat | StructuralTagFormat | LegacyStructuralTagFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Int64 = 0
    request_id: str = ""
    session_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    return_token_offsets: bool | None = False
    mm_payload: Literal["tensors", "none"] = "tensors"
    return_mm_kwargs: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: Extra | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    stream_interval: Annotated[int, Field(ge=1)] | None = None


class Completion(Sampling):
    """POST /v1/completions."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = COMPLETION_TOKENS
    n: int = 1
    suffix: str | None = None
    prompt_embeds: bytes | list[bytes] | None = None
    add_special_tokens: bool = True


class Function(VllmFields):
    """A function that the answer may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(VllmFields):
    """A tool that the answer may call."""

    type: Literal["function"] = "function"
    function: Function
    defer_loading: bool | None = None


class NamedFunction(VllmFields):
    """The name of a function."""

    name: str


class NamedTool(VllmFields):
    """The tool that the answer must call."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Chat(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, BeforeValidator(lambda value: 0 if value is None else value)] = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None
