"""Server-sent events by the letter of the standard, ends that some servers leave out, and reasoning."""

import json

import pytest

from dynabench.live.events import AnswerError, AnswerReader
from reports.figures import metrics
from reports.figures.insight import remarks
from reports.summarize import summarize
from reports.tables import comparison
from tests.dynabench.test_load import send, workload
from tests.reports.runs import run
from tests.support.strange_server import DONE, EVENT, FINISH, says, strange_server, usage

LINE_ENDS = ["\n", "\r\n", "\r"]


def delta(**added):
    return json.dumps({"choices": [{"index": 0, "delta": added, "finish_reason": None}]})


ONE, TWO = delta(content="a"), delta(content="b")
END = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
STREAMS = {
    "plain": f"data: {ONE}\n\ndata: {TWO}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "no space": f"data:{ONE}\n\ndata:{TWO}\n\ndata:{END}\n\ndata:[DONE]\n\n",
    "comments": f": hello\n\n:\ndata: {ONE}\n\n: x\n: y\n\ndata: {TWO}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "fields": f"event: message\nid: 7\nretry: 10\ndata: {ONE}\n\nid\nevent\ndata: {TWO}\nx-new: 1\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "several data lines": f"data: {ONE[:1]}\ndata: {ONE[1:]}\n\ndata: {TWO[:-2]}\ndata\ndata:{TWO[-2:]}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "blank lines": f"\n\n\ndata: {ONE}\n\n\n\ndata: {TWO}\n\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "byte order mark": f"\ufeffdata: {ONE}\n\ndata: {TWO}\n\ndata: {END}\n\ndata: [DONE]\n\n",
    "no blank line at the end": f"data: {ONE}\n\ndata: {TWO}\n\ndata: {END}\n\ndata: [DONE]",
}


@pytest.mark.parametrize("end", LINE_ENDS, ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("stream", STREAMS)
def test_events_are_the_same_however_they_are_written_and_cut(stream, end):
    whole = STREAMS[stream].replace("\n", end).encode()
    for size in (1, 2, 3, 5, 17, 64, len(whole)):
        reader = AnswerReader(16)
        for start in range(0, len(whole), size):
            reader.take(whole[start : start + size])
        reader.end()
        assert (reader.num_tokens, reader.finish_reason, reader.is_done) == (2, "stop", True), size


def test_line_ends_may_differ_within_a_stream():
    reader = AnswerReader(16)
    for part in (f"data: {ONE}\r", "\n\r", f"\ndata: {TWO}\n\r\n", f"data: {END}\r\r", "data: [DONE]\r\n\n"):
        reader.take(part.encode())
    reader.end()
    assert reader.num_tokens == 2


def test_a_token_is_counted_with_the_read_that_ends_its_event():
    reader = AnswerReader(16)
    assert [reader.take(part) for part in (f"data: {ONE}\r".encode(), b"\r", b"\n", f"data: {TWO}\r\n\r".encode())] == [
        0,
        1,
        0,
        1,
    ]


@pytest.mark.parametrize("line", ['{"choices":[]}', "Internal Server Error", '"x": 1', "\ufeffdata: {}"])
def test_what_is_no_field_is_malformed(line):
    reader = AnswerReader(16)
    reader.take(f"data: {ONE}\n\n".encode())
    with pytest.raises(AnswerError, match="not a field"):
        reader.take(f"{line}\n\n".encode())


@pytest.mark.parametrize("text", [[EVENT, FINISH + usage(16, 1)], [EVENT + FINISH]])
def test_an_answer_that_said_why_it_ended_counts_without_done_and_that_is_known(text):
    with strange_server(says(*text)) as url:
        sent = send(url, workload(2))
    assert sent.requests.error.tolist() == ["", ""]
    assert sent.facts["without_done"] == 2
    [note] = [note for note in remarks([run(facts=sent.facts)]) if "[DONE]" in note]
    assert note.startswith("2 answers had no last event ([DONE], ")


def test_our_own_frontend_always_says_done():
    with strange_server(says(EVENT, FINISH + usage(16, 1))) as url:
        columns = send(url, workload(1), is_ours=True).requests
    assert columns.error[0].startswith("the stream ended without [DONE]: ")


def test_an_answer_without_a_reason_for_its_end_has_failed():
    with strange_server(says(EVENT, usage(16, 1))) as url:
        columns = send(url, workload(1)).requests
    assert columns.error[0].startswith("the stream ended without [DONE]: ")


def chat(**added):
    return f"data: {delta(**added)}\n\n"


def stated(completion, reasoning):
    details = {"prompt_tokens": 7, "completion_tokens": completion}
    if reasoning is not None:
        details["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return "data: " + json.dumps({"choices": [], "usage": details}) + "\n\n"


FINISHED = f"data: {END}\n\n"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(("said", "reasoning"), [(None, 5), (5, 5), (4, 4)])
def test_reasoning_is_counted_apart_as_the_server_states_it_or_by_events(name, said, reasoning):
    thoughts = [chat(**{name: f"r{n}"}) for n in range(5)]
    texts = [chat(content=f"t{n}") for n in range(5)]
    with strange_server(says(*thoughts, *texts, FINISHED + stated(10, said) + DONE)) as url:
        sent = send(url, workload(2, tokens=10), prompts="chat")
    assert sent.requests.osl.tolist() == [10, 10]
    assert (sent.facts["reasoning_tokens"], sent.facts["tokens"]) == (2 * reasoning, 20)
    assert sent.facts["hidden_reasoning"] == 0
    lines = dict(comparison.rows(summarize([run(facts=sent.facts)])))
    assert lines["reasoning (of output tokens)"] == [f"{reasoning * 10:.1f}%"]


def test_events_of_several_reasoning_tokens_are_scaled_to_the_usage():
    events = [chat(reasoning_content="a b"), chat(reasoning_content="c d"), chat(content="e f"), chat(content="g h")]
    with strange_server(says(*events, FINISHED + stated(8, None) + DONE)) as url:
        sent = send(url, workload(1, tokens=8), prompts="chat")
    assert (sent.facts["reasoning_tokens"], sent.requests.osl[0]) == (4, 8)


def test_reasoning_that_is_not_sent_is_in_the_ttft_and_not_in_the_gaps():
    texts = [chat(content=f"t{n}") for n in range(5)]
    with strange_server(says(*texts, FINISHED + stated(20, 15) + DONE)) as url:
        sent = send(url, workload(1, tokens=20), prompts="chat")
    columns = sent.requests
    assert (columns.osl[0], columns.first_chunk_tokens[0]) == (20, 16)
    assert metrics.TokenGaps(sent.gaps).count == 4
    assert (sent.facts["reasoning_tokens"], sent.facts["hidden_reasoning"]) == (15, 1)
    [note] = [note for note in remarks([run(facts=sent.facts)]) if "did not send" in note]
    assert note.startswith("1 answer had reasoning that the server counted and did not send: TTFT includes it")


def test_reasoning_is_known_where_events_are_counted_without_parsing():
    reader = AnswerReader(200)
    for kind, count in (("reasoning_content", 50), ("content", 30)):
        assert sum(reader.take(chat(**{kind: f"x{n}"}).encode()) for n in range(count)) == count
    assert (reader.num_reasoning, reader.num_tokens) == (50, 80)
