"""Answers of other servers: whatever the model generates counts as tokens, text or not."""

import json

import pytest

from dynabench.live.events import AnswerReader
from tests.dynabench.test_load import send, workload
from tests.support.strange_server import DONE, says, strange_server, usage


def event(delta, reason=None):
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}) + "\n\n"


def text(number):
    return event({"content": f"t{number} "})


def tool_call(number, *, is_first=False):
    call = {"index": 0, "function": {"arguments": f'"a{number}"'}}
    if is_first:
        call |= {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ""}}
    return event({"tool_calls": [call]})


def function_call(number, *, is_first=False):
    return event({"function_call": {"name": "f", "arguments": ""} if is_first else {"arguments": f"a{number}"}})


ROLE = event({"role": "assistant", "content": ""})
CALLS = event({}, "tool_calls")
NOTHING_ADDED = [
    {"content": ""},
    {"content": None, "tool_calls": []},
    {"tool_calls": None},
    {"tool_calls": [{"index": 0, "function": {"arguments": ""}}]},
    {"tool_calls": [{"index": 0}]},
    {"function_call": {"arguments": ""}},
    {"refusal": ""},
    {"reasoning_details": [{"type": "reasoning.text", "text": ""}]},
]


@pytest.mark.parametrize("call", [tool_call, function_call])
@pytest.mark.parametrize("num_texts", [0, 3])
def test_the_deltas_of_tool_calls_are_tokens(call, num_texts):
    calls = [call(number, is_first=number == 0) for number in range(10 - num_texts)]
    events = [ROLE, *map(text, range(num_texts)), *calls, CALLS]
    with strange_server(says(*events, usage(7, 10) + DONE)) as url:
        columns = send(url, workload(1, tokens=10), prompts="chat").requests
    assert (columns.error[0], columns.osl[0], columns.finish_reason[0]) == ("", 10, "tool_calls")
    assert not columns.second_token_s.mask[0]  # it is masked where events do not match the usage
    assert columns.first_byte_s[0] <= columns.first_token_s[0] < columns.last_token_s[0]


def test_an_answer_lasts_until_the_last_delta_of_its_tool_calls():
    events = [ROLE, text(0), *(tool_call(number, is_first=number == 0) for number in range(9))]
    reader = AnswerReader(16)
    counts = [reader.take(each.encode()) for each in events]
    assert counts == [0] + [1] * 10


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"refusal": "no"},
        {"tool_calls": [{"index": 0, "function": {"arguments": {"city": "Rome"}}}]},
        {"tool_calls": [{"index": 0, "type": "custom", "custom": {"name": "sh", "input": "ls"}}]},
    ],
)
def test_whatever_the_model_generates_is_a_token(delta):
    reader = AnswerReader(16)
    assert [reader.take(event(delta).encode()) for _ in range(3)] == [1] * 3


@pytest.mark.parametrize("delta", NOTHING_ADDED)
def test_a_delta_that_adds_nothing_is_no_token_whatever_came_before(delta):
    empty = event(delta).encode()
    for before in ([], [text(0)] * 2, [tool_call(0, is_first=True), tool_call(1), tool_call(2)]):
        reader = AnswerReader(16)
        for each in before:
            assert reader.take(each.encode()) == 1
        assert reader.take(empty) == 0, before


def test_tool_calls_are_counted_alike_wherever_the_reads_are_cut():
    events = [
        ROLE,
        *map(text, range(3)),
        *(tool_call(number, is_first=number % 5 == 0) for number in range(20)),
        *map(event, NOTHING_ADDED),
        *map(text, range(2)),
        CALLS,
    ]
    whole = "".join(events).encode()
    for size in (1, 7, 50, 113, 400, len(whole)):
        reader = AnswerReader(64)
        counts = [reader.take(whole[start : start + size]) for start in range(0, len(whole), size)]
        assert sum(counts) == reader.num_tokens == 25, size
