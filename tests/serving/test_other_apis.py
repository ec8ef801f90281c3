"""OpenAI's Responses API and Anthropic's Messages API over HTTP, by their own clients."""

import json

import anthropic
import httpx
import msgspec
import openai
import pytest

from serving.frontend.admission import KeyAndRoom
from serving.frontend.api.errors import ApiError
from serving.frontend.config import FrontendConfig
from serving.frontend.kept_responses import KeptResponses, ResponseTurn
from tests.support.speaking_engine import ASKED

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
TOOL = {"name": "get_weather", "input_schema": PARAMETERS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>\nIt rains?\n</think>\n\nYes."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture
def responses(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


@pytest.fixture
def messages(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client.messages


def _said(text):
    return [{"role": "user", "content": text}]


def _without_ids(value):
    """Return a dump of a response without what differs between two."""
    if isinstance(value, dict):
        return {
            name: _without_ids(entry) for name, entry in value.items() if name not in ("id", "call_id", "created_at")
        }
    return [_without_ids(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("text", ["Hello there", f"Let me look. {CALL}", THOUGHT])
def test_a_streamed_response_is_the_same_as_a_whole_one(responses, text):
    whole = responses.create(model="agent", input=text, tools=[FUNCTION])
    with responses.stream(model="agent", input=text, tools=[FUNCTION]) as stream:
        streamed = stream.get_final_response()
    dump = streamed.model_dump(exclude={"output": {"__all__": {"parsed_arguments"}}}, warnings=False)
    for item in dump["output"]:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    assert _without_ids(dump) == _without_ids(whole.model_dump(warnings=False))


def test_a_response_thinks_says_and_calls(responses):
    thought = responses.create(model="agent", input=THOUGHT)
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert (thought.output[0].content[0].text, thought.output_text) == ("\nIt rains?\n", "\n\nYes.")
    assert thought.usage.output_tokens_details.reasoning_tokens > 0
    called = responses.create(model="agent", input=f"So. {CALL}", tools=[FUNCTION])
    assert [item.type for item in called.output] == ["message", "function_call"]
    assert json.loads(called.output[1].arguments) == {"city": "Rome"}


def test_white_space_between_thinking_and_calling_is_no_message(responses, messages):
    text = f"<think>Hm.</think>\n\n{CALL}\n"
    response = responses.create(model="agent", input=text, tools=[FUNCTION])
    assert [item.type for item in response.output] == ["reasoning", "function_call"]
    message = messages.create(model="agent", max_tokens=500, messages=_said(text), tools=[TOOL])
    assert [block.type for block in message.content] == ["thinking", "tool_use"]


def test_a_conversation_goes_on_from_a_response_that_is_kept(responses):
    first = responses.create(model="agent", input=CALL, tools=[FUNCTION])
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"}
    with responses.stream(model="agent", input=[output, *_said("And?")], previous_response_id=first.id) as stream:
        second = stream.get_final_response()
    third = responses.create(model="agent", input="Done.", previous_response_id=second.id)
    assert (second.output_text, third.output_text, third.previous_response_id) == ("And?", "Done.", second.id)
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    assert responses.retrieve(third.id).output_text == "Done."


def test_a_response_that_is_deleted_or_was_not_to_be_kept_cannot_be_continued(responses):
    deleted, unkept = (
        responses.create(model="agent", input="Hi."),
        responses.create(model="agent", input="Hi.", store=False),
    )
    responses.delete(deleted.id)
    for id in (deleted.id, unkept.id):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{id}' not found"):
            responses.retrieve(id)
        with pytest.raises(openai.BadRequestError) as caught:
            responses.create(model="agent", input="Hi.", previous_response_id=id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_that_is_cut_says_so(client):
    response = client.responses.create(model="mock", input="Hello there", max_output_tokens=5)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.usage.output_tokens) == ("incomplete", 5)


def test_the_mocker_ends_a_response_or_a_message_before_a_limit_that_is_far(stack, client):
    response = client.responses.create(model="mock", input="Hello there", max_output_tokens=2000)
    unlimited = client.responses.create(model="mock", input="Hello there")
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert (response.output_text, response.usage) == (unlimited.output_text, unlimited.usage)
    with anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0) as other:
        message = other.messages.create(model="mock", max_tokens=2000, messages=_said("Hello there"))
        cut = other.messages.create(model="mock", max_tokens=5, messages=_said("Hello there"))
    assert (message.stop_reason, 16 <= message.usage.output_tokens <= 271) == ("end_turn", True)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 5)


def test_the_mocker_fills_the_limit_of_a_chat_and_of_a_completion(client):
    chat = client.chat.completions.create(model="mock", messages=_said("Hello there"), max_tokens=300)
    completion = client.completions.create(model="mock", prompt="Hello there", max_tokens=300)
    for answer in (chat, completion):
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 300)


def test_a_response_that_fits_a_schema_is_a_constraint_for_the_engine(responses):
    form = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    constraint, _ = json.loads(responses.create(model="agent", input=ASKED, text=form).output_text)
    assert constraint["json"] == SCHEMA
    with pytest.raises(openai.BadRequestError, match="honours no constraints of kind json"):
        responses.create(model="plain", input=ASKED, text=form)


def test_what_a_response_cannot_honour_is_refused_over_http(responses):
    with pytest.raises(openai.BadRequestError, match="tools of type 'web_search' are not supported"):
        responses.create(model="agent", input="Hi.", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="truncation is not supported"):
        responses.create(model="agent", input="Hi.", truncation="auto")
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs must not have tools"):
        responses.create(model="agent", input="Hi.", extra_body={"chat_template_kwargs": {"tools": []}})


@pytest.mark.parametrize("text", ["Hello there", f"Let me look. {CALL}", THOUGHT])
def test_a_streamed_message_is_the_same_as_a_whole_one(messages, text):
    asked = {"model": "agent", "max_tokens": 500, "messages": _said(text), "tools": [TOOL]}
    whole = messages.create(**asked)
    with messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    drop = {"id": True, "content": {"__all__": {"id", "signature", "parsed_output"}}}
    assert streamed.model_dump(exclude=drop, exclude_none=True, warnings=False) == whole.model_dump(
        exclude=drop, exclude_none=True
    )


def test_a_message_thinks_says_and_calls(messages):
    thought = messages.create(model="agent", max_tokens=500, messages=_said(THOUGHT))
    assert [(block.type, thought.stop_reason) for block in thought.content] == [
        ("thinking", "end_turn"),
        ("text", "end_turn"),
    ]
    called = messages.create(model="agent", max_tokens=500, messages=_said(f"So. {CALL}"), tools=[TOOL])
    assert ([block.type for block in called.content], called.stop_reason) == (["text", "tool_use"], "tool_use")
    assert called.content[1].input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": called.content[1].id, "content": "rain"}
    turns = [
        *_said(CALL),
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    assert messages.create(model="agent", max_tokens=500, messages=turns, tools=[TOOL]).content[0].text == "And?"


def test_a_message_says_which_stop_sequence_ended_it(messages):
    asked = {
        "model": "agent",
        "max_tokens": 500,
        "messages": _said("one two three"),
        "stop_sequences": ["three", " two"],
    }
    message = messages.create(**asked)
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one", "stop_sequence", " two")
    with messages.stream(**asked) as stream:
        assert stream.get_final_message().stop_sequence == " two"


def test_tokens_are_counted_as_a_message_counts_them(messages):
    asked = {"model": "agent", "messages": _said("Hi."), "system": "Be brief.", "tools": [TOOL]}
    usage = messages.create(**asked, max_tokens=5).usage
    assert messages.count_tokens(**asked).input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("asked", "error", "type"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error"),
        ({"temperature": 2}, anthropic.BadRequestError, "invalid_request_error"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            anthropic.BadRequestError,
            "invalid_request_error",
        ),
    ],
)
def test_errors_of_messages_are_those_of_anthropic(messages, asked, error, type):
    with pytest.raises(error) as caught:
        messages.create(model=asked.pop("model", "agent"), max_tokens=5, messages=_said("Hi."), extra_body=asked)
    assert caught.value.body["error"]["type"] == type


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
def test_every_error_below_messages_is_one_of_anthropic(url, path):
    answer = httpx.request("POST", url + path, content=b"{")
    assert answer.status_code in (400, 404)
    assert answer.json()["type"] == "error"


def test_an_unknown_field_is_accepted_only_if_it_asks_for_nothing(url):
    body = {"model": "agent", "input": "Hi.", "unheard_of": False}
    assert httpx.post(f"{url}/v1/responses", json=body).status_code == 200
    assert httpx.post(f"{url}/v1/responses", json=body | {"unheard_of": 1}).status_code == 400


@pytest.mark.parametrize("settings", [{"http_workers": 2}, {"max_kept_responses": 0}])
def test_a_frontend_that_keeps_no_responses_refuses_to_continue_one(settings):
    kept = KeptResponses(FrontendConfig(**settings))
    for name, value in {"previous_response_id": "resp_1", "store": True}.items():
        with pytest.raises(ApiError, match=f"{name}: this server keeps no responses"):
            ResponseTurn(kept).complete(msgspec.json.encode({"input": "Hi.", name: value}), lambda _: None)
    turn, body = ResponseTurn(kept), b'{"input": "Hi."}'
    assert (turn.complete(body, lambda _: None), turn.is_kept) == (body, False)


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ([(b"x-api-key", b"secret")], True),
        ([(b"authorization", b"Bearer secret")], True),
        ([(b"authorization", b"Bearer none"), (b"x-api-key", b"secret")], True),
        ([(b"x-api-key", b"wrong")], False),
        ([(b"x-api-key", b"")], False),
        ([], False),
    ],
)
def test_a_key_may_come_as_anthropics_clients_send_it(headers, passes):
    error = KeyAndRoom(FrontendConfig(api_key="secret")).refusal(
        "POST", "/v1/completions", headers, num_open=0, is_draining=False
    )
    assert (error is None) == passes


def test_a_models_own_template_and_tokenizer_serve_both_apis(tiny, tiny_client):
    first = tiny_client.responses.create(model="tiny", input="hi", instructions="Be brief.", max_output_tokens=4)
    assert (first.usage.output_tokens, first.instructions, first.max_output_tokens) == (4, "Be brief.", 4)
    second = tiny_client.responses.create(
        model="tiny", input="go on", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage.input_tokens > 4
    with anthropic.Anthropic(base_url=tiny.url, api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "messages": _said("hi"), "tools": [TOOL]}
        usage = client.messages.create(**asked, max_tokens=4).usage
        count = client.messages.count_tokens(**asked).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens > 0


def test_a_large_conversation_is_prepared_elsewhere_and_goes_on(responses):
    first = responses.create(model="agent", input=_said("\n" * 100_000) + _said("Hi."))
    assert first.output_text == "Hi."
    assert responses.create(model="agent", input="Go on.", previous_response_id=first.id).output_text == "Go on."
