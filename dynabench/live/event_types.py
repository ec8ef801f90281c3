"""What the events of a streamed answer say, in the form that chat completions have; other APIs are translated to it."""

from typing import Annotated, Any, TypeAlias

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Stated: TypeAlias = Any
"""A count as a server states it: it may be anything, until `EventUsage` leaves out what cannot be."""


def is_count(stated: Stated) -> bool:
    """Return whether a server states a number of tokens that can be."""
    return isinstance(stated, int) and not isinstance(stated, bool) and 0 <= stated < 1 << 31


class EventFunction(msgspec.Struct):
    """An event's addition to a call of a function."""

    name: Any = None
    arguments: Any = None
    """Text, but some servers send an object."""

    def __bool__(self) -> bool:
        """Return whether it adds anything."""
        return bool(self.name or self.arguments)


class ToolCall(msgspec.Struct):
    """An event's addition to one of an answer's tool calls."""

    index: Any = None
    """Which of the calls it adds to; some servers send none."""
    id: Any = None
    function: EventFunction | None = None
    custom: Any = None
    """The call of a tool whose input is no JSON, or that the server itself carries out."""

    def __bool__(self) -> bool:
        """Return whether it adds anything."""
        return bool(self.function or self.custom)


class ReasoningDetail(msgspec.Struct):
    """A piece of reasoning of a server that says which kind it is."""

    text: str | None = None
    summary: str | None = None
    data: str | None = None

    def __bool__(self) -> bool:
        """Return whether it adds anything."""
        return bool(self.text or self.summary or self.data)


class Delta(msgspec.Struct):
    """An event's addition to a message: the model generates tool calls and reasoning as it does text."""

    role: str | None = None
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: EventFunction | None = None
    refusal: str | None = None
    reasoning_details: list[ReasoningDetail] | None = None

    @property
    def has_text(self) -> bool:
        """Whether it adds anything that the model generated."""
        return bool(
            self.content
            or self.reasoning_content
            or self.reasoning
            or (self.tool_calls and any(self.tool_calls))
            or self.function_call
            or self.refusal
            or (self.reasoning_details and any(self.reasoning_details))
        )

    @property
    def is_reasoning(self) -> bool:
        """Whether it adds reasoning."""
        return bool(self.reasoning_content or self.reasoning or self.reasoning_details)


class EventChoice(msgspec.Struct):
    """An event's addition to an answer."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether it adds any text, tool calls and reasoning included."""
        return bool(self.text or (self.delta and self.delta.has_text))

    @property
    def content(self) -> str:
        """What it adds to the answer's text."""
        content = self.text or (self.delta.content if self.delta is not None else None) or ""
        if isinstance(content, str):
            return content
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))

    @property
    def is_reasoning(self) -> bool:
        """Whether it is a thought, not a part of the answer."""
        return self.delta is not None and self.delta.is_reasoning

    @property
    def is_token(self) -> bool:
        """Whether it is a token of our own frontend, perhaps without text; a chat's first event has only a role."""
        return self.has_text or not (self.finish_reason or (self.delta and self.delta.role))


class PromptDetails(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: Stated = None


class CompletionDetails(msgspec.Struct):
    """Details of an answer's tokens."""

    reasoning_tokens: Stated = None


class EventUsage(msgspec.Struct):
    """The tokens that the server counted, without numbers that cannot be."""

    prompt_tokens: Stated = None
    completion_tokens: Stated = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    is_wrong: Any = msgspec.field(default=False, name="(is wrong)")
    """Whether a number was left out; no server says so itself."""

    def __post_init__(self) -> None:
        """Leave out numbers that cannot be."""
        self.is_wrong = self.is_wrong is True
        for part, name in (
            (self, "prompt_tokens"),
            (self, "completion_tokens"),
            (self.prompt_tokens_details, "cached_tokens"),
            (self.completion_tokens_details, "reasoning_tokens"),
        ):
            stated = getattr(part, name, None)
            if stated is not None and not is_count(stated):
                setattr(part, name, None)
                self.is_wrong = True

    @property
    def reasoning_tokens(self) -> int | None:
        """The answer's tokens that are reasoning, shown or not; None if the server does not say."""
        details = self.completion_tokens_details
        return details.reasoning_tokens if details is not None else None

    def after(self, earlier: "EventUsage | None") -> "EventUsage":
        """Return what is known after an earlier event, too: Anthropic's first event has the prompt, and its last the answer."""
        if earlier is None:
            return self
        usage = EventUsage(
            *(getattr(self, name) if getattr(self, name) is not None else getattr(earlier, name) for name in USAGE)
        )
        usage.is_wrong = self.is_wrong or earlier.is_wrong
        return usage


USAGE = EventUsage.__struct_fields__


class Event(msgspec.Struct):
    """The data of one event."""

    choices: list[EventChoice] | msgspec.UnsetType | None = msgspec.UNSET
    usage: EventUsage | None = None
    error: Any = None
    nvext: msgspec.Raw = msgspec.Raw(b"null")
