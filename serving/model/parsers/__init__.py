"""Parsers of models' tool calls and reasoning.

    parser = answer_parser("hermes", "qwen3", tools, prompt_end=prompt[-64:])
    parts = parser.push(text), ..., parser.end()

Formats have the names of vLLM's parsers (`TOOL_CALL_PARSERS`, `REASONING_PARSERS`); "" is none. `check_parsers` refuses
unknown names; the other functions expect names that it accepts.

- `answer_parser(tool_calls, reasoning, tools, prompt_end=...)`: for an answer in which the model may call tools. Without
  tools, calls stay text.
- `required_calls_parser(tool_choice)`: for an answer that is constrained from its start, so without reasoning, to
  `calls_schema(tools, tool_choice, parallel=...)`, where `tool_choice` is "required" or names a function.
- `visible_tokens(tool_calls, reasoning)`: the special tokens that these parsers look for, which
  `Tokenizer.detokenizer(visible)` then does not drop. Where there are no tools, give it no format of calls.
- `write_calls(tool_calls, calls)`: the text in which a model makes calls.

The parts do not depend on how the text was cut. Nothing is lost: what is no call, or not a whole one, is content, but
for markers and the white space between them; a call whose arguments end early, or are no JSON, has the arguments that
the model wrote. White space before and after calls is dropped if there is no other content beside it.

Whether an answer begins inside the reasoning is read off the prompt: it does if the prompt ends with the reasoning's
start, or if the answer begins with it. (vLLM assumes by each parser's name, and some settings of the chat template, that it
does.) If the prompt is unknown (None), it is as the format's models usually do.
"""

from serving.model.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    answer_parser,
    check_parsers,
    required_calls_parser,
    visible_tokens,
    write_calls,
)
from serving.model.parsers.required import calls_schema

__all__ = [
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "answer_parser",
    "calls_schema",
    "check_parsers",
    "required_calls_parser",
    "visible_tokens",
    "write_calls",
]
