"""What single formats are about."""

import json
import sys

import pytest

from serving.model.parsers import answer_parser, visible_tokens, write_calls
from serving.model.parts import Arguments, CallStart, Content, Reasoning
from tests.model.parsers.texts import TOOLS, calls_of, content_of, parsed, read

HERMES = '<tool_call>\n{"name": "look_up", "arguments": {"text": "a"}}\n</tool_call>'


def parse(text, calls="hermes", reasoning="", **options):
    return read(answer_parser(calls, reasoning, TOOLS, **options), text)


def test_arguments_are_passed_on_as_they_arrive():
    parser = answer_parser("hermes", "", TOOLS)
    assert parser.push("Let me see.\n<tool") == [Content("Let me see.\n")]
    assert parser.push('_call>\n{"name": "look') == []
    assert parser.push('_up", "arguments": {"te') == [CallStart("look_up"), Arguments('{"te')]
    assert parser.push('xt": "a"') == [Arguments('xt": "a"')]
    assert parser.push("}}\n</tool_call>") == [Arguments("}")]
    assert parser.end() == []


def test_text_is_passed_on_but_for_what_may_be_a_marker():
    parser = answer_parser("hermes", "", TOOLS)
    assert parser.push("1 <") == [Content("1 ")]
    assert parser.push(" 2 <tool_") == [Content("< 2 ")]
    assert parser.push("box>") == [Content("<tool_box>")]


def test_a_string_between_tags_is_passed_on_as_it_arrives():
    parser = answer_parser("qwen3_coder", "", TOOLS)
    parser.push("<tool_call>\n<function=look_up>\n<parameter=text>\n")
    assert parser.push('say "hi"\n') == [Arguments('say \\"hi\\"')]
    assert parser.push("again\n</param") == [Arguments("\\nagain")]
    assert parser.push("eter>\n</function>\n</tool_call>") == [Arguments('"}')]


def test_white_space_beside_calls_is_no_content():
    assert parse(f"\n\n{HERMES}\n{HERMES}\n") == parse(HERMES + HERMES)
    assert content_of(parse(f"Hi.\n{HERMES}\n\nBye.\n")) == "Hi.\n\n\nBye.\n"
    assert parse(" \n ") == [Content(" \n ")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nlook_up()\n</tool_call>",
        '<tool_call>{"name": "look_up"}</tool_call>',
        '<tool_call>{"name": "look_up", "arguments": null}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look_up" "arguments": {}}</tool_call>',
        '<tool_call>[{"name": "look_up"',
        "<tool_call>",
        "<tool_cal",
    ],
)
def test_what_is_no_call_is_content(text):
    assert parse(text) == [Content(text)]


def test_a_call_after_what_is_none_is_found():
    assert parse("<tool_call> is a tag. " + HERMES) == [
        Content("<tool_call> is a tag. "),
        CallStart("look_up"),
        Arguments('{"text": "a"}'),
    ]


def test_faulty_arguments_are_those_that_the_model_wrote():
    text = '<tool_call>{"name": "look_up", "arguments": {"text": a}}</tool_call> Sorry.'
    assert parse(text) == [CallStart("look_up"), Arguments('{"text": a}}'), Content(" Sorry.")]


def test_arguments_may_come_before_the_name_or_in_a_string():
    assert parse('<tool_call>{"arguments": {"text": "a"}, "name": "look_up"}</tool_call>') == parse(HERMES)
    string = json.dumps('{"text": "a"}')
    assert parse(f'<tool_call>{{"name": "look_up", "arguments": {string}}}</tool_call>') == parse(HERMES)


def test_line_breaks_in_strings_are_escaped():
    text = '<tool_call>{"name": "look_up", "arguments": {"text": "a\n\tb"}}</tool_call>'
    assert parsed(calls_of(parse(text))) == [("look_up", {"text": "a\n\tb"})]


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("text", "12", "12"),
        ("count", "12", 12),
        ("count", "many", "many"),
        ("ratio", "0.5", 0.5),
        ("ratio", "nan", "nan"),
        ("flag", "True", True),
        ("nothing", "null", None),
        ("list", "[1, 2", "[1, 2"),
        ("object", '{"a": [null]}', {"a": [None]}),
        ("unknown", "12", "12"),
    ],
)
def test_values_between_tags_have_the_types_of_the_schema(parameter, text, value):
    answer = f"<tool_call>look_up\n<arg_key>{parameter}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert parsed(calls_of(parse(answer, "glm45"))) == [("look_up", {parameter: value})]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 3),
        ({"type": ["string", "null"]}, "3"),
        ({"enum": [1, 2, 3]}, 3),
        ({"$ref": "#/$defs/Number"}, 3),
        ({"$ref": "#/$defs/Endless"}, "3"),
        ({"type": "boolean"}, 3),
        ({}, "3"),
        (True, "3"),
        (None, "3"),
    ],
)
def test_types_are_found_in_all_that_a_schema_says(schema, value):
    parameters = {
        "properties": {"x": schema},
        "$defs": {"Number": {"type": "integer"}, "Endless": {"$ref": "#/$defs/Endless"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call>f<arg_key>x</arg_key><arg_value>3</arg_value></tool_call>"
    assert parsed(calls_of(read(answer_parser("glm45", "", tools), text))) == [("f", {"x": value})]


def test_deepseek_says_which_values_are_strings():
    text = write_calls("deepseek_v32", [("new", '{"a": "1", "b": 1}')])
    assert 'name="a" string="true">1<' in text
    assert 'name="b" string="false">1<' in text
    assert parsed(calls_of(parse(text, "deepseek_v32"))) == [("new", {"a": "1", "b": 1})]


def test_kimi_names_its_calls():
    assert parse(write_calls("kimi_k2", [("look_up", "{}"), ("look_up", "{}")]), "kimi_k2") == [
        CallStart("look_up", "functions.look_up:0"),
        Arguments("{}"),
        CallStart("look_up", "functions.look_up:1"),
        Arguments("{}"),
    ]


def test_mistral_writes_an_array_or_names():
    expected = [CallStart("look_up"), Arguments('{"text": "a"}'), CallStart("other_1"), Arguments("{}")]
    for text in (
        '[TOOL_CALLS]look_up{"text": "a"}[TOOL_CALLS]other_1{}',
        '[TOOL_CALLS]look_up[ARGS]{"text": "a"}[TOOL_CALLS]other_1[ARGS]{}',
        '[TOOL_CALLS] [{"name": "look_up", "arguments": {"text": "a"}}, {"name": "other_1", "arguments": {}}]',
    ):
        assert parse(text, "mistral") == expected


def test_llama_needs_no_marker():
    call = '{"name": "look_up", "parameters": {"text": "a"}}'
    expected = [CallStart("look_up"), Arguments('{"text": "a"}')]
    assert parse(call, "llama3_json") == parse("<|python_tag|>" + call, "llama3_json") == expected
    assert parse(f"{call}; {call}", "llama3_json") == expected * 2
    code = "def f(): return {1: {}}"
    assert parse(code, "llama3_json") == [Content(code)]


HARMONY = (
    "<|channel|>analysis<|message|>They want a.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"text": "a"}<|call|>'
)


def test_harmony_has_channels_for_thoughts_content_and_calls():
    parts = parse(HARMONY, "openai", "openai_gptoss")
    assert parts == [
        Reasoning("They want a."),
        Content("I look it up."),
        CallStart("look_up"),
        Arguments('{"text": "a"}'),
    ]
    assert read(answer_parser("", "openai_gptoss"), HARMONY) == [parts[0], Content('I look it up.{"text": "a"}')]
    assert parse("<|channel|>final<|message|>Hello.<|return|>", "openai") == [Content("Hello.")]
    recipient_first = ' to=functions.look_up<|channel|>commentary json<|message|>{"text": "a"}<|call|>'
    assert parse(recipient_first, "openai") == parts[2:]
    assert parse("no channel at all", "openai") == [Content("no channel at all")]


@pytest.mark.parametrize(
    ("prompt_end", "answer", "parts"),
    [
        ("<|assistant|><think>\n", "hm</think>Hello", [Reasoning("hm"), Content("Hello")]),
        ("<|assistant|><think>\n", "hm", [Reasoning("hm")]),
        ("<|assistant|><think>\n", "<think>hm</think>Hello", [Reasoning("hm"), Content("Hello")]),
        ("<|assistant|><think>\n\n</think>\n\n", "Hello", [Content("Hello")]),
        ("<|assistant|>\n", "\n<think>hm</think>Hello", [Reasoning("hm"), Content("Hello")]),
        ("<|assistant|>\n", "Hello, a <think> tag</think>", [Content("Hello, a <think> tag</think>")]),
        (None, "hm</think>Hello", [Reasoning("hm"), Content("Hello")]),
    ],
)
def test_whether_an_answer_begins_with_reasoning_is_seen_in_the_prompt(prompt_end, answer, parts):
    assert parse(answer, "", "qwen3", prompt_end=prompt_end) == parts


def test_a_call_ends_reasoning_that_was_not_closed():
    call = parse(HERMES)
    assert parse("hm " + HERMES, "hermes", "qwen3", prompt_end="<think>") == [Reasoning("hm "), *call]
    assert parse("hm " + HERMES, "hermes", "deepseek_r1", prompt_end="<think>") == [Reasoning("hm " + HERMES)]
    assert parse(f"hm</think>\n\n{HERMES}", "hermes", "deepseek_r1", prompt_end="<think>") == [Reasoning("hm"), *call]


def test_granite_and_hunyuan_write_words_around_their_answers():
    text = "Here's my thought process: hm Here is my response: Hello"
    assert parse(text, "", "granite", prompt_end="") == [Reasoning(" hm "), Content(" Hello")]
    text = "<think>\nhm\n</think>\n<answer>\nHello\n</answer>"
    assert parse(text, "", "hunyuan_a13b", prompt_end="") == [Reasoning("hm"), Content("Hello")]


def test_special_tokens_of_a_format_are_visible_to_its_parser_only():
    assert visible_tokens("mistral", "mistral") == {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}
    assert visible_tokens("", "mistral") == {"[THINK]", "[/THINK]"}
    assert visible_tokens("llama3_json", "") == {"<|python_tag|>"}
    assert visible_tokens("internlm", "") == {"<|action_start|>", "<|plugin|>", "<|action_end|>"}
    assert {"｜DSML｜"} <= visible_tokens("deepseek_v32", "")
    assert {"<|channel|>", "<|message|>"} <= visible_tokens("", "openai_gptoss")
    assert visible_tokens("", "") == frozenset()


@pytest.mark.parametrize(("name", "start"), [("hermes", "<tool_call>"), ("kimi_k2", "<|tool_calls_section_begin|>")])
def test_a_piece_is_as_much_work_late_in_an_answer_as_early(name, start):
    arguments = json.dumps({"text": "some <words> " * 4000})
    text = write_calls(name, [("look_up", arguments)]) + start + "x" * 1000
    parser, work = answer_parser(name, "", TOOLS), []
    for at in range(0, len(text), 4):
        calls = []
        sys.setprofile(lambda frame, event, what, calls=calls: calls.append(event))
        parser.push(text[at : at + 4])
        sys.setprofile(None)
        work.append(len(calls))
        assert len(parser._answer._text) <= 40  # what is looked at again
    assert max(work[-3000:]) <= max(work[:3000])
