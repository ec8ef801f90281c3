"""Tokens that an engine's step makes together share an event, as in vLLM: the engine here sends three bytes at a time."""

import asyncio
import json

import httpx
import pytest
import uvloop

from dynabench.live.bodies import MeasuredServer
from dynabench.live.clients import Order, send_all
from dynabench.live.events import AnswerReader
from reports.figures import metrics
from serving.frontend.api.deltas import as_one
from tests.support.stacks import running
from tests.support.waiting import PATIENCE_S
from workloads import Request, Workload
from workloads.pacing import LoadConfig


def events(url, path, **body):
    """Return the events of a streamed answer, parsed."""
    with httpx.stream("POST", f"{url}/v1/{path}", json={"stream": True, **body}, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def says(url, text, *, model="plain", **more):
    return events(url, "chat/completions", model=model, messages=[{"role": "user", "content": text}], **more)


def contents(found):
    texts = [choice["delta"].get("content") for event in found for choice in event["choices"]]
    return [text for text in texts if text]


def test_the_tokens_of_a_step_share_an_event(url):
    assert contents(says(url, "abcdefgh")) == ["abc", "def", "gh"]


def test_each_event_has_the_usage_up_to_its_last_token(url):
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    found = says(url, "abcdefgh", stream_options=wanted)
    counts = [event["usage"]["completion_tokens"] for event in found if "usage" in event]
    assert counts == [0, 3, 6, 8, 8, 8]


def test_the_limit_cuts_a_step(url):
    found = says(url, "abcdefgh", max_tokens=5, stream_options={"include_usage": True})
    assert contents(found) == ["abc", "de"]
    assert found[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("stop", "texts", "count"), [("e", ["abc", "d"], 5), ("cd", ["ab"], 4), ("gx", ["abc", "def", "gh"], 8)]
)
def test_a_stop_string_cuts_a_step_and_the_tokens_after_it_do_not_count(url, stop, texts, count):
    found = says(url, "abcdefgh", stop=[stop], stream_options={"include_usage": True})
    assert contents(found) == texts
    assert found[-1]["usage"]["completion_tokens"] == count
    reasons = [choice["finish_reason"] for event in found for choice in event["choices"]]
    assert reasons.count("stop") == 1


def test_log_probabilities_are_those_of_the_events_tokens(url):
    found = says(url, "abcdefgh", logprobs=True, stop=["gh"])
    tokens = [
        [entry["token"] for entry in choice["logprobs"]["content"]]
        for event in found
        for choice in event["choices"]
        if choice.get("logprobs")
    ]
    assert list(map(len, tokens)) == [3, 3, 2]


def test_an_event_says_how_many_tokens_it_has_if_asked(url):
    found = says(url, "abcdefg", nvext={"extra_fields": ["num_tokens"]})
    assert [event["nvext"]["num_tokens"] for event in found if "nvext" in event] == [3, 3]
    assert not any("nvext" in event for event in says(url, "abcdefg"))


def test_each_choice_has_steps_of_its_own(url):
    found = says(url, "abcde", n=2)
    for index in (0, 1):
        own = [{"choices": [choice]} for event in found for choice in event["choices"] if choice["index"] == index]
        assert contents(own) == ["abc", "de"]


def test_the_end_of_the_reasoning_and_the_text_after_it_share_an_event(url):
    found = says(url, "<think>ab</think>cd", model="agent")
    deltas = [choice["delta"] for event in found for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ab"
    assert "".join(delta.get("content", "") for delta in deltas) == "cd"
    assert len([delta for delta in deltas if delta.get("content")]) < 3


def test_deltas_of_a_step_become_one_with_one_entry_for_each_call():
    def call(index, arguments, **more):
        return {"tool_calls": [{"index": index, **more, "function": {"arguments": arguments}}]}

    deltas = [{"content": "a"}, {"content": "b"}, call(0, "", id="x"), call(0, "{"), call(0, "}"), call(1, "1", id="y")]
    assert as_one(deltas) == [
        {
            "content": "ab",
            "tool_calls": [
                {"index": 0, "id": "x", "function": {"arguments": "{}"}},
                {"index": 1, "id": "y", "function": {"arguments": "1"}},
            ],
        }
    ]
    assert as_one([]) == []


@pytest.mark.parametrize(
    ("path", "body", "type", "text"),
    [
        ("responses", {"input": "abcdefgh"}, "response.output_text.delta", lambda event: event["delta"]),
        (
            "messages",
            {"messages": [{"role": "user", "content": "abcdefgh"}], "max_tokens": 20},
            "content_block_delta",
            lambda event: event["delta"]["text"],
        ),
    ],
)
def test_other_apis_send_an_event_for_each_step_too(url, path, body, type, text):
    found = events(url, path, model="plain", **body)
    assert [text(event) for event in found if event["type"] == type] == ["abc", "def", "gh"]


def event_of(text, **more):
    return (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}], **more}).encode()
        + b"\n\n"
    )


def test_a_client_counts_the_tokens_that_events_say_they_have():
    reader = AnswerReader(16, counts_all=True, has_nvext=True)
    sent = [
        event_of("a"),
        event_of("bcd", nvext={"num_tokens": 3}),
        event_of("e"),
        event_of("", nvext={"num_tokens": 2}),
    ]
    assert [reader.take(event) for event in sent] == [1, 3, 1, 2]


def test_a_client_counts_tokens_by_the_usage_so_far_where_each_event_has_it():
    reader = AnswerReader(16)
    assert [reader.take(event_of("abc", usage={"completion_tokens": count})) for count in (3, 4, 8)] == [3, 1, 4]


def test_a_usage_that_comes_only_at_the_end_does_not_count_for_its_event():
    reader = AnswerReader(16)
    assert [reader.take(event_of(text)) for text in "ab"] == [1, 1]
    assert reader.take(event_of("c", usage={"completion_tokens": 9})) == 1


def test_a_run_counts_every_token_of_mockers_that_speculate_and_the_gaps_between_them():
    drafting = {"num_speculative_tokens": 3, "acceptance_rates": "1,1,1", "drafting_ms": 1}
    requests = Workload("w", 16, [Request(0.02 * number, 40, 30, (2 * number, 2 * number + 1)) for number in range(4)])
    with running(num_workers=1, engine=drafting) as stack:
        target = MeasuredServer(stack.url, stack.model, is_ours=True)
        order = Order(requests, target, LoadConfig(), "", PATIENCE_S)

        async def send():
            return await send_all(order, num_clients=1, stop=asyncio.Event())

        sent = uvloop.run(send())
    assert sent.requests.error.tolist() == [""] * 4
    assert sent.requests.osl.tolist() == [30] * 4
    assert metrics.TokenGaps(sent.gaps).count == (30 - sent.requests.first_chunk_tokens).sum()
