"""Tools and calls of tools cost prompt tokens: about as many as their JSON has."""

import json

import httpx
import pytest

HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": f"tool_{index}", "description": "x" * 90, "parameters": PARAMETERS} for index in range(64)]
CHAT = [{"type": "function", "function": tool} for tool in TOOLS]
SIZE = len(json.dumps(CHAT))
"""Bytes, of which the workers' tokenizer makes one token each."""


@pytest.fixture
def cost(stack):
    """What the prompt of a request to an API costs."""

    def count(path, **fields):
        limit = {"/chat/completions": "max_tokens", "/responses": "max_output_tokens", "/messages": "max_tokens"}
        answer = httpx.post(f"{stack.url}/v1{path}", json={"model": "mock", limit[path]: 1, **fields})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        if path == "/messages":  # Anthropic counts cached tokens apart
            return usage["input_tokens"] + usage["cache_read_input_tokens"]
        return usage["prompt_tokens"] if path == "/chat/completions" else usage["input_tokens"]

    return count


def is_about(number, wanted):
    return 0.9 * wanted < number < 1.2 * wanted


def test_tools_of_a_chat_cost_about_their_json_and_nothing_if_none_may_be_called(cost):
    without = cost("/chat/completions", messages=HI)
    assert without < 100
    assert is_about(cost("/chat/completions", messages=HI, tools=CHAT) - without, SIZE)
    assert is_about(cost("/chat/completions", messages=HI, tools=CHAT[:32]) - without, SIZE / 2)
    assert cost("/chat/completions", messages=HI, tools=CHAT, tool_choice="none") == without


def test_tools_of_the_other_apis_cost_the_same(cost):
    responses = [{"type": "function", **tool} for tool in TOOLS]
    assert is_about(cost("/responses", input="hi", tools=responses) - cost("/responses", input="hi"), SIZE)
    messages = [{"name": tool["name"], "description": "x" * 90, "input_schema": PARAMETERS} for tool in TOOLS]
    assert is_about(cost("/messages", messages=HI, tools=messages) - cost("/messages", messages=HI), SIZE)
    none = cost("/messages", messages=HI, tools=messages, tool_choice={"type": "none"})
    assert none == cost("/messages", messages=HI)


def test_a_call_in_the_history_costs_about_its_arguments(cost):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * 2000})}}
    turn = {"role": "assistant", "content": "a"}
    without = cost("/chat/completions", messages=[*HI, turn, *HI])
    assert is_about(cost("/chat/completions", messages=[*HI, turn | {"tool_calls": [call]}, *HI]) - without, 2000)
