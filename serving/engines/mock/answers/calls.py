"""The mocker's calls of tools: which answers call some, which they call, and with what arguments."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from serving.engines.mock.forms.errors import FormError
from serving.engines.mock.forms.fit import check_json, json_tokens
from serving.engines.mock.forms.writer import Writer
from serving.model.parsers import write_calls

NO_ARGUMENTS = {"type": "object", "properties": {}}
ATTEMPTS = 4


def call_tokens(
    tools: list[dict[str, Any]], rng: Random, target: int, writer: Writer, parser: str, share: float
) -> list[int]:
    """Return an answer that calls one tool, or two with half the share as its probability.

    Args:
        tools: what may be called, in OpenAI's form.
        rng: makes the choices.
        target: how many tokens the answer should have; there are more only if no arguments are that short.
        writer: writes texts in the model's tokens.
        parser: the format of calls.
        share: share of answers that call a tool.

    Raises:
        FormError: the arguments of a tool cannot be made up.
    """
    count = 1 + (rng.random() < share / 2)
    chosen = [tools[int(rng.random() * len(tools))]["function"] for _ in range(count)]
    seeds = [rng.getrandbits(63) for _ in chosen]
    empty = len(writer.marked(write_calls(parser, [(function["name"], "{}") for function in chosen])))
    shortest: list[int] = []
    room = max(target - empty, 0)
    for attempt in range(ATTEMPTS):
        each = 0 if attempt == ATTEMPTS - 1 else room // count
        calls = [(tool["name"], _arguments(tool, seed, each, writer)) for tool, seed in zip(chosen, seeds, strict=True)]
        tokens = writer.marked(write_calls(parser, calls))
        if not shortest or len(tokens) < len(shortest):
            shortest = tokens
        if len(tokens) <= target:
            break
        room -= max(len(tokens) - target, 1) + attempt
    return shortest


def check_tools(tools: list[dict[str, Any]], writer: Writer) -> None:
    """Refuse tools whose arguments cannot be made up, whichever tool an answer calls.

    Raises:
        FormError: there is one.
    """
    for tool in tools:
        with _named(tool["function"]):
            check_json(_parameters(tool["function"]), writer)


def _arguments(function: dict[str, Any], seed: int, target: int, writer: Writer) -> str:
    with _named(function):
        return writer.text(json_tokens(_parameters(function), seed, target, writer))


def _parameters(function: dict[str, Any]) -> Any:
    parameters = function.get("parameters") or NO_ARGUMENTS
    if isinstance(parameters, dict) and "type" not in parameters:
        return parameters | {"type": "object"}
    return parameters


@contextmanager
def _named(function: dict[str, Any]) -> Iterator[None]:
    """Put the name of a tool before what is wrong with it."""
    try:
        yield
    except FormError as error:
        raise FormError(f'parameters of tool "{function["name"]}": {error}') from error


def callable_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Return those tools that are functions with a name."""
    functions = [(tool, tool.get("function")) for tool in tools or ()]
    return [
        tool for tool, function in functions if isinstance(function, dict) and isinstance(function.get("name"), str)
    ]
