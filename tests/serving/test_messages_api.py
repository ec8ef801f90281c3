"""The Messages API's types, against those of Anthropic's client."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from serving.frontend.api.answer_format import Usage
from serving.frontend.api.errors import ApiError
from serving.frontend.api.messages.errors import PATH, body_at
from serving.frontend.api.messages.format import MessagesFormat
from serving.frontend.api.messages.request import CountRequest, MessagesRequest
from serving.frontend.api.openai import MAX_STOPS, ChatRequest
from serving.frontend.api.unsupported import check_fields
from serving.model.parts import Arguments, CallStart, Content, Part, Reasoning
from tests.support.sdk_events import events_of, models_in

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(num_prompt=10, num_completion=7, num_cached=4, num_reasoning=2)
WEATHER = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
HELLO = [{"role": "user", "content": "Hi."}]
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


def _chat(**fields: Any) -> ChatRequest:
    body = msgspec.json.encode({"model": "m", "max_tokens": 100, "messages": HELLO, **fields})
    request = msgspec.json.decode(body, type=MessagesRequest)
    check_fields(body, request)
    return request.to_chat()


def _messages(*turns: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return msgspec.to_builtins(_chat(messages=turns or HELLO, **fields).messages)


def _user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": blocks}


def _assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": blocks}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _use(id: str, **input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "weather", "input": input}


def _result(id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **fields}


def _format() -> MessagesFormat:
    return MessagesFormat("m", seed="5eed", fingerprint="5eed")


def _stream(parts: list[Part], reason: str = "stop", stop: str | None = None) -> bytes:
    format = _format()
    events = [format.first(Usage(10, num_cached=4)), *(format.parts([part]) for part in parts)]
    return b"".join([*events, format.last(reason, USAGE, stop=stop)])


def _client(answer: Callable[[dict[str, Any]], httpx2.Response]) -> anthropic.Anthropic:
    transport = httpx2.MockTransport(lambda request: answer(json.loads(request.content)))
    return anthropic.Anthropic(
        base_url="http://test", api_key="none", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


def _streaming(content: bytes) -> Callable[[dict[str, Any]], httpx2.Response]:
    return lambda body: httpx2.Response(200, content=content, headers={"content-type": "text/event-stream"})


def test_a_stream_has_all_events_of_all_kinds_of_blocks_in_order():
    types = [
        event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"]
        for event in events_of(_stream(ALL_KINDS))
    ]
    start, stop = "content_block_start", "content_block_stop"
    assert types == [
        *("message_start", "ping"),
        *(start, "thinking_delta", "thinking_delta", "signature_delta", stop),
        *(start, "text_delta", "text_delta", stop),
        *(start, "input_json_delta", "input_json_delta", stop),
        *(start, "input_json_delta", stop),
        *("message_delta", "message_stop"),
    ]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize("parts", [ALL_KINDS, ALL_KINDS[2:4], ALL_KINDS[4:6], ALL_KINDS[:1], []])
def test_every_event_is_of_a_type_that_the_client_knows(parts, reason):
    for event in events_of(_stream(parts, reason)):
        if event["type"] != "ping":  # the client drops these by name
            assert not any(model.model_extra for model in models_in(EVENTS.validate_python(event, strict=True)))


def test_the_blocks_of_a_message_are_what_the_model_thought_said_and_called():
    message = Message.model_validate_json(_format().whole(ALL_KINDS, "tool_calls", USAGE), strict=True)
    assert not any(model.model_extra for model in models_in(message))
    thought, said, first, second = message.content
    assert (thought.thinking, said.text) == ("It is about weather.", 'Let me look: "☔"\n')
    assert (first.name, first.input, second.input) == ("weather", {"city": "Paris"}, {"city": "Rome"})
    assert (first.id, second.id) == ("toolu_5eed00", "functions.weather:1")


@pytest.mark.parametrize(
    ("parts", "reason", "stop", "expected"),
    [
        ([Content("a")], "stop", None, ("end_turn", None)),
        ([Content("a")], "stop", "END", ("stop_sequence", "END")),
        ([Content("a")], "length", None, ("max_tokens", None)),
        ([CallStart("a")], "tool_calls", None, ("tool_use", None)),
        ([CallStart("a")], "stop", None, ("tool_use", None)),
        ([CallStart("a")], "length", None, ("max_tokens", None)),
    ],
)
def test_a_message_says_why_it_stopped(parts, reason, stop, expected):
    message = json.loads(_format().whole(parts, reason, USAGE, stop=stop))
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert events_of(_stream(parts, reason, stop))[-2]["delta"] == {
        "stop_reason": expected[0],
        "stop_sequence": expected[1],
    }


def test_input_tokens_are_those_that_were_not_cached():
    usage = json.loads(_format().whole([Content("Hi")], "stop", USAGE))["usage"]
    assert usage == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }


VALUES = st.dictionaries(
    st.text(max_size=3), st.one_of(st.integers(-99, 99), st.text(max_size=3), st.booleans()), max_size=3
)


def _call(call: CallStart, arguments: str, cut: int) -> list[Part]:
    return [call, Arguments(arguments[:cut]), Arguments(arguments[cut:])]


TEXT = st.text(max_size=5)
BLOCKS = st.one_of(
    st.lists(st.builds(Content, TEXT), max_size=3),
    st.lists(st.builds(Reasoning, TEXT), max_size=3),
    st.builds(_call, st.builds(CallStart, TEXT, TEXT), VALUES.map(json.dumps), st.integers(0, 9)),
)
PARTS = st.lists(BLOCKS, max_size=5).map(lambda kinds: [part for parts in kinds for part in parts])


def _rebuilt(stream: bytes) -> Any:
    with _client(_streaming(stream)).messages.stream(model="m", max_tokens=9, messages=HELLO) as messages:
        return messages.get_final_message()


def _same(rebuilt: Any, whole: bytes) -> bool:
    expected = Message.model_validate_json(whole)
    return rebuilt.model_dump(exclude_none=True, warnings=False) == expected.model_dump(exclude_none=True)


@given(parts=PARTS, reason=st.sampled_from(["stop", "length", "tool_calls"]))
def test_the_client_builds_the_whole_message_from_theevents_of(parts, reason):
    assert _same(_rebuilt(_stream(parts, reason)), _format().whole(parts, reason, USAGE))


@given(values=VALUES, cut=st.integers(0, 30))
def test_arguments_that_were_cut_off_are_what_the_client_makes_of_them(values, cut):
    parts = [CallStart("a"), Arguments(json.dumps(values)[:cut])]
    assert _same(_rebuilt(_stream(parts, "length")), _format().whole(parts, "length", USAGE))


def test_a_failing_stream_ends_with_an_error_that_the_client_raises():
    format = _format()
    stream = format.first(USAGE) + format.parts([Content("Hi")]) + format.failed(ApiError(503, "no worker left"))
    with pytest.raises(anthropic.APIStatusError, match="no worker left") as caught:
        _rebuilt(stream)
    assert caught.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize(
    ("status", "type", "exception"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (404, "not_found_error", anthropic.NotFoundError),
        (413, "request_too_large", anthropic.RequestTooLargeError),
        (415, "invalid_request_error", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (503, "overloaded_error", anthropic.ServiceUnavailableError),
    ],
)
def test_errors_are_those_of_anthropic(status, type, exception):
    error = ApiError(status, "no")
    client = _client(lambda body: httpx2.Response(status, content=body_at(PATH, error)))
    with pytest.raises(exception) as caught:
        client.messages.create(model="m", max_tokens=9, messages=HELLO)
    assert caught.value.body == {"type": "error", "error": {"type": type, "message": "no"}}


def test_a_count_needs_no_limit_and_may_end_with_the_assistants_turn():
    request = msgspec.convert(
        {"model": "m", "messages": [*HELLO, _assistant(_text("Hi."))], "tools": [WEATHER]}, CountRequest
    )
    chat = request.to_chat()
    assert ([message.role for message in chat.messages], len(chat.tools)) == (["user", "assistant"], 1)


def test_an_answer_is_sent_back_as_it_came_and_makes_one_chat_message():
    message = Message.model_validate_json(_format().whole(ALL_KINDS, "tool_calls", USAGE))
    turns = [*HELLO, {"role": "assistant", "content": [block.model_dump() for block in message.content]}]
    results = [_result("toolu_5eed00", content="rain"), _result("functions.weather:1", content=[_text("sun")])]
    assert _messages(*turns, _user(*results, _text("So?"))) == [
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": 'Let me look: "☔"\n',
            "reasoning_content": "It is about weather.",
            "tool_calls": [
                {
                    "id": "toolu_5eed00",
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
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_5eed00"},
        {"role": "tool", "content": "sun", "tool_call_id": "functions.weather:1"},
        {"role": "user", "content": "So?"},
    ]


def test_neighbouring_turns_of_a_role_are_one_turn():
    turns = [*HELLO, _user(_text("Hello?")), _assistant(_text("Yes.")), _assistant(_use("a")), _user(_result("a"))]
    assert [message["role"] for message in _messages(*turns)] == ["user", "assistant", "tool"]
    assert _messages(*turns)[0]["content"] == [_text("Hi."), _text("Hello?")]


def test_the_result_of_a_failed_call_says_so():
    turns = [
        *HELLO,
        _assistant(_use("a"), _use("b")),
        _user(_result("a", content="no file", is_error=True), _result("b", is_error=True)),
    ]
    assert [message["content"] for message in _messages(*turns)[2:]] == ["Error: no file", "Error: "]


def test_the_system_prompt_is_the_first_message_and_cache_control_changes_nothing():
    system = [
        _text("A") | {"cache_control": {"type": "ephemeral"}},
        _text("B") | {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    assert _messages(system=system, cache_control={"type": "ephemeral"})[0] == {
        "role": "system",
        "content": [_text("A"), _text("B")],
    }
    assert _messages(system="A") == [{"role": "system", "content": "A"}, *HELLO]
    assert _messages(system="") == _messages(system=[]) == HELLO


def test_tools_formats_and_limits_are_those_of_a_chat():
    schema = {"type": "object", "properties": {}}
    chat = _chat(
        tools=[WEATHER | {"type": "custom", "strict": True}],
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        metadata={"user_id": "me"},
        service_tier="auto",
    )
    function = {"name": "weather", "description": "The weather.", "parameters": WEATHER["input_schema"], "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    assert (chat.reasoning_effort, chat.max_tokens, chat.stops) == ("low", 100, ["END"])
    assert (chat.temperature, chat.top_p, chat.top_k, chat.stream, chat.user) == (0.5, 0.9, 3, True, "me")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "weather"}, ({"type": "function", "function": {"name": "weather"}}, None)),
    ],
)
def test_choices_of_tools_are_those_of_a_chat(choice, expected):
    chat = _chat(tools=[WEATHER], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == expected


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "adaptive", "display": "summarized"}, None),
        (None, None),
    ],
)
def test_thinking_is_a_variable_of_the_template(thinking, expected):
    assert _chat(thinking=thinking, max_tokens=2000).chat_template_kwargs == expected


def test_reasoning_that_is_not_to_be_displayed_is_left_out():
    thinking = {"type": "enabled", "budget_tokens": 1024}
    displays = {None: None, "summarized": None, "omitted": False}
    for display, expected in displays.items():
        assert _chat(thinking=thinking | {"display": display}, max_tokens=2000).include_reasoning is expected


def test_reasoning_that_only_anthropics_models_can_read_is_left_out():
    redacted = {"type": "redacted_thinking", "data": "a"}
    messages = _messages(*HELLO, _assistant(redacted, _text("Hello.")), *HELLO)
    assert messages == [HELLO[0], {"role": "assistant", "content": "Hello."}, HELLO[0]]


def test_as_many_stop_sequences_are_taken_as_a_chat_takes():
    stops = [str(number) for number in range(MAX_STOPS)]
    assert _chat(stop_sequences=stops).stops == stops


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [_user(IMAGE)]}, r"messages\[0\].content\[0\]: 'image' is not supported in a user message"),
        ({"messages": [_user({"type": "document"})]}, "'document' is not supported"),
        ({"messages": [_user(_use("a"))]}, "'tool_use' is not supported in a user message"),
        ({"messages": [_user({"type": "redacted_thinking", "data": "a"})]}, "'redacted_thinking' is not supported in a user message"),
        ({"messages": [*HELLO, _assistant(_use("a")), _user(_result("a", content=[IMAGE]))]}, r"tool_result\[0\]: 'image' is not supported"),
        ({"messages": [*HELLO, _assistant(_use("a")), _user(_result("b"))]}, "no tool_use before it has this id"),
        ({"messages": [{"role": "user", "content": ""}]}, r"messages\[0\]: content must not be empty"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages\[0\]: content must not be empty"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\] is not valid"),
        ({"messages": [_user(_text("a") | {"citations": [1]})]}, r"unknown parameter: 'messages\[0\].content\[0\].citations'"),
        ({"messages": [*HELLO, _assistant(_text("The answer is"))]}, "the last one must not be the assistant's"),
        ({"system": [IMAGE]}, r"system\[0\]: 'image' is not supported"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]: tools of type 'web_search_20250305'"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, r"tools\[0\].defer_loading is not supported"),
        ({"tool_choice": {"type": "tool"}}, "expected a name with type tool"),
        ({"tool_choice": {"type": "any", "name": "a"}}, "expected a name with type tool"),
        ({"thinking": {"type": "enabled"}}, "expected budget_tokens with type enabled"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "must be less than max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000, "display": "short"}}, "thinking is not valid: .*'short'"),
        ({"thinking": {"type": "between_tools"}}, "thinking is not valid: .*'between_tools'"),
        ({"output_config": {"task_budget": {"total": 1}}}, "output_config.task_budget is not supported"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
        ({"container": "a"}, "container is not supported"),
        ({"speed": "fast"}, "speed is not supported"),
        ({"n": 2}, "unknown parameter: 'n'"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        _chat(**fields)
    assert caught.value.status == 400


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "stop_sequences", "messages", "top_k"])
def test_a_value_out_of_range_is_refused(field):
    value = {
        "max_tokens": 0,
        "temperature": 1.5,
        "stop_sequences": ["a"] * (MAX_STOPS + 1),
        "messages": [],
        "top_k": -1,
    }[field]
    with pytest.raises(msgspec.ValidationError, match=field):
        _chat(**{field: value})


def test_max_tokens_is_required():
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        msgspec.convert({"model": "m", "messages": HELLO}, MessagesRequest)
