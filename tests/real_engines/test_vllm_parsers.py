"""Our parsers find what vLLM's find, in whole texts and in pieces."""

import json
import random
import warnings

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from serving.model.parsers import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    answer_parser,
    visible_tokens,
    write_calls,
)
from serving.model.parsers.formats import REASONING
from tests.model.parsers.texts import TOOLS, calls_of, content_of, cut, read, reasoning_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # these packages warn when they are loaded
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

pytestmark = pytest.mark.filterwarnings("ignore")

CALLS = [
    ("look_up", '{"text": "two\\nlines, \\"quoted\\" {braces}", "count": 3, "flag": false}'),
    ("other_1", '{"list": [1, "two"], "object": {"key": null}, "ratio": 0.5}'),
]
HARMONY = "openai"
"""vLLM reads it with a library that downloads its vocabulary."""


@pytest.fixture(scope="module")
def tokenizer():
    """Characters are tokens, and so is each marker."""
    alphabet = {character: at for at, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    markers = {token for name in TOOL_CALL_PARSERS for token in visible_tokens(name, "")}
    markers |= {token for name in REASONING_PARSERS for token in visible_tokens("", name)}
    made.add_tokens(sorted(token for token in markers if "DSML" not in token or token[0] == "｜"))
    return PreTrainedTokenizerFast(tokenizer_object=made)


class Theirs:
    """vLLM's parser for one request."""

    def __init__(self, tokenizer, calls, reasoning, tools, **variables):
        kind = ParserManager.get_parser(calls or None, reasoning or None, enable_auto_tools=True)
        request = {"messages": [{"role": "user", "content": "?"}], "chat_template_kwargs": variables, "model": "m"}
        self.request = ChatCompletionRequest(**request, tools=tools or None)
        self.parser = kind(tokenizer, self.request.tools, chat_template_kwargs=variables)
        self.tokenizer = tokenizer

    def whole(self, text):
        """Return what it makes of a whole text: reasoning, content, calls."""
        ids = self.tokenizer.encode(text)
        reasoning, content, calls = self.parser.parse(text, self.request, True, ids)
        return (
            (reasoning or "").strip(),
            (content or "").strip(),
            parsed_calls((call.name, call.arguments) for call in calls or ()),
        )

    def pieces(self, text):
        """Return the same for the text token by token: many of its parsers lose text in longer pieces."""
        ids = self.tokenizer.encode(text)
        reasoning = content = ""
        calls = {}
        for at, token in enumerate(ids):
            part = [token]
            delta = self.parser.parse_delta(
                self.tokenizer.decode(part), part, self.request, [], finished=at + 1 == len(ids)
            )
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                name, arguments = calls.get(call.index, ("", ""))
                function = call.function
                calls[call.index] = name + (function.name or ""), arguments + (function.arguments or "")
        return reasoning.strip(), content.strip(), parsed_calls(calls.values())


def ours(calls, reasoning, tools, text, prompt_end, pieces=()):
    parts = read(answer_parser(calls, reasoning, tools, prompt_end=prompt_end), *(pieces or [text]))
    return reasoning_of(parts).strip(), content_of(parts).strip(), parsed_calls(calls_of(parts))


def parsed_calls(calls):
    return [(name, _parsed(text)) for name, text in calls]


def _parsed(text):
    """Arguments as they are if they were cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return text


TRUE = [(name, json.loads(text)) for name, text in CALLS]
OTHERS_WHOLE = {
    "phi4_mini_json": "it drops other text, and ends an array at the first ] in it",
    "step3": "it leaves arrays and objects strings",
    "internlm": "it takes one call only",
    "llama3_json": "it drops other text",
    "llama4_json": "it drops other text",
    "olmo3": "it drops other text",
    "pythonic": "it finds calls at the start of an answer only",
    "llama4_pythonic": "it finds calls at the start of an answer only",
    "xlam": "it finds calls without a marker at the start of an answer only",
}
OTHERS_IN_PIECES = {
    "phi4_mini_json": "it has no streams",
    "step3": "it leaves arrays and objects strings",
    "internlm": "it takes one call only",
    "jamba": "it streams arguments that are no JSON where they hold an object in an object",
    "hunyuan_a13b": "it streams the marker as content",
}


def test_the_names_are_those_of_vllm():
    assert set(TOOL_CALL_PARSERS) <= set(ToolParserManager.list_registered())
    assert set(REASONING_PARSERS) <= set(ReasoningParserManager.list_registered())


@pytest.mark.parametrize("name", [name for name in TOOL_CALL_PARSERS if name != HARMONY])
@pytest.mark.parametrize("before", ["", "Let me look."])
@pytest.mark.parametrize("num_calls", [0, 1, 2])
def test_calls_are_those_that_vllm_finds(tokenizer, name, before, num_calls):
    text = before + (write_calls(name, CALLS[:num_calls]) if num_calls else "")
    found = ours(name, "", TOOLS, text, "")
    assert found == ("", before, TRUE[:num_calls])
    try:
        theirs = Theirs(tokenizer, name, "", TOOLS).whole(text)
    except ValueError:
        theirs = None
    assert found == theirs or name in OTHERS_WHOLE


@pytest.mark.parametrize("name", [name for name in TOOL_CALL_PARSERS if name != HARMONY])
def test_calls_in_pieces_are_those_that_vllm_finds(tokenizer, name):
    text = write_calls(name, CALLS)
    for seed in range(10):
        rng = random.Random(seed)
        found = ours(name, "", TOOLS, text, "", cut(text, [rng.randrange(len(text)) for _ in range(rng.randrange(40))]))
        assert found == ("", "", TRUE)
    try:
        theirs = Theirs(tokenizer, name, "", TOOLS).pieces(text)
    except ValueError:
        theirs = None
    assert (found == theirs) == (name not in OTHERS_IN_PIECES)


CASES = [
    (
        "hermes",
        'Hi <tool_call>{"name": "look_up", "arguments": {"text": "a"}}</tool_call> after',
        "drops text after calls",
    ),
    ("hermes", "<tool_call>\nnot json\n</tool_call> after", ""),
    ("hermes", '<tool_call>{"name": "look_up"}</tool_call>', ""),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"text": "a',
        "is content if it is whole, and a call in a stream",
    ),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"text": "a"}',
        "is content if it is whole, and a call in a stream",
    ),
    ("hermes", '<tool_call>{"name": "look_up", "arguments": {"text": "a"}}', ""),
    ("hermes", '<tool_call>{"arguments": {"text": "a"}, "name": "look_up"}</tool_call>', ""),
    ("hermes", '<tool_call>{"name": "look_up", "parameters": {"text": "a"}}</tool_call>', "reads no parameters here"),
    (
        "hermes",
        '<tool_call>{"name": "look_up", "arguments": {"text": "a\nb"}}</tool_call>',
        "refuses line breaks in strings",
    ),
    ("hermes", '<tool_call>{"name": "look_up", "arguments": "{}"}</tool_call>', "keeps a string a string"),
    ("hermes", "a < b <tool", ""),
    ("llama3_json", '{"name": "look_up", "parameters": {"text": "a"}}', ""),
    ("llama3_json", '<|python_tag|>{"name": "look_up", "parameters": {"text": "a"}}', ""),
    ("llama3_json", '{"name": "look_up", "arguments": {"text": "a"}}', ""),
    ("llama3_json", '{"name": "look_up"}', ""),
    ("llama3_json", "{'a': 1} is a dict, {} is empty", ""),
    (
        "llama3_json",
        '{"name": "look_up", "parameters": {"text": "a"}}; {"name": "look_up", "parameters": {"text": "b"}}',
        "",
    ),
    ("mistral", '[TOOL_CALLS][{"name": "look_up", "arguments": {"text": "a"}}]', "takes the array for a name"),
    ("mistral", '[TOOL_CALLS]look_up[ARGS]{"text": "a"}', ""),
    ("mistral", '[TOOL_CALLS]look_up{"text": "a"}[TOOL_CALLS]other_1{}', ""),
    ("mistral", '[TOOL_CALLS]look_up{"text": "a', ""),
    ("granite", 'Sure <tool_call> [{"name": "look_up", "arguments": {"text": "a"}}] done', "drops text after calls"),
    ("granite", "<|tool_call|> what", "drops a marker before what is no call"),
    ("qwen3_coder", "<function=look_up>\n<parameter=text>\na\n</parameter>\n</function>", ""),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=text>\na\n<parameter=count>\n3\n</function>\n</tool_call>",
        "loses what follows the unclosed parameter",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=count>\nmany\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=ratio>\n1e3\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=nothing>\nnull\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=list>\n[1, \n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=new>\n12\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=look_up>\n<parameter=text>\n\n a \n\n</parameter>\n</function>\n</tool_call>",
        "",
    ),
    ("qwen3_coder", "<tool_call>\n<function=look_up>\n</function>\n</tool_call> after", "drops text after calls"),
    ("qwen3_coder", "<tool_call>\n<function=look_up>\n<parameter=text>\na", "drops a value that was cut off"),
    ("qwen3_coder", "<tool_call> is a tag", "drops a marker before what is no call"),
    (
        "glm45",
        "<tool_call>look_up\n<arg_key>text</arg_key>\n<arg_value> a </arg_value>\n</tool_call>\nafter",
        "drops text after calls",
    ),
    ("glm45", "<tool_call>unknown</tool_call>", "drops calls of unknown functions"),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>look_up:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|> after",
        "drops text after calls",
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>after",
        "drops text after calls",
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{bad}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    (
        "minimax_m2",
        "<minimax:tool_call>\n<invoke name='look_up'>\n<parameter name=text> a\n</parameter>\n</invoke>\n</minimax:tool_call>",
        "",
    ),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_odd_texts_are_read_as_vllm_reads_them_or_better(tokenizer, case):
    name, text, what_vllm_does = CASES[case]
    found = ours(name, "", TOOLS, text, "")
    assert (found == Theirs(tokenizer, name, "", TOOLS).whole(text)) == (not what_vllm_does)


ENDS_LATE = {"glm45", "glm47", "kimi_k2", "minimax_m2", "mistral", "qwen3", "seed_oss", "step3", "step3p5"}
THOUGHTS = [  # answers, their prompts, settings of the template, what is found, and where vLLM finds otherwise
    # It does not look at the end of the prompt when it reads a whole answer.
    ("thought{end}answer", "{start}", {}, ("thought", "answer"), {"deepseek_v3", "granite", "hunyuan_a13b", "mistral"}),
    ("thought", "{start}", {}, ("thought", ""), {"deepseek_v3", "granite", "hunyuan_a13b", "mistral"}),
    (
        "answer",
        "{start}\n\n{end}\n\n",
        {"enable_thinking": False, "thinking": False},
        ("", "answer"),
        {"deepseek_r1", "ernie45", "minimax_m2", "step3", "step3p5"},
    ),
    # It goes by the settings of the template; for step3, the start is part of the thought.
    ("{start}thought{end}answer", "", {}, ("thought", "answer"), {"deepseek_v3", "step3"}),
    # It drops a second end.
    (
        "{start}thought{end}\n\nanswer{end}",
        "",
        {"enable_thinking": True, "thinking": True},
        ("thought", "answer{end}"),
        ENDS_LATE,
    ),
]


@pytest.mark.parametrize(
    "name", sorted({*REASONING_PARSERS} - {"openai_gptoss", "olmo3"})
)  # they want real vocabularies
@pytest.mark.parametrize("case", range(len(THOUGHTS)))
def test_reasoning_is_what_vllm_finds_or_what_the_prompt_says(tokenizer, name, case):
    answer, prompt, variables, (thought, content), others = THOUGHTS[case]
    markers = {"start": REASONING[name].starts[0], "end": REASONING[name].ends[0]}
    text = answer.format(**markers)
    found = ours("", name, [], text, prompt.format(**markers))
    assert found == (thought, content.format(**markers).strip(), [])
    assert (found == Theirs(tokenizer, "", name, [], **variables).whole(text)) == (name not in others)
