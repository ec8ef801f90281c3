"""Parsers put together from a format of calls and one of reasoning."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serving.model.parsers.answer import ParsedAnswer, Script, ScriptParser, markers
from serving.model.parsers.call_format import CallFormat
from serving.model.parsers.formats import CALLS, REASONING
from serving.model.parsers.harmony import Harmony
from serving.model.parsers.required import chosen_name, read_required
from serving.model.parsers.schema_types import ToolTypes
from serving.model.parsers.thoughts import Thoughts

Tools = Sequence[Mapping[str, Any]]

TOOL_CALL_PARSERS = tuple(sorted(CALLS))
"""Formats in which models call tools."""

REASONING_PARSERS = tuple(sorted(REASONING))
"""Formats in which models think before they answer."""

_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|(?<=<)｜\w+｜|(?<=</)｜\w+｜")
"""What may be a special token in a marker."""


def check_parsers(tool_calls: str, reasoning: str) -> None:
    """Refuse formats that are unknown or do not go together.

    Raises:
        ValueError: they are.
    """
    for what, name, known in (
        ("tool_call_parser", tool_calls, TOOL_CALL_PARSERS),
        ("reasoning_parser", reasoning, REASONING_PARSERS),
    ):
        if name and name not in known:
            raise ValueError(f"{what} {name!r} is unknown: expected one of {', '.join(known)}")
    if tool_calls and reasoning and isinstance(CALLS[tool_calls], Harmony) != isinstance(REASONING[reasoning], Harmony):
        raise ValueError(
            f"tool_call_parser {tool_calls!r} with reasoning_parser {reasoning!r}: "
            "openai and openai_gptoss are one format, which goes with no other"
        )


def answer_parser(tool_calls: str, reasoning: str, tools: Tools = (), *, prompt_end: str | None = None) -> ScriptParser:
    """Return a parser of one answer.

    Args:
        tool_calls: the format in which the model calls tools.
        reasoning: the format in which it thinks.
        tools: the tools that it may call, as OpenAI's API describes them; without any, calls stay text.
        prompt_end: the end of the prompt's text; None if it is unknown.
    """
    calls, thoughts = _formats(tool_calls, reasoning, has_tools=bool(tools))
    answer = ParsedAnswer()
    return ScriptParser(answer, _read(answer, calls, thoughts, ToolTypes(tools), prompt_end))


def _formats(tool_calls: str, reasoning: str, *, has_tools: bool) -> tuple[CallFormat | None, Thoughts | None]:
    calls, thoughts = CALLS.get(tool_calls), REASONING.get(reasoning)
    if isinstance(calls, Harmony) or isinstance(thoughts, Harmony):
        return Harmony(has_tools=has_tools and calls is not None), None
    return (calls if has_tools else None), thoughts


def _read(
    answer: ParsedAnswer, calls: CallFormat | None, thoughts: Thoughts | None, types: ToolTypes, prompt_end: str | None
) -> Script[None]:
    triggers, noise = (calls.triggers if calls else ()), _noise(calls) + _noise(thoughts)
    if thoughts:
        answer.is_thinking = True
        yield from thoughts.read(answer, prompt_end, triggers)
        answer.is_thinking = False
    while triggers or noise:
        found = yield from answer.until(markers(*triggers, *noise), answer.content)
        if not found:
            return
        if calls and found in triggers:
            yield from calls.read(answer, types)
        else:
            yield from answer.expect(found)


def _noise(form: CallFormat | Thoughts | None) -> tuple[str, ...]:
    return form.noise if isinstance(form, (Thoughts, Harmony)) else ()


def required_calls_parser(tool_choice: str | Mapping[str, Any]) -> ScriptParser:
    """Return a parser of one answer that was constrained to `calls_schema` from its start.

    Args:
        tool_choice: "required", or OpenAI's object that names a function.
    """
    answer = ParsedAnswer()
    return ScriptParser(answer, read_required(answer, chosen_name(tool_choice)))


def visible_tokens(tool_calls: str, reasoning: str) -> frozenset[str]:
    """Return what may be a special token among the markers of these formats; without tools, calls have no format."""
    calls, thoughts = _formats(tool_calls, reasoning, has_tools=True)
    if isinstance(calls, Harmony):
        return frozenset((*calls.triggers[:2], *calls.noise))
    return frozenset(
        token for form in (calls, thoughts) if form for text in _texts(form) for token in _TOKEN.findall(text)
    )


def _texts(form: Any) -> list[str]:
    values = [getattr(form, field.name) for field in dataclasses.fields(form)]
    return [
        text for value in values for text in (value if isinstance(value, tuple) else [value]) if isinstance(text, str)
    ]


def write_calls(tool_calls: str, calls: Sequence[tuple[str, str]]) -> str:
    """Return the text in which a model with this format makes calls, of pairs of a name and arguments in JSON."""
    return CALLS[tool_calls].write(calls)
