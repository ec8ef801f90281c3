"""Sessions whose later turns repeat what the server answered."""

import itertools
import json

import msgspec
import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.live.answer_message import AnswerMessage
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.broken_off import BrokenOff
from dynabench.live.conversations import Conversations, Repeated
from dynabench.live.event_types import EventChoice
from dynabench.live.events import AnswerReader
from dynabench.live.grammars import GRAMMARS
from dynabench.live.run import measure, server_at
from dynabench.live.validity import spoilt
from reports.figures.insight import remarks
from tests.dynabench.test_apis import streamed
from tests.dynabench.test_event_streams import chat, stated
from tests.dynabench.test_load import send
from tests.reports.runs import run
from tests.support.strange_server import DONE, says, strange_server
from workloads import Request, Workload, WorkloadError
from workloads.pacing import LoadConfig

CALL = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def turns(*contents, length=4, added=6):
    """Make a session of these contents; None: of tokens, some more each turn."""
    return [
        Request(
            0.0, length + added * number, 2, tuple(range(40)), "s", (number - 1,) if number else (), content=content
        )
        for number, content in enumerate(contents)
    ]


A, B, C = user("a"), user("b"), user("c")
PLANNED = [[A], [A, assistant("x"), B], [A, assistant("x"), B, assistant("y"), C]]


def finish():
    end = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return f"data: {end}\n\n"


def counting():
    """Make the behaviour of a server whose nth answer is "answer n"."""
    numbers = itertools.count(1)

    async def answer(reader, writer):
        texts = [chat(role="assistant", content=""), chat(content="answer"), chat(content=f" {next(numbers)}")]
        await says(*texts, finish() + stated(2, None) + DONE)(reader, writer)

    return answer


def sent_to(requests, answer, **target):
    with strange_server(answer, seen := []) as url:
        sent = send(url, Workload("w", 1, requests), prompts="chat", repeats_answers=True, **target)
    assert set(sent.requests.error) == {""}
    return [body["messages"] for body in seen], sent.facts


def test_later_turns_repeat_what_the_server_answered():
    bodies, facts = sent_to(turns(*PLANNED), counting())
    assert bodies == [
        [A],
        [A, assistant("answer 1"), B],
        [A, assistant("answer 1"), B, assistant("answer 2"), C],
    ]
    assert (facts["repeated_answers"], facts["planned_answers"]) == (2, 0)
    assert "later turns repeated 2 answers of the server" in remarks([run(facts=facts)])


def test_without_it_they_repeat_the_workload_s_answers():
    with strange_server(counting(), seen := []) as url:
        sent = send(url, Workload("w", 1, turns(*PLANNED)), prompts="chat")
    assert [body["messages"] for body in seen] == PLANNED
    assert (sent.facts["repeated_answers"], sent.facts["planned_answers"]) == (0, 0)


def test_turns_of_tokens_add_words_for_what_they_add():
    bodies, _ = sent_to(turns(None, None, None), counting())
    assert [message["role"] for message in bodies[2]] == ["user", "assistant"] * 2 + ["user"]
    assert bodies[1][:2] == [*bodies[0], assistant("answer 1")]
    assert bodies[2][:4] == [*bodies[1], assistant("answer 2")]
    assert [len(body[-1]["content"].split()) for body in bodies] == [
        4,
        4,
        4,
    ]  # 6 more tokens, 2 of which are the answer


def test_calls_are_the_workload_s_where_it_has_results_and_the_server_called_nothing():
    contents = [[A], [A, CALL, RESULT], [A, CALL, RESULT, assistant("y"), B]]
    bodies, facts = sent_to(turns(*contents), counting())
    assert bodies[1:] == [[A, CALL, RESULT], [A, CALL, RESULT, assistant("answer 2"), B]]
    assert (facts["repeated_answers"], facts["planned_answers"]) == (1, 1)
    [note] = [note for note in remarks([run(facts=facts)]) if "later turns" in note]
    assert note.endswith(
        "and 1 of the workload (1 because it has results of tools, for which the server made no matching calls)"
    )


def calling(**calls):
    """Make a message that calls tools, by id of the call."""
    named = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}} for id, name in calls.items()
    ]
    return {"role": "assistant", "content": None, "tool_calls": named}


def result(id, text):
    return {"role": "tool", "tool_call_id": id, "content": text}


def second(planned, answer, requests=None):
    """Return what a second turn sends after an answer, and whose answers were repeated."""
    talks = Conversations(requests or turns([A], [A, *planned]), lambda request: None)
    talks.request(0)
    talks.on_answer(0, answer)
    return talks.request(1).content[1:], talks.repeated


def test_results_refer_to_the_calls_that_the_server_made():
    planned = [calling(c1="f", c2="g"), result("c2", "two"), result("c1", "one"), B]
    answer = calling(s1="f", s2="g")
    sent, repeated = second(planned, answer)
    assert sent == [answer, result("s2", "two"), result("s1", "one"), B]
    assert repeated == Repeated(num_answers=1)


def test_results_without_a_known_id_are_matched_in_their_order():
    planned = [calling(c1="f", c2="g"), {"role": "tool", "content": "one"}, result("x", "two")]
    assert second(planned, calling(s1="f", s2="g"))[0][1:] == [result("s1", "one"), result("s2", "two")]


@pytest.mark.parametrize("answer", [assistant("no call"), calling(s1="f", s2="g"), None])
def test_nothing_is_invented_where_the_server_made_another_number_of_calls(answer):
    planned = [calling(c1="f"), result("c1", "one")]
    assert second(planned, answer) == (planned, Repeated(num_planned=1, num_unmatched=1))


def test_calls_for_which_there_are_no_results_are_not_repeated():
    assert second([assistant("x"), B], calling(s1="f")) == ([assistant("x"), B], Repeated(num_planned=1))


def test_an_answer_that_cannot_be_repeated_is_the_workload_s():
    assert second([assistant("x"), B], None) == ([assistant("x"), B], Repeated(num_planned=1))


@pytest.mark.parametrize(
    ("api", "place"),
    [
        ("chat", lambda body: body["messages"][1:]),
        ("responses", lambda body: body["input"][1:]),
        ("messages", lambda body: body["messages"][1:]),
    ],
)
def test_calls_of_the_server_come_back_with_results_in_every_api(api, place):
    said = CALLS[api]

    async def answer(reader, writer):
        await says(*said)(reader, writer)

    requests = turns([A], [A, calling(c1="f"), result("c1", "sunny")])
    with strange_server(answer, seen := []) as url:
        sent = send(url, Workload("w", 1, requests), api=api, prompts="text", repeats_answers=True)
    assert set(sent.requests.error) == {""}
    call, results = place(seen[1])
    assert "s1" in json.dumps(call)
    assert '{\\"city\\": \\"Rome\\"}' in json.dumps(call) or {"city": "Rome"} in [
        part.get("input") for part in call["content"]
    ]
    assert "s1" in json.dumps(results)
    assert "sunny" in json.dumps(results)
    assert (sent.facts["repeated_answers"], sent.facts["unmatched_results"]) == (1, 0)


def event(said):
    return f"event: {said.get('type', 'message')}\ndata: {json.dumps(said)}\n\n"


def calls_in_chat():
    yield chat(role="assistant", content=None)
    yield chat(tool_calls=[{"index": 0, "id": "s1", "type": "function", "function": {"name": "f", "arguments": ""}}])
    for part in PIECES:
        yield chat(tool_calls=[{"index": 0, "function": {"arguments": part}}])
    yield finish() + stated(3, None) + DONE


def calls_in_response():
    yield event(
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {"type": "function_call", "id": "fc", "call_id": "s1", "name": "f"},
        }
    )
    for part in PIECES:
        yield event(
            {"type": "response.function_call_arguments.delta", "output_index": 0, "item_id": "fc", "delta": part}
        )
    yield event({"type": "response.completed", "response": {"usage": {"input_tokens": 4, "output_tokens": 3}}})


def calls_in_message():
    yield event({"type": "message_start", "message": {"usage": {"input_tokens": 4}}})
    yield event(
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "s1", "name": "f", "input": {}},
        }
    )
    for part in PIECES:
        yield event(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": part}}
        )
    yield event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}})
    yield event({"type": "message_stop"})


PIECES = ('{"city": ', '"Rome"}')
CALLS = {"chat": [*calls_in_chat()], "responses": [*calls_in_response()], "messages": [*calls_in_message()]}


def collected(*deltas):
    """Return the message that deltas of a chat add up to."""
    message = AnswerMessage()
    for delta in deltas:
        message.add(msgspec.convert({"delta": delta}, EventChoice))
    return message.whole()


def piece(arguments=None, **fields):
    return {"tool_calls": [{"function": {"name": fields.pop("name", None), "arguments": arguments}, **fields}]}


def test_calls_are_put_together_by_their_index_or_else_in_their_order():
    indexed = [
        piece("", index=0, id="a", name="f"),
        piece("", index=1, id="b", name="g"),
        piece('{"x":', index=0),
        piece("1}", index=0),
    ]
    bare = [piece('{"x":', id="a", name="f"), piece("1}"), piece("", id="b", name="g")]
    for deltas in (indexed, bare):
        calls = collected(*deltas)["tool_calls"]
        assert [(call["id"], call["function"]) for call in calls] == [
            ("a", {"name": "f", "arguments": '{"x":1}'}),
            ("b", {"name": "g", "arguments": ""}),
        ]


@pytest.mark.parametrize(
    "delta",
    [
        piece('{"x": ', index=0, id="a", name="f"),  # cut
        piece("[1]", index=0, id="a", name="f"),
        piece("{}", index=0, name="f"),
        piece("{}", index=0, id="a"),
        {"tool_calls": [{"index": 0, "id": "a", "custom": {"name": "f", "input": "x"}}]},
        {"function_call": {"name": "f", "arguments": "{}"}},
        {"reasoning": "thought"},
        {"content": ""},
    ],
)
def test_what_no_client_could_repeat_is_no_message(delta):
    assert collected(delta) is None


@pytest.mark.parametrize("other", [[B, assistant("x"), C], [A], [A, B], []])
def test_a_turn_that_does_not_continue_the_one_before_is_sent_as_it_is(other):
    talks = Conversations(turns([A], other), lambda request: None)
    talks.request(0)
    talks.on_answer(0, assistant("answer"))
    assert talks.request(1).content == other


def test_a_session_does_not_continue_another_s():
    requests = turns([A], [A, assistant("x"), B])
    requests[1] = Request(0.0, 4, 2, (0,), "t", (0,), content=requests[1].content)
    talks = Conversations(requests, lambda request: None)
    talks.request(0)
    talks.on_answer(0, assistant("answer"))
    assert talks.request(1).content == [A, assistant("x"), B]


def test_the_salt_of_a_run_stays_at_the_beginning():
    talks = Conversations(turns(*PLANNED), lambda request: None)
    bodies = Bodies(MeasuredServer("http://x", "m", api="chat"), 1, "s1")
    first = json.loads(bodies.of(talks.request(0)))["messages"]
    talks.on_answer(0, assistant("answer"))
    assert json.loads(bodies.of(talks.request(1)))["messages"] == [*first, assistant("answer"), B]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_the_message_of_an_answer_has_no_reasoning(api):
    reader = AnswerReader(16, grammar=GRAMMARS[api], keeps_message=True)
    for part in streamed(api)[:5]:
        reader.take(part)
    assert reader.message == assistant("It is")
    assert AnswerReader(16).message is None


def test_only_apis_with_messages_have_a_history():
    url = "http://127.0.0.1:1"
    for settings in ({}, {"prompts": "text"}, {"api": "completions"}, {"api": "embeddings"}):
        with pytest.raises(
            ValueError, match="history is 'server', but only chat, responses, messages have earlier answers"
        ):
            ClientConfig(url=url, history="server", **settings)
    assert server_at(url, "m", ClientConfig(history="server", api="messages")).repeats_answers


def test_a_workload_whose_sessions_do_not_wait_has_no_history():
    client = ClientConfig(url="http://127.0.0.1:1", history="server", api="chat")
    for requests in ([Request(0.0, 4, 2, (0,), "s"), Request(1.0, 8, 2, (0,), "s")], [Request(0.0, 4, 2, (0,))]):
        with pytest.raises(WorkloadError, match="w: no request waits for an earlier one of its session"):
            measure(Run.alone(Settings(client=client)), Workload("w", 4, requests))


REFUSALS = {
    "vllm": "This model's maximum context length is 64 tokens. However, you requested 70 tokens",
    "vllm-new": "The decoder prompt (length 70) is longer than the maximum model length of 64.",
    "sglang": "The input (70 tokens) is longer than the model's context length (64 tokens).",
    "llama.cpp": "the request exceeds the available context size, try increasing it",
    "anthropic": "prompt is too long: 70 tokens > 64 maximum",
    "tgi": "`inputs` tokens + `max_new_tokens` must be <= 64. Given: 60 `inputs` tokens and 10 `max_new_tokens`",
}


def failing_at(turn, status, why):
    """Make the behaviour of a server that refuses the nth request."""
    numbers = itertools.count(1)
    answer = counting()

    async def answers(reader, writer):
        if next(numbers) != turn:
            await answer(reader, writer)
            return
        body = json.dumps({"message": why}).encode()
        writer.write(b"HTTP/1.1 %d No\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()

    return answers


@pytest.mark.parametrize(
    ("status", "why", "said", "error"),
    [
        (
            400,
            REFUSALS["vllm"],
            "1 reached the server's context",
            "a turn before it was too long for the server's context",
        ),
        (500, "out of luck", "1 had a turn that failed", "a turn before it failed"),
    ],
)
def test_the_rest_of_a_conversation_whose_turn_fails_is_not_sent_and_counted_in_a_line(status, why, said, error):
    with strange_server(failing_at(2, status, why), seen := []) as url:
        sent = send(url, Workload("w", 1, turns(*PLANNED, [A])), prompts="chat", repeats_answers=True)
    assert len(seen) == 2
    assert sent.requests.error[1].startswith(f"HTTP {status}: ")
    assert list(sent.requests.error[2:]) == [f"not sent: {error}"] * 2
    line = f"1 conversation ended early: {said}; 2 later turns were not sent, and count as failed"
    assert line in remarks([run(facts=sent.facts)])
    [note] = spoilt(sent, LoadConfig(), is_complete=True)
    assert note.startswith("3 of 4 requests failed")
    assert f"most often with: HTTP {status}: " in note


@pytest.mark.parametrize("server", REFUSALS)
def test_servers_refuse_prompts_beyond_their_context_in_their_own_words(server):
    kept = BrokenOff()
    kept.note("HTTP 400: " + json.dumps({"message": REFUSALS[server]}), 3)
    assert kept == BrokenOff(num_too_long=1, num_unsent=3)
    kept.note("HTTP 500: no context length", 2)
    kept.note("timeout", 1)
    assert kept == BrokenOff(num_failed=2, num_too_long=1, num_unsent=6)
