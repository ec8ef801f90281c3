"""The request of a message: its fields, their limits, and the chat request that asks for the same."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, read_object
from serving.frontend.api.messages.blocks import CacheControl, chat_messages, system_content
from serving.frontend.api.messages.tools import ToolChoice, chat_choice, chat_tool
from serving.frontend.api.openai import MAX_STOPS, ChatRequest, Label, Message, StopString, Tokens, Tools

MIN_BUDGET = 1024
NEVER = (
    "container", "diagnostics", "inference_geo", "mcp_servers", "output_format", "user_profile_id", "workspace_id",
)  # fmt: skip
NEUTRAL: Neutral = {
    **dict.fromkeys(NEVER, ()),
    "context_management": ({}, {"edits": []}),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Fields that cannot be honoured, with the values that ask for nothing."""


class Metadata(msgspec.Struct, kw_only=True):
    """Facts about the request."""

    user_id: Label | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "disabled"]
    """For the template, `enable_thinking`: true, its own default, or false."""
    budget_tokens: Annotated[int, Meta(ge=MIN_BUDGET)] | None = None
    """A wish that no engine here gets: `max_tokens` limits thinking and answer together."""
    display: Literal["summarized", "omitted"] | None = None
    """The whole reasoning is returned, so there is no shorter summary; "omitted" leaves it out."""


class JsonFormat(msgspec.Struct, kw_only=True):
    """A schema that the answer fits."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """What is wanted of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what a prompt consists of; null is the same as absent."""

    model: Annotated[str, Meta(min_length=1, max_length=10_000)]
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    system: str | list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def to_chat(self) -> ChatRequest:
        """Return the chat request with the same prompt.

        Raises:
            ApiError: there is none.
        """
        choice, output, thinking = self.tool_choice, self._output, self._thinking
        messages = chat_messages(self.messages)
        if self.system:
            messages.insert(0, Message("system", system_content(self.system)))
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=[chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=None if choice is None else chat_choice(choice),
            parallel_tool_calls=None if choice is None else choice.is_parallel,
            reasoning_effort=output.effort,
            response_format=None if output.format is None else _response_format(output.format),
            chat_template_kwargs=self._template_variables(),
            include_reasoning=False if thinking is not None and thinking.display == "omitted" else None,
        )

    @property
    def _output(self) -> OutputConfig:
        neutral: Neutral = {"task_budget": ()}
        return read_object(self.output_config or {}, OutputConfig, where="output_config", neutral=neutral)

    @property
    def _thinking(self) -> Thinking | None:
        return None if self.thinking is None else read_object(self.thinking, Thinking, where="thinking", neutral={})

    def _template_variables(self) -> dict[str, Any] | None:
        thinking = self._thinking
        if thinking is None or thinking.type == "adaptive":
            return None
        return {"enable_thinking": thinking.type == "enabled"}


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages; null is the same as absent."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    def to_chat(self) -> ChatRequest:
        """Return the chat request that asks for the same.

        Raises:
            ApiError: there is none.
        """
        self._check()
        chat = super().to_chat()
        chat.max_tokens = self.max_tokens
        chat.stop = self.stop_sequences
        chat.temperature = self.temperature
        chat.top_p = self.top_p
        chat.top_k = self.top_k
        chat.stream = self.stream
        chat.user = None if self.metadata is None else self.metadata.user_id
        return chat

    def _check(self) -> None:
        """Reject an answer that should continue a text, and a budget for thinking that leaves no answer."""
        if self.messages[-1].get("role") == "assistant":
            message = "messages: the last one must not be the assistant's: continuing it is not supported"
            raise ApiError(400, message, param="messages")
        thinking = self._thinking
        if thinking is None:
            return
        budget = thinking.budget_tokens
        if (thinking.type == "enabled") != (budget is not None):
            raise ApiError(
                400, "thinking: expected budget_tokens with type enabled, and with no other", param="thinking"
            )
        if budget is not None and budget >= self.max_tokens:
            message = f"thinking.budget_tokens ({budget}) must be less than max_tokens ({self.max_tokens})"
            raise ApiError(400, message, param="thinking")


def _response_format(format: JsonFormat) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": format.schema, "strict": True}}
