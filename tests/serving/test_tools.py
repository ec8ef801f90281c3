"""Tools, reasoning and structured output: what clients send reaches the engine, what the model says reaches clients apart."""

import json

import httpx
import openai
import pytest

from serving.frontend.api.structure import FIELDS
from tests.support.speaking_engine import ASKED

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Look out of the window",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
CONSTRAINTS = ("response_format", "structured_outputs", *FIELDS)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, text, model="agent", **more):
    return client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}], **more)


def streamed(client, text, **more):
    """Return the text, the reasoning, the calls and the finish reason of a stream, joined as clients join them."""
    content, reasoning, calls, reason = "", "", {}, None
    for event in ask(client, text, stream=True, **more):
        [choice] = event.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                assert call.type == "function"
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, reasoning, list(calls.values()), reason


def test_calls_in_the_models_own_format_are_tool_calls(client):
    choice = ask(client, f"Let me look. {CALL}\n{SECOND}", tools=[WEATHER, TIME]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me look. ", "tool_calls")
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert (second.function.name, json.loads(second.function.arguments)) == ("get_time", {})
    assert first.id.startswith("call_") and first.id != second.id


def test_an_answer_that_only_calls_has_no_content(client):
    message = ask(client, CALL, tools=[WEATHER]).choices[0].message
    assert message.content is None


def test_a_stop_string_ends_an_answer_inside_a_call(client):
    choice = ask(client, CALL, tools=[WEATHER], stop='e"').choices[0]
    assert (choice.message.content, choice.finish_reason) == ('<tool_call>\n{"nam', "stop")
    choice = ask(client, CALL, tools=[WEATHER], stop="Rome").choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"city": "'


def test_streamed_calls_come_in_deltas(client):
    content, _, calls, reason = streamed(client, f"So. {CALL}{SECOND}", tools=[WEATHER, TIME])
    assert (content, reason) == ("So. ", "tool_calls")
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        ("get_weather", {"city": "Rome"}),
        ("get_time", {}),
    ]


def test_reasoning_comes_apart_unless_the_client_does_not_want_that(client):
    text = "<think>hm, so</think>Yes."
    assert streamed(client, text) == ("Yes.", "hm, so", [], "stop")
    answer = ask(client, text)
    assert answer.choices[0].message.reasoning_content == "hm, so"
    assert answer.usage.completion_tokens == len(text) > answer.usage.completion_tokens_details.reasoning_tokens >= 6
    left_out = ask(client, text, extra_body={"include_reasoning": False}).choices[0].message
    assert (left_out.content, hasattr(left_out, "reasoning_content")) == ("Yes.", False)
    assert ask(client, text, extra_body={"separate_reasoning": False}).choices[0].message.content == text


def test_without_tools_or_with_tool_choice_none_calls_stay_text(client):
    assert ask(client, CALL).choices[0].message.content == CALL
    assert ask(client, CALL, tools=[WEATHER], tool_choice="none").choices[0].message.content == CALL
    assert ask(client, CALL, "plain", tools=[WEATHER]).choices[0].message.content == CALL


def test_a_second_call_is_left_out_if_calls_must_not_be_parallel(client):
    asked = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
    [call] = ask(client, CALL + SECOND, **asked).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert len(streamed(client, CALL + SECOND, **asked)[2]) == 1


def test_a_required_call_is_a_constraint_for_the_engine_and_a_call_for_the_client(client):
    said = '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    choice = ask(client, said, tools=[WEATHER, TIME], tool_choice="required").choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Rome"})
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [(_, name, arguments)] = streamed(client, said, tools=[WEATHER, TIME], tool_choice="required")[2]
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Rome"})


def test_the_arguments_of_a_named_function_are_the_whole_answer(client):
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(client, '{"city": "Rome"}', tools=[WEATHER, TIME], tool_choice=named).choices[0]
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments, choice.finish_reason) == (
        "get_weather",
        '{"city": "Rome"}',
        "stop",
    )


def got(client, **more):
    """Return the constraint and the tools that the engine got."""
    answer = ask(client, ASKED, **more).choices[0].message
    return json.loads(answer.content or answer.tool_calls[0].function.arguments)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            {"json": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json": SCHEMA}),
        ({"structured_outputs": {"json_object": True}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"json_schema": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ],
)
def test_every_form_of_a_constraint_reaches_the_engine_as_one(client, asked, wanted):
    assert got(client, extra_body=asked) == [wanted, None]


@pytest.mark.parametrize(
    "nothing",
    [
        *({name: value} for name in CONSTRAINTS for value in (None, False, "", [], {})),
        *({"structured_outputs": {kind: value}} for kind in ("json", "regex", "foo") for value in (None, False, "", [], {})),
        {"structured_outputs": {}, "regex": "", "tools": []},
        {"verbosity": "low"},
    ],
)  # fmt: skip
def test_a_constraint_with_an_empty_value_is_none(client, nothing):
    assert got(client, extra_body=nothing) == [None, None]


def test_an_answer_that_must_call_a_tool_has_no_other_form(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert got(client, tools=[TIME], response_format=form)[0] == {"json": SCHEMA}
    named = {"type": "function", "function": {"name": "get_time"}}
    alone = got(client, tools=[TIME], tool_choice=named)
    assert got(client, tools=[TIME], tool_choice=named, response_format=form) == alone != [{"json": SCHEMA}, None]


def test_tools_that_the_model_may_call_reach_the_engine(client):
    assert got(client, tools=[WEATHER])[1] == [WEATHER]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
    assert got(client, tools=[WEATHER, TIME], tool_choice=allowed)[1] == [TIME]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, "structured_outputs"),
        ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": [TIME, WEATHER, {"type": "function", "function": {"name": "get_time", "strict": True}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {}}, "tool_choice"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(url, asked, param):
    body = {"model": "agent", "messages": [{"role": "user", "content": "x"}], **asked}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in CONSTRAINTS for value in (True, 5, ["a", 1])),
        *((name, {"a": 1}) for name in CONSTRAINTS if FIELDS.get(name) != "json"),
    ],
)
def test_a_constraint_of_another_type_is_refused_by_name(url, name, value):
    body = {"model": "agent", "messages": [{"role": "user", "content": "x"}], name: value}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text


def test_an_engine_without_constraints_cannot_be_forced_to_call(client):
    with pytest.raises(openai.BadRequestError, match=r"honours no constraints of kind json \(it honours: none\)"):
        ask(client, "x", "plain", tools=[WEATHER], tool_choice="required")


def test_logprobs_of_split_answers_name_every_token(client):
    text, asked = f"<think>hm</think>So. {CALL}", {"tools": [WEATHER], "logprobs": True}
    whole = ask(client, text, **asked).choices[0].logprobs.content
    assert "".join(each.token for each in whole) == text
    events = [event.choices[0] for event in ask(client, text, stream=True, **asked)]
    pieces = [each.token for choice in events if choice.logprobs for each in choice.logprobs.content]
    assert "".join(pieces) == text


def test_a_schema_that_is_nested_too_deeply_or_too_large_is_refused(url):
    deep = "1"
    for _ in range(100):
        deep = '{"a": ' + deep + "}"
    body = '{"model": "agent", "messages": [{"role": "user", "content": "x"}], "guided_json": ' + deep + "}"
    answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")
    large = {"type": "object", "description": "x" * 300_000}
    body = {"model": "agent", "messages": [{"role": "user", "content": "x"}], "guided_json": large}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).json()["error"]["param"] == "guided_json"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_half_a_surrogate_pair_that_a_model_escapes_is_replaced(url, path, is_streamed):
    said = r'<tool_call>{"name": "\ud800", "arguments": "{\"city\": \"\udc00\"}"}</tool_call>'
    tool = {"name": "get_time", "parameters": {"type": "object"}}
    body = {
        "/v1/chat/completions": {"tools": [TIME], "messages": [{"role": "user", "content": said}]},
        "/v1/responses": {"tools": [{"type": "function", **tool}], "input": said},
        "/v1/messages": {
            "tools": [{"name": "get_time", "input_schema": {"type": "object"}}],
            "messages": [{"role": "user", "content": said}],
            "max_tokens": 500,
        },
    }[path]
    answer = httpx.post(url + path, json={"model": "agent", "stream": is_streamed, **body})
    assert answer.status_code == 200 and answer.text.count("\ufffd") >= 2, answer.text
