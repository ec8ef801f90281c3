"""The messages of a chat, by their roles: under the names of OpenAI's types, which errors show. vLLM takes any other role, too."""

from typing import Annotated, Any, Literal, NotRequired, Required

from pydantic import WrapValidator
from typing_extensions import TypedDict

Content = str | list[dict[str, Any]]


class ChatCompletionDeveloperMessageParam(TypedDict, total=False):
    """Of the application's author."""

    content: Required[Content]
    role: Required[Literal["developer"]]
    name: str


class ChatCompletionSystemMessageParam(TypedDict, total=False):
    """The same, by its former name."""

    content: Required[Content]
    role: Required[Literal["system"]]
    name: str


class ChatCompletionUserMessageParam(TypedDict, total=False):
    """Of the user."""

    content: Required[Content]
    role: Required[Literal["user"]]
    name: str


class ChatCompletionAssistantMessageParam(TypedDict, total=False):
    """Of the model."""

    role: Required[Literal["assistant"]]
    content: Content | None
    name: str
    refusal: str | None
    tool_calls: list[dict[str, Any]]


class ChatCompletionToolMessageParam(TypedDict, total=False):
    """What a tool returned."""

    content: Required[Content]
    role: Required[Literal["tool"]]
    tool_call_id: Required[str]


class ChatCompletionFunctionMessageParam(TypedDict):
    """The same, of a function."""

    content: str | None
    name: str
    role: Literal["function"]


class CustomChatCompletionMessageParam(TypedDict):
    """Anybody's."""

    role: str
    content: NotRequired[Content]
    name: NotRequired[str]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]
    reasoning: NotRequired[str | None]


_Known = (
    ChatCompletionDeveloperMessageParam
    | ChatCompletionSystemMessageParam
    | ChatCompletionUserMessageParam
    | ChatCompletionAssistantMessageParam
    | ChatCompletionToolMessageParam
    | ChatCompletionFunctionMessageParam
    | CustomChatCompletionMessageParam
)


def _as_it_came(value: Any, check: Any) -> Any:
    check(value)
    return value


Message = Annotated[_Known, WrapValidator(_as_it_came)]
"""A message, checked and left as it came: templates may read fields that no type has."""
