"""The ways in and out of `dynamo-run`: what asks (`in=`) and what answers (`out=`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from serving.worker.registry import ENGINES

OwnKind: TypeAlias = Literal["pystr", "pytok"]


class UsageError(ValueError):
    """The arguments are invalid or do not fit together."""


@dataclass(frozen=True)
class TextInput:
    """A conversation in the terminal."""


@dataclass(frozen=True)
class StdinInput:
    """One question from standard input."""


@dataclass(frozen=True)
class BatchInput:
    """Every prompt of a file."""

    file: Path


@dataclass(frozen=True)
class HttpInput:
    """An OpenAI server."""


@dataclass(frozen=True)
class EndpointInput:
    """A worker on the network."""

    address: str


@dataclass(frozen=True)
class NoInput:
    """No input: the engine is a node that follows another."""


@dataclass(frozen=True)
class RemoteOutput:
    """Workers found on the network."""

    address: str = ""
    """Only workers of its namespace (empty: all)."""

    def __str__(self) -> str:
        return self.address or "dyn"


@dataclass(frozen=True)
class MockerOutput:
    """A simulated engine."""

    def __str__(self) -> str:
        return "mocker"


@dataclass(frozen=True)
class EchoOutput:
    """An echo (core: of the prompt's tokens, including the template; full: of the last message)."""

    kind: Literal["core", "full"]

    def __str__(self) -> str:
        return f"echo_{self.kind}"


@dataclass(frozen=True)
class OwnFileOutput:
    """The user's own engine, which works on text (pystr) or token ids (pytok)."""

    kind: OwnKind
    file: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.file}"


@dataclass(frozen=True)
class ServerOutput:
    """An OpenAI server such as `vllm serve`."""

    url: str

    def __str__(self) -> str:
        return self.url


@dataclass(frozen=True)
class EngineOutput:
    """An engine that runs models: one of `ENGINES`."""

    name: str

    def __str__(self) -> str:
        return self.name


WayIn: TypeAlias = TextInput | StdinInput | BatchInput | HttpInput | EndpointInput | NoInput
WayOut: TypeAlias = RemoteOutput | MockerOutput | EchoOutput | OwnFileOutput | ServerOutput | EngineOutput

_SIMPLE_IN: dict[str, WayIn] = {"text": TextInput(), "stdin": StdinInput(), "http": HttpInput(), "none": NoInput()}
_SIMPLE_OUT: dict[str, WayOut] = {
    "dyn": RemoteOutput(),
    "mocker": MockerOutput(),
    "echo_core": EchoOutput("core"),
    "echo_full": EchoOutput("full"),
    **{name: EngineOutput(name) for name in ENGINES},
}
_OWN_KINDS: dict[str, OwnKind] = {"pystr": "pystr", "pytok": "pytok"}


def read_way_in(text: str) -> WayIn:
    """Read the text after `in=`.

    Raises:
        UsageError: there is no such way.
    """
    if (way := _SIMPLE_IN.get(text)) is not None:
        return way
    if text.startswith("dyn://"):
        return EndpointInput(text)
    kind, _, file = text.partition(":")
    if kind == "batch" and file:
        return BatchInput(Path(file))
    expected = ", ".join((*_SIMPLE_IN, "batch:FILE", "dyn://NAME"))
    raise UsageError(f"invalid in= option {text!r}; expected one of {expected}")


def read_way_out(text: str) -> WayOut:
    """Read the text after `out=`.

    Raises:
        UsageError: there is no such way, or its file is missing.
    """
    if (way := _SIMPLE_OUT.get(text)) is not None:
        return way
    if text.startswith("dyn://"):
        return RemoteOutput(text)
    if text.startswith(("http://", "https://")):
        return ServerOutput(text)
    name, _, file = text.partition(":")
    kind = _OWN_KINDS.get(name)
    if kind is None:
        expected = ", ".join((*_SIMPLE_OUT, *(f"{own}:FILE" for own in _OWN_KINDS), "http://HOST:PORT"))
        raise UsageError(f"invalid out= option {text!r}; expected one of {expected}")
    if not file:
        raise UsageError(f"out={text} needs a file: out={kind}:FILE")
    return OwnFileOutput(kind, file)
