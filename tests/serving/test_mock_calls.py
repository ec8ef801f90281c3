"""What clients get over HTTP from the mocker if its answers call tools or have a form."""

import json

import openai
import pytest

from tests.support.stacks import running

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "nights": {"type": "integer"}},
                "required": ["city", "nights"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def client(model_path):
    worker = {"model_path": str(model_path), "model_name": "tiny"}
    with (
        running(worker=worker, answers={"tool_call_share": 1.0}) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, **more):
    return client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "A room, please."}], **{"max_tokens": 150} | more
    )


def streamed(client, **more):
    """Return the content, the calls and the finish reason of a stream, joined as clients join them."""
    content, calls, reason, num_parts = "", {}, None, 0
    for event in ask(client, stream=True, **more):
        [choice] = event.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            name, arguments = calls.setdefault(part.index, (part.function.name, ""))
            calls[part.index] = name, arguments + (part.function.arguments or "")
            num_parts += 1
        reason = choice.finish_reason or reason
    return content, list(calls.values()), reason, num_parts


@pytest.mark.parametrize("seed", range(6))
def test_streamed_calls_of_the_mocker_join_to_those_of_the_whole_answer(client, seed):
    [whole] = ask(client, tools=TOOLS, seed=seed).choices
    content, calls, reason, num_parts = streamed(client, tools=TOOLS, seed=seed)
    assert calls == [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert (content, reason) == (whole.message.content or "", whole.finish_reason) == ("", "tool_calls")
    assert num_parts > len(calls)
    for name, arguments in calls:
        assert json.loads(arguments).keys() == {"book": {"city", "nights"}, "now": set()}[name]


def guided(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def test_a_schema_with_a_keyword_of_the_wrong_type_gets_400_and_other_streams_go_on(client):
    other = ask(client, stream=True, max_tokens=300)
    next(iter(other))
    for _ in range(3):  # each worker has seen some
        with pytest.raises(
            openai.BadRequestError, match=r"#/properties/a: .*format.* is an array; a text was expected"
        ):
            ask(client, **guided({"type": "object", "properties": {"a": {"format": ["date"]}}, "required": ["a"]}))
    assert [event.choices[0].finish_reason for event in other][-1] == "length"
    assert json.loads(ask(client, **guided({"const": 5})).choices[0].message.content) == 5


def test_long_texts_of_a_small_schema_are_cut_off_at_the_limit(client):
    schema = {"type": "array", "minItems": 120, "items": {"type": "string", "minLength": 60000}}
    answer = ask(client, **guided(schema), max_tokens=20)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 20)
    assert answer.choices[0].message.content.startswith('["')
