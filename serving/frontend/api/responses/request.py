"""The request of a response: its fields, their limits, and the chat request that asks for the same."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from serving.frontend.api.errors import ApiError
from serving.frontend.api.fields import Neutral, read_object
from serving.frontend.api.openai import ChatRequest, Label, Message, Tokens, Tools, Verbosity
from serving.frontend.api.responses.items import chat_messages
from serving.frontend.api.responses.tools import Choice, chat_choice, chat_tool

MAX_ITEMS = 10_000
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Summary = Literal["auto", "concise", "detailed"]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ENCRYPTED = "reasoning.encrypted_content"
INCLUDED = (
    ENCRYPTED, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results",
)  # fmt: skip
"""What may be included: reasoning, and facts about tools and images that no answer here has."""

NEVER = (
    "access_programs", "background_options", "conversation", "image", "moderation", "prompt", "user_location",
)  # fmt: skip
NEUTRAL: Neutral = {
    **dict.fromkeys(NEVER, ()),
    "background": (False,),
    "context_management": ([],),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that cannot be honoured, with the values that ask for nothing."""


class Reasoning(msgspec.Struct, kw_only=True):
    """How much a model is to think, and what its client wants to see of it."""

    effort: Effort | None = None
    summary: Summary | None = None
    """The whole reasoning is returned, so there is no shorter summary."""
    generate_summary: Summary | None = None
    """The same, by its older name."""


REASONING_NEUTRAL: Neutral = {"context": ("auto",), "mode": ("standard",)}


class TextFormat(msgspec.Struct, kw_only=True):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    """What is wanted of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Verbosity | None = None
    """A wish that no engine here gets."""


class ResponseOptions(msgspec.Struct, kw_only=True):
    """What a response needs of its request."""

    echo: dict[str, Any]
    """The fields that repeat the request."""
    wants_sealed: bool = False
    """Whether the reasoning is wanted in its opaque form, too."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses; null is the same as absent."""

    model: Annotated[str, Meta(min_length=1, max_length=10_000)]
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    """A text, or items: messages, calls of functions, their outputs, reasoning."""
    instructions: str | None = None
    """A system message in front of the input; a later response does not inherit it."""
    previous_response_id: Label | None = None
    tools: Tools | None = None
    tool_choice: Choice | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    """A limit on calls of OpenAI's own tools, which there are none of here."""
    text: dict[str, Any] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: Tokens | None = None
    """For the whole answer, reasoning included. Default: what the model's context leaves."""
    reasoning: dict[str, Any] | None = None
    include: Annotated[list[Label], Meta(max_length=16)] | None = None
    stream: bool | None = None
    store: bool | None = None
    """Whether the response is kept, so that it can be read and continued. Default: true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, as in vLLM."""

    # These do not affect the answer's text.
    metadata: Metadata | None = None
    user: Label | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None

    def to_chat(self) -> ChatRequest:
        """Return the chat request that asks for the same.

        Raises:
            ApiError: there is none.
        """
        self._check_included()
        effort = self._reasoning.effort
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=[chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._response_format(),
            reasoning_effort=effort,
            chat_template_kwargs=self.chat_template_kwargs,
            stream=self.stream,
            user=self.user,
        )

    def options(self) -> ResponseOptions:
        """Return what a response needs of its request, which has been translated and so is valid."""
        return ResponseOptions(echo=self._echo(), wants_sealed=ENCRYPTED in (self.include or ()))

    def _echo(self) -> dict[str, Any]:
        reasoning = self._reasoning
        return {
            "model": self.model,
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "tools": [{"parameters": None, "strict": None} | tool for tool in self.tools or ()],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "max_tool_calls": self.max_tool_calls,
            "text": {"format": {"type": "text"}} | _present(self.text),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.max_output_tokens,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
            "truncation": "disabled",
            "background": False,
            "store": self.store is not False,
            "metadata": self.metadata or {},
            "user": self.user,
        }

    @property
    def _reasoning(self) -> Reasoning:
        return read_object(self.reasoning or {}, Reasoning, where="reasoning", neutral=REASONING_NEUTRAL)

    def _messages(self) -> list[Message]:
        items: list[dict[str, Any]] = (
            [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input or []
        )
        messages = chat_messages(items)
        if self.instructions:
            messages.insert(0, Message("system", self.instructions))
        if not messages:
            raise ApiError(400, "input: expected a text or at least one item", param="input")
        return messages

    def _response_format(self) -> dict[str, Any] | None:
        options = read_object(self.text or {}, TextOptions, where="text", neutral={})
        if options.format is None:
            return None
        format = read_object(options.format, TextFormat, where="text.format", neutral={})
        if format.type != "json_schema":
            return {"type": format.type}
        if format.name is None or format.schema is None:
            raise ApiError(400, "text.format: a json_schema needs a name and a schema", param="text.format")
        names = ("name", "description", "schema", "strict")
        return {"type": "json_schema", "json_schema": _present({name: getattr(format, name) for name in names})}

    def _check_included(self) -> None:
        for name in self.include or ():
            if name not in INCLUDED:
                message = f"include: {name!r} is not supported; supported: {', '.join(INCLUDED)}"
                raise ApiError(400, message, param="include")


def _present(fields: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (fields or {}).items() if value is not None}
