"""OpenAI's requests for answers: their fields and the limits of each field."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.frontend.api.vllm_options import NO_OPTIONS, VllmOptions

MAX_CHOICES = 128
MAX_STOPS = 64
"""Stop strings of a request; OpenAI allows 4, vLLM any number."""
MAX_TOOLS = 128
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
Verbosity = Literal["low", "medium", "high"]
Tools = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
Wanted = str | dict[str, Any] | list[Any] | bool | None
"""A constraint on the answer. Whatever is empty or false asks for none; `constraint` checks the type of all else."""
COMPLETION_TOKENS = 16
"""Tokens that a completion without max_tokens may generate, as at OpenAI. A chat may fill the model's context."""

DP_RANK = "dp_rank:"
ANNOTATIONS = ("formatted_prompt", "token_ids", "llm_metrics", "request_id", "query_instance_id")
"""Annotations that Dynamo's clients may request in a stream; `llm_metrics` has no effect here."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Whether events may be padded against eavesdroppers; they never are."""


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
    """Fields for the `nvext` of the answer: `worker_id`, `timing`, `routing`, and `num_tokens` for that of each event that has several.

    Where answers are split for tools or reasoning, events do not have it: their parts end anywhere in tokens.
    """
    session_id: Annotated[str, Meta(max_length=256)] | None = None
    """Conversation that the request belongs to; the `session` router mode keeps it on one worker."""
    stop_after: Tokens | None = None
    """Number of the output token at which the mocker generates EOS; engines that run a model ignore it. Not in Dynamo."""

    @property
    def dp_rank(self) -> int | None:
        """The data-parallel rank to send the request to; `parse` has checked its digits."""
        ranks = (note.removeprefix(DP_RANK) for note in self.annotations or () if note.startswith(DP_RANK))
        return next(map(int, ranks), None)


class OpenAiRequest(msgspec.Struct, kw_only=True):
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
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
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

    # What the answer must look like: at most one of these.
    response_format: Wanted = None
    structured_outputs: Wanted = None
    """vLLM's form; `guided_*` is its former one."""
    guided_json: Wanted = None
    guided_regex: Wanted = None
    guided_choice: Wanted = None
    guided_grammar: Wanted = None
    json_schema: Wanted = None
    """SGLang's form, like `regex` and `ebnf`."""
    regex: Wanted = None
    ebnf: Wanted = None

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
    def vllm(self) -> VllmOptions:
        """What it asks for beyond OpenAI's API, if it came in vLLM's."""
        return NO_OPTIONS

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(OpenAiRequest, kw_only=True):
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


class ChatRequest(OpenAiRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=10_000)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """Default: auto, if there are tools."""
    parallel_tool_calls: bool | None = None
    """Whether the answer may call several tools (default: true)."""
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    """Whether what the model thought comes apart from what it answers (default: true); `include_reasoning: false` leaves it out."""
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    reasoning_effort: Label | None = None
    """For the template, where it is also `enable_thinking`: false for "none"."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    add_generation_prompt: bool | None = None
    """Default: true."""
    verbosity: Verbosity | None = None
    """A wish that no engine here gets."""

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template sees."""
        return self.tools if self.tool_choice != "none" else None

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
