"""An agent against the mocker has the same conversation each time: nothing random gets into its next prompt."""

import anthropic
import openai
import pytest

from tests.support.stacks import running

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
MOST_TURNS = 20
QUESTIONS = [f"Question {number}" for number in range(8)]
"""Some of them need several turns."""


@pytest.fixture(scope="module")
def url():
    with running(answers={"tool_call_share": 0.5}, engine={"speedup_ratio": 0}) as stack:
        yield stack.url


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def _chat(client, question, *, is_streamed, **more):
    """Return the messages of a chat in which each call of a tool gets a result."""
    messages = [{"role": "user", "content": question}]
    asked = {"model": "mock", "tools": [{"type": "function", "function": FUNCTION}], **more}
    for _ in range(MOST_TURNS):
        if is_streamed:
            with client.chat.completions.stream(**asked, messages=messages) as stream:
                turn = stream.get_final_completion().choices[0].message
        else:
            turn = client.chat.completions.create(**asked, messages=messages).choices[0].message
        calls = [
            call.model_dump(include={"id": True, "function": {"name", "arguments"}}) for call in turn.tool_calls or ()
        ]
        tool_calls = {"tool_calls": [call | {"type": "function"} for call in calls]} if calls else {}
        messages.append({"role": "assistant", "content": turn.content or None, **tool_calls})
        if not calls:
            break
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
    return messages


def _response(client, question, *, is_streamed):
    """Return the calls and texts of responses, each of which continues the one before."""
    asked = {"model": "mock", "tools": [{"type": "function", **FUNCTION}], "input": question}
    found = []
    for _ in range(MOST_TURNS):
        if is_streamed:
            with client.responses.stream(**asked) as stream:
                response = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        found += [response.output_text, *((call.call_id, call.name, call.arguments) for call in calls)]
        if not calls:
            break
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        asked |= {"input": outputs, "previous_response_id": response.id}
    return found


def _message(client, question, *, is_streamed):
    """Return the turns of a conversation of Anthropic's Messages API."""
    turns = [{"role": "user", "content": question}]
    asked = {"model": "mock", "max_tokens": 300, "tools": [{"name": "get_weather", "input_schema": PARAMETERS}]}
    for _ in range(MOST_TURNS):
        if is_streamed:
            with client.messages.stream(**asked, messages=turns) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked, messages=turns)
        known = {"type", "text", "id", "name", "input"}
        content = [block.model_dump(include=known) for block in message.content]
        turns.append({"role": "assistant", "content": content})
        used = [block["id"] for block in content if block["type"] == "tool_use"]
        if not used:
            break
        results = [{"type": "tool_result", "tool_use_id": id, "content": "rain"} for id in used]
        turns.append({"role": "user", "content": results})
    return turns


def _ids(messages):
    return [call["id"] for message in messages for call in message.get("tool_calls", ())]


def test_a_chat_with_tools_is_the_same_each_time(client):
    whole = [_chat(client, question, is_streamed=False) for question in QUESTIONS]
    assert max(map(len, whole)) > 4, "several turns"
    for is_streamed in (False, True):
        assert [_chat(client, question, is_streamed=is_streamed) for question in QUESTIONS] == whole


def test_ids_of_calls_are_unique_in_a_chat(client):
    ids = [id for question in QUESTIONS for id in _ids(_chat(client, question, is_streamed=False))]
    assert ids and len(ids) == len(set(ids))


def test_choices_and_seeds_have_calls_of_their_own(client):
    asked = {"model": "mock", "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    asked["messages"] = [{"role": "user", "content": "Hi."}]

    def ids(**more):
        choices = client.chat.completions.create(**asked, **more).choices
        return [call.id for choice in choices for call in choice.message.tool_calls]

    found = ids(n=2) + ids(seed=7)
    assert len(found) == len(set(found)) >= 3
    assert ids(n=2) + ids(seed=7) == found


def test_responses_that_continue_each_other_are_the_same_each_time(client):
    whole = [_response(client, question, is_streamed=False) for question in QUESTIONS]
    assert max(map(len, whole)) > 4, "several turns"
    for is_streamed in (False, True):
        assert [_response(client, question, is_streamed=is_streamed) for question in QUESTIONS] == whole


def test_messages_with_tools_are_the_same_each_time(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = [_message(client, question, is_streamed=False) for question in QUESTIONS]
        assert max(map(len, whole)) > 4, "several turns"
        for is_streamed in (False, True):
            assert [_message(client, question, is_streamed=is_streamed) for question in QUESTIONS] == whole
