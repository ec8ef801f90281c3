"""The Responses API's types, against those of OpenAI's client."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from serving.frontend.api.answer_format import Usage
from serving.frontend.api.errors import ApiError
from serving.frontend.api.openai import ChatRequest
from serving.frontend.api.responses.format import ResponsesFormat
from serving.frontend.api.responses.request import ResponsesRequest
from serving.frontend.api.unsupported import check_fields
from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning
from tests.support.sdk_events import events_of, models_in

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(num_prompt=10, num_completion=7, num_cached=4, num_reasoning=2)
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
ALL_KINDS: list[Part] = [
    Reasoning("It is "),
    Reasoning("about weather."),
    Content("Let me "),
    Content('look: "☔"\n'),
    CallStart("weather"),
    Arguments('{"city":'),
    Arguments('"Paris"}'),
    CallStart("weather", "functions.weather:1"),
    Arguments('{"city":"Rome"}'),
]


def _request(**fields: Any) -> ResponsesRequest:
    body = msgspec.json.encode({"model": "m", "input": "Hi.", **fields})
    request = msgspec.json.decode(body, type=ResponsesRequest)
    check_fields(body, request)
    return request


def _chat(**fields: Any) -> ChatRequest:
    return _request(**fields).to_chat()


def _messages(**fields: Any) -> list[dict[str, Any]]:
    return msgspec.to_builtins(_chat(**fields).messages)


def _format(**fields: Any) -> ResponsesFormat:
    request = _request(**fields)
    request.to_chat()
    return ResponsesFormat(request.options(), seed="5eed", fingerprint="5eed", created_at=1_700_000_000)


def _stream(format: ResponsesFormat, parts: list[Part], reason: str = "stop") -> bytes:
    events = [format.first(Usage(10)), *(format.parts([part]) for part in parts), format.last(reason, USAGE)]
    return b"".join(events)


def _check(event: dict[str, Any]) -> None:
    """Check an event against the client's types; they let further fields through, which must not be typing errors."""
    further = {
        name for model in models_in(EVENTS.validate_python(event, strict=True)) for name in model.model_extra or ()
    }
    assert further <= {"store"}


def _client(answer: Callable[[dict[str, Any]], bytes]) -> openai.OpenAI:
    def respond(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        return httpx.Response(200, content=answer(body), headers={"content-type": kind})

    transport = httpx.MockTransport(respond)
    return openai.OpenAI(
        base_url="http://test/v1", api_key="none", max_retries=0, http_client=httpx.Client(transport=transport)
    )


def test_a_stream_has_all_events_of_all_kinds_of_items_in_order():
    types = [event["type"].removeprefix("response.") for event in events_of(_stream(_format(), ALL_KINDS))]
    opened = ["output_item.added", "content_part.added"]
    closed = ["content_part.done", "output_item.done"]
    calls = "function_call_arguments"
    assert types == [
        *("created", "in_progress"),
        *(*opened, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *closed),
        *(*opened, "output_text.delta", "output_text.delta", "output_text.done", *closed),
        *("output_item.added", f"{calls}.delta", f"{calls}.delta", f"{calls}.done", "output_item.done"),
        *("output_item.added", f"{calls}.delta", f"{calls}.done", "output_item.done"),
        "completed",
    ]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize("parts", [ALL_KINDS, ALL_KINDS[2:4], ALL_KINDS[4:6], ALL_KINDS[:1], []])
def test_every_event_is_of_a_type_that_the_client_knows(parts, reason):
    request = {"tools": [WEATHER], "text": {"format": {"type": "json_object"}}, "metadata": {"a": "b"}}
    for event in events_of(_stream(_format(**request, include=["reasoning.encrypted_content"]), parts, reason)):
        _check(event)


def test_events_are_numbered_without_gaps():
    numbers = [event["sequence_number"] for event in events_of(_stream(_format(), ALL_KINDS))]
    assert numbers == list(range(len(numbers)))


def test_the_items_of_an_answer_are_what_the_model_thought_said_and_called():
    response = Response.model_validate_json(_format().whole(ALL_KINDS, "tool_calls", USAGE), strict=True)
    thought, said, first, second = response.output
    assert (thought.content[0].text, said.content[0].text) == ("It is about weather.", 'Let me look: "☔"\n')
    assert response.output_text == 'Let me look: "☔"\n'
    assert (first.name, first.arguments, second.arguments) == ("weather", '{"city":"Paris"}', '{"city":"Rome"}')
    assert (first.call_id, second.call_id) == ("call_5eed00", "functions.weather:1")
    assert [item.status for item in response.output] == ["completed"] * 4
    assert len({item.id for item in response.output}) == 4


def test_calls_that_a_model_gave_the_same_id_have_ids_of_their_own():
    response = json.loads(
        _format().whole([CallStart("a", "1"), CallStart("b", "1"), CallStart("c", "1")], "tool_calls", USAGE)
    )
    assert [item["call_id"] for item in response["output"]] == ["1", "call_5eed01", "call_5eed02"]


def test_a_cut_answer_is_incomplete_and_so_is_only_its_last_item():
    format = _format()
    response = json.loads(format.whole(ALL_KINDS[:6], "length", USAGE))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert events_of(_stream(_format(), ALL_KINDS[:6], "length"))[-1]["type"] == "response.incomplete"


def test_usage_counts_cached_tokens_in_the_input_and_reasoning_in_the_output():
    usage = json.loads(_format().whole([Content("Hi")], "stop", USAGE))["usage"]
    assert usage == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }


def test_a_failing_stream_closes_its_item_and_ends_with_the_error_and_the_failed_response():
    format = _format()
    events = events_of(
        format.first(USAGE) + format.parts([Content("Hi")]) + format.failed(ApiError(503, "no worker left"))
    )
    assert [event["type"] for event in events[-3:]] == ["response.output_item.done", "error", "response.failed"]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "no worker left"}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    for event in events:
        _check(event)


def test_a_stream_may_fail_before_its_first_part():
    format = _format()
    for event in events_of(format.first(USAGE) + format.failed(ApiError(429, "later"))):
        _check(event)


def _with_ends(kinds: list[list[Part]]) -> list[Part]:
    return [part for parts in kinds for part in parts]


TEXT = st.text(max_size=5)
ITEMS = st.one_of(
    st.lists(st.builds(Content, TEXT), max_size=3),
    st.lists(st.builds(Reasoning, TEXT), max_size=3),
    st.builds(
        lambda call, texts: [call, *texts], st.builds(CallStart, TEXT, TEXT), st.lists(st.builds(Arguments, TEXT))
    ),
)


@given(parts=st.lists(ITEMS, max_size=5).map(_with_ends), reason=st.sampled_from(["stop", "length", "tool_calls"]))
def test_however_an_answer_arrives_the_end_of_its_stream_has_the_whole_answer(parts, reason):
    last = events_of(_stream(_format(), parts, reason))[-1]
    assert last["response"] == json.loads(_format().whole(parts, reason, USAGE))


@given(parts=st.lists(ITEMS, max_size=5).map(_with_ends))
def test_the_client_builds_the_whole_answer_from_the_deltas(parts):
    client = _client(lambda body: _stream(_format(), parts))
    with client.responses.stream(model="m", input="Hi.") as stream:
        texts = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()
    whole = Response.model_validate_json(_format().whole(parts, "stop", USAGE))
    assert texts == response.output_text == whole.output_text
    assert json.loads(response.model_dump_json(exclude={"output"})) == json.loads(
        whole.model_dump_json(exclude={"output"})
    )
    assert [item.id for item in response.output] == [item.id for item in whole.output]


def test_the_client_parses_calls_and_structured_text_of_a_stream():
    class City(BaseModel):
        name: str

    client = _client(
        lambda body: _stream(
            _format(tools=body["tools"], text=body["text"]), [Content('{"name":'), Content('"Paris"}'), *ALL_KINDS[4:7]]
        )
    )
    tool = openai.pydantic_function_tool(City, name="weather")
    tool = {"type": "function", **tool["function"]}
    with client.responses.stream(model="m", input="Hi.", tools=[tool], text_format=City) as stream:
        response = stream.until_done().get_final_response()
    assert response.output_parsed == City(name="Paris")
    assert response.output[1].arguments == '{"city":"Paris"}'


def test_an_answer_is_sent_back_as_it_came_and_makes_one_chat_message():
    response = json.loads(_format().whole(ALL_KINDS, "tool_calls", USAGE))
    outputs = [
        {"type": "function_call_output", "call_id": id, "output": "rain"}
        for id in ("call_5eed00", "functions.weather:1")
    ]
    messages = _messages(input=[{"role": "user", "content": "Hi."}, *response["output"], *outputs])
    assert messages == [
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": 'Let me look: "☔"\n',
            "reasoning_content": "It is about weather.",
            "tool_calls": [
                {
                    "id": "call_5eed00",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
                },
                {
                    "id": "functions.weather:1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Rome"}'},
                },
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_5eed00"},
        {"role": "tool", "content": "rain", "tool_call_id": "functions.weather:1"},
    ]


def test_the_clients_own_dump_of_an_answer_can_be_sent_back():
    response = Response.model_validate_json(_format().whole(ALL_KINDS, "tool_calls", USAGE))
    items = [item.model_dump() for item in response.output]
    assert [message["role"] for message in _messages(input=items)] == ["assistant"]


def test_opaque_reasoning_that_a_client_sends_back_is_what_the_model_thought():
    response = json.loads(_format(include=["reasoning.encrypted_content"]).whole(ALL_KINDS[:3], "stop", USAGE))
    reasoning = response["output"][0]
    opaque = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": reasoning["encrypted_content"]}
    assert (
        _messages(input=[opaque, {"role": "user", "content": "Go on."}])[0]["reasoning_content"]
        == "It is about weather."
    )


@pytest.mark.parametrize("value", ["gAAAAAB", "dynabench:!", "dynabench:/w=="])
def test_opaque_reasoning_of_other_servers_is_refused(value):
    with pytest.raises(ApiError, match=r"input\[0\].encrypted_content is not from this server"):
        _chat(input=[{"type": "reasoning", "summary": [], "encrypted_content": value}])


def test_a_summary_stands_for_reasoning_that_is_not_there():
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Weather."}]},
        {"role": "user", "content": "So?"},
    ]
    assert _messages(input=items)[0] == {"role": "assistant", "reasoning_content": "Weather."}


def test_an_answer_of_each_turn_is_a_message_of_its_own():
    turns = [
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
    ]
    assert [message["content"] for message in _messages(input=turns)] == ["One.", "Two."]


def test_instructions_are_a_system_message_and_parts_stay_apart():
    parts = [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]
    assert _messages(instructions="Be brief.", input=[{"role": "developer", "content": parts}]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
    ]


def test_tools_formats_and_limits_are_those_of_a_chat():
    schema = {"type": "object", "properties": {}}
    chat = _chat(
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={
            "format": {"type": "json_schema", "name": "city", "schema": schema, "strict": True},
            "verbosity": "medium",
        },
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        user="me",
        stream=True,
        max_tool_calls=3,
        truncation="disabled",
        background=False,
        store=False,
    )
    function = {name: WEATHER[name] for name in ("name", "description", "parameters", "strict")}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert chat.parallel_tool_calls is False
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": schema, "strict": True},
    }
    assert (chat.reasoning_effort, chat.max_tokens, chat.temperature, chat.top_p) == ("low", 5, 0.5, 0.9)
    assert (chat.user, chat.stream) == ("me", True)


def test_a_choice_may_allow_some_tools():
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert _chat(tools=[WEATHER], tool_choice=choice).tool_choice == {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": tools},
    }


def test_a_response_repeats_what_was_asked():
    request = {
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "temperature": 0.5,
        "metadata": {"a": "b"},
        "previous_response_id": "resp_1",
    }
    response = json.loads(_format(**request).whole([], "stop", USAGE))
    assert {name: response[name] for name in request} == request
    assert (response["text"], response["tool_choice"], response["store"]) == (
        {"format": {"type": "text"}},
        "auto",
        True,
    )


IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: tools of type 'web_search' are not supported"),
        ({"tools": [{"type": "custom", "name": "a"}]}, "'custom'"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "'mcp'"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, r"tools\[0\].defer_loading is not supported"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] is not valid: .*name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice of type 'file_search' is not supported"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\]: items of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, r"input\[0\].content\[0\]: content of type 'input_image'"),
        ({"input": [{"role": "tool", "content": "a"}]}, r"input\[0\] is not valid"),
        ({"input": [{"role": "user", "content": "a", "weight": 2}]}, r"unknown parameter: 'input\[0\].weight'"),
        ({"input": [{"role": "user", "content": ""}]}, r"input\[0\]: a user message needs content"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "No tool call found for function call output with call_id c"),
        ({"input": []}, "input: expected a text or at least one item"),
        ({"input": None}, "input: expected a text or at least one item"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"top_logprobs": 2}, "top_logprobs is not supported"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include: 'message.output_text.logprobs' is not supported"),
        ({"text": {"verbosity": "none"}}, "text is not valid: Invalid enum value 'none'"),
        ({"text": {"format": {"type": "json_schema"}}}, "a json_schema needs a name and a schema"),
        ({"reasoning": {"summary": "long"}}, "reasoning is not valid: Invalid enum value 'long'"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode is not supported"),
        ({"messages": [1]}, "unknown parameter: 'messages'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        _chat(**fields)
    assert caught.value.status == 400


@pytest.mark.parametrize("summary", ["auto", "concise", "detailed"])
@pytest.mark.parametrize("verbosity", ["low", "medium", "high"])
def test_wishes_that_change_nothing_are_accepted_and_repeated(summary, verbosity):
    request = _request(reasoning={"summary": summary}, text={"verbosity": verbosity})
    assert request.to_chat() == _chat()
    echo = request.options().echo
    assert (echo["reasoning"]["summary"], echo["text"]["verbosity"]) == (summary, verbosity)


def test_values_that_ask_for_nothing_are_accepted():
    nothing = {
        "truncation": None,
        "background": None,
        "conversation": None,
        "top_logprobs": 0,
        "context_management": [],
        "unheard_of": None,
    }
    item = {"type": "message", "role": "user", "content": "Hi.", "phase": None, "id": None, "unheard_of": False}
    assert _messages(**nothing, input=[item]) == [{"role": "user", "content": "Hi."}]


@pytest.mark.parametrize("field", ["input", "tools", "metadata", "temperature", "max_output_tokens"])
def test_a_value_of_a_wrong_type_is_refused(field):
    with pytest.raises(msgspec.ValidationError, match=field):
        _request(**{field: [1] if field != "metadata" else {"a": 1}})
