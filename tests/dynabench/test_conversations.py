"""Sessions whose later turns repeat what the server answered."""

import itertools
import json

import pytest

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.conversations import Conversations
from dynabench.live.events import AnswerReader
from dynabench.live.grammars import GRAMMARS
from dynabench.live.run import measure, server_at
from reports.figures.insight import remarks
from tests.dynabench.test_apis import streamed
from tests.dynabench.test_event_streams import chat, stated
from tests.dynabench.test_load import send
from tests.reports.runs import run
from tests.support.strange_server import DONE, says, strange_server
from workloads import Request, Workload, WorkloadError

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


def test_calls_of_tools_are_the_workload_s_because_it_has_their_results():
    contents = [[A], [A, CALL, RESULT], [A, CALL, RESULT, assistant("y"), B]]
    bodies, facts = sent_to(turns(*contents), counting())
    assert bodies[1:] == [[A, CALL, RESULT], [A, CALL, RESULT, assistant("answer 2"), B]]
    assert (facts["repeated_answers"], facts["planned_answers"]) == (1, 1)
    [note] = [note for note in remarks([run(facts=facts)]) if "later turns" in note]
    assert note.endswith("and 1 of the workload, which call tools or have no text from the server")


@pytest.mark.parametrize("said", [None, ""])
def test_an_answer_without_text_is_not_repeated(said):
    talks = Conversations(turns(*PLANNED), lambda request: None)
    talks.request(0)
    talks.on_answer(0, said)
    assert talks.request(1).content == PLANNED[1]
    assert (talks.num_answers, talks.num_planned) == (0, 1)


@pytest.mark.parametrize("other", [[B, assistant("x"), C], [A], [A, B], []])
def test_a_turn_that_does_not_continue_the_one_before_is_sent_as_it_is(other):
    talks = Conversations(turns([A], other), lambda request: None)
    talks.request(0)
    talks.on_answer(0, "answer")
    assert talks.request(1).content == other


def test_a_session_does_not_continue_another_s():
    requests = turns([A], [A, assistant("x"), B])
    requests[1] = Request(0.0, 4, 2, (0,), "t", (0,), content=requests[1].content)
    talks = Conversations(requests, lambda request: None)
    talks.request(0)
    talks.on_answer(0, "answer")
    assert talks.request(1).content == [A, assistant("x"), B]


def test_the_salt_of_a_run_stays_at_the_beginning():
    talks = Conversations(turns(*PLANNED), lambda request: None)
    bodies = Bodies(MeasuredServer("http://x", "m", api="chat"), 1, "s1")
    first = json.loads(bodies.of(talks.request(0)))["messages"]
    talks.on_answer(0, "answer")
    assert json.loads(bodies.of(talks.request(1)))["messages"] == [*first, assistant("answer"), B]


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_the_text_of_an_answer_has_neither_reasoning_nor_calls(api):
    reader = AnswerReader(16, grammar=GRAMMARS[api], keeps_text=True)
    parts = streamed(api)
    for part in parts[:5]:
        reader.take(part)
    assert reader.text == "It is"
    reader.take(parts[5])
    assert reader.text is None
    assert AnswerReader(16).text is None


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
