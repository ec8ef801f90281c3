"""The load generator against a server whose delays and faults are known."""

import asyncio
import itertools
import json

import numpy as np
import pytest
import uvloop

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.live.bodies import Bodies, MeasuredServer
from dynabench.live.clients import ClientRecords, Order, send_all, shares
from dynabench.live.known_server import MODEL
from dynabench.live.run import measure
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig
from dynabench.live.validity import spoilt
from reports.figures import metrics
from reports.figures.split import split_ttft
from reports.record.records import Record, Requests
from tests.support.strange_server import DONE, EVENT, FINISH, HEAD, answers, chunk, says, strange_server, usage
from tests.support.waiting import PATIENCE_S
from workloads import Request, Workload
from workloads.pacing import LoadConfig


def workload(count=40, *, gap=0.005, tokens=6, **changes):
    requests = [Request(number * gap, 16, tokens, (number,), **changes) for number in range(count)]
    return Workload("w", 64, requests)


def send(url, requests, load=None, *, clients=1, timeout_s=PATIENCE_S, **target) -> ClientRecords:
    order = Order(requests, MeasuredServer(url, MODEL, **target), load or LoadConfig(), "", timeout_s)

    async def run():
        return await send_all(order, num_clients=clients, stop=asyncio.Event())

    return uvloop.run(run())


@pytest.fixture(scope="module")
def quick():
    with known_server(SelftestConfig(ttft_ms=10, itl_ms=2)) as url:
        yield url


@pytest.mark.parametrize("is_ours", [True, False])
def test_every_token_is_counted_and_no_time_goes_backwards(quick, is_ours):
    columns = send(quick, workload(), is_ours=is_ours).requests
    assert set(columns.error) == {""}
    assert columns.osl.tolist() == [6] * 40
    assert (columns.first_chunk_tokens >= 1).all()  # a busy machine may read two tokens at once
    order = ["intended_s", "sent_s", "first_byte_s", "first_token_s", "last_token_s", "done_s"]
    for before, after in itertools.pairwise(order):
        assert (getattr(columns, before) <= getattr(columns, after)).all(), (before, after)
    assert (columns.first_token_s - columns.sent_s >= 0.010).all()


def test_chat_messages_go_where_chats_go(quick):
    requests = workload(5, content=[{"role": "user", "content": "Hello"}])
    columns = send(quick, requests, prompts="text").requests
    assert (set(columns.error), columns.osl.tolist()) == ({""}, [6] * 5)


def test_the_second_token_has_a_time_of_its_own_unless_events_are_not_tokens():
    texts = [EVENT * 3, FINISH]
    with strange_server(says(*texts, usage(16, 3) + DONE)) as url:
        together = send(url, workload(1)).requests
    with strange_server(says(EVENT, EVENT, EVENT, FINISH, usage(16, 3) + DONE)) as url:
        apart = send(url, workload(1)).requests
    with strange_server(says(*texts, usage(16, 6) + DONE)) as url:
        unknown = send(url, workload(1)).requests
    assert together.second_token_s[0] == together.first_token_s[0]
    assert apart.first_token_s[0] <= apart.second_token_s[0] <= apart.last_token_s[0]
    assert unknown.second_token_s.mask.all()


STAGES = {
    "prefill_queued": 0.25,
    "admitted": 0.5,
    "prefill_end": 0.75,
    "decode_queued": 1.0,
    "decode_blocks": 1.25,
    "transfer_start": 1.5,
    "transfer_end": 1.75,
    "decode_start": 2.0,
}


def told(timing, routing=None):
    """Return what the client makes of what our frontend says in an answer's last event."""
    extra = {"timing": timing, "routing": routing}
    last = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "nvext": extra}
    with strange_server(says(EVENT, EVENT, f"data: {json.dumps(last)}\n\n", usage(16, 2) + DONE)) as url:
        columns = send(url, workload(1), is_ours=True).requests
        ignored = send(url, workload(1)).requests
    assert columns.error[0] == ignored.error[0] == ""
    assert ignored.admitted_s.mask.all()  # others may mean anything by it
    return columns


def test_what_our_frontend_says_of_the_stages_of_a_request_is_in_its_record():
    routing = {"best_tokens": -1, "queue_depth": 0, "prefill_slot": 3}
    found = told({"ttft_ms": 2.5, "stages": STAGES}, routing)
    columns = {name: getattr(found, f"{name}_s")[0] - found.admitted_s[0] for name in STAGES}
    assert columns == pytest.approx({name: (at - 0.5) / 1000 for name, at in STAGES.items()})
    assert found.admitted_s[0] >= found.sent_s[0] + 0.0005 - 1e-9
    assert found.prefill_worker[0] == 3
    parts = split_ttft([Record("a", found, np.empty((0, 5)), 0.0, 1, is_live=True)])
    assert sum(parts.parts.values()) == pytest.approx(parts.ttft)
    assert parts.apart == 1.0


def test_the_way_between_client_and_frontend_is_a_part_of_the_queue():
    found = told({"ttft_ms": 0.0, "stages": {"admitted": 0.0}})
    assert found.admitted_s[0] == pytest.approx(found.first_token_s[0])


@pytest.mark.parametrize("strange", ["soon", -1, 1e300, None, [], {}])
def test_stages_without_a_meaning_are_unknown(strange):
    found = told({"ttft_ms": 1.0, "stages": dict.fromkeys(STAGES, strange) | {"lunch": 3}})
    assert all(getattr(found, f"{name}_s").mask.all() for name in STAGES)
    assert found.prefill_worker.mask.all()


@pytest.mark.parametrize("timing", [None, {}, {"stages": STAGES}, {"ttft_ms": "x", "stages": STAGES}])
def test_stages_of_a_first_token_at_no_known_time_are_unknown(timing):
    assert told(timing).admitted_s.mask.all()


def test_a_salt_keeps_other_runs_caches_out_of_texts_too():
    def body(content, salt):
        one = Workload("w", 64, [Request(0.0, 4, 2, (0,), content=content)])
        return json.loads(Bodies(MeasuredServer("http://x", "m", "text"), one.block_size, salt).of(one.requests[0]))

    assert body("Hello", "")["prompt"] == "Hello"
    assert body("Hello", "s1")["prompt"] == "s1 Hello"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    assert body(chat, "s1")["messages"] == [{"role": "user", "content": "s1 Hi"}, chat[1]]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert body(parts, "s1")["messages"] == [{"role": "system", "content": "s1"}, *parts]
    assert body(chat, "")["messages"] == chat


def test_chunks_of_several_tokens_are_several_gaps():
    with known_server(SelftestConfig(ttft_ms=5, itl_ms=8, tokens_per_chunk=4)) as url:
        for is_ours in (True, False):
            sent = send(url, workload(10, tokens=12), is_ours=is_ours)
            assert sent.requests.osl.tolist() == [12] * 10
            assert set(sent.requests.first_chunk_tokens) <= {4, 8, 12}  # a busy machine reads several at once
            assert metrics.TokenGaps(sent.gaps).count == (12 - sent.requests.first_chunk_tokens).sum()
            assert sent.facts["tokens_together"] == sent.facts["tokens"] == 120


def test_a_closed_loop_keeps_so_many_in_flight(quick):
    columns = send(quick, workload(30), LoadConfig(concurrency=3)).requests
    in_flight = [int(((columns.sent_s <= time) & (columns.done_s > time)).sum()) for time in columns.sent_s]
    assert max(in_flight) == 3


def test_turns_wait_for_answers_and_think(quick):
    rows = [Request(0.0, 16, 4, (n,), "s", (n - 1,) if n else (), 0.05 if n else 0.0) for n in range(4)]
    columns = send(quick, Workload("w", 64, rows)).requests
    thought = columns.intended_s[1:] - columns.done_s[:-1]
    assert thought.tolist() == pytest.approx([0.05] * 3, abs=1e-6)
    assert (columns.sent_s >= columns.intended_s).all()


def test_several_processes_share_one_schedule(quick):
    requests = workload(60)
    sent = send(quick, requests, clients=3)
    assert sent.requests.request.tolist() == list(range(60))
    assert sent.requests.intended_s == pytest.approx([request.arrival_s for request in requests])
    assert sent.facts["tokens"] == 360


def test_what_belongs_together_goes_to_one_process():
    rows = [Request(0.0, 1, 1, (n,), "a" if n in (0, 3) else "", (1,) if n == 4 else ()) for n in range(6)]
    parts = shares(Workload("w", 64, rows), 3)
    assert sorted(number for part in parts for number in part) == list(range(6))
    assert any({0, 3} <= set(part) for part in parts)
    assert any({1, 4} <= set(part) for part in parts)


def test_the_warm_up_is_measured_but_does_not_count(quick):
    sent = send(quick, workload(40, gap=0.01), LoadConfig(warmup_s=0.2))
    assert sent.requests.is_measured.sum() == 20
    counted = sent.requests.is_measured
    assert metrics.TokenGaps(sent.gaps).count == (6 - sent.requests.first_chunk_tokens[counted]).sum()
    run = Record("a", sent.requests, sent.gaps, 0.0, 1)
    assert len(run.measured.requests) == 20


async def hangs_up(reader, writer):
    writer.write(HEAD + chunk(EVENT))
    await writer.drain()


async def refuses(reader, writer):
    writer.write(
        b'HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\ncontent-length: 26\r\n\r\n{"error":{"message":"no"}}'
    )
    await writer.drain()


async def stops_without_done(reader, writer):
    writer.write(HEAD + chunk(EVENT) + b"0\r\n\r\n")
    await writer.drain()
    await reader.read()


async def fails_in_the_stream(reader, writer):
    writer.write(HEAD + chunk(EVENT) + chunk('data: {"error":{"message":"boom"}}\n\ndata: [DONE]\n\n') + b"0\r\n\r\n")
    await writer.drain()
    await reader.read()


async def speaks_nonsense(reader, writer):
    writer.write(b"hello\r\n\r\n")
    await writer.drain()


async def never_answers(reader, writer):
    await reader.read()


async def says_nothing(reader, writer):
    writer.write(HEAD + chunk("data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()
    await reader.read()


def test_warm_ups_are_as_long_as_the_workloads_requests_and_left_out():
    requests = [Request(0.0, length, 20, (length,)) for length in (40, 10, 30, 20)]
    seen, before = [], []
    with strange_server(answers, seen) as url:
        settings = Settings(client=ClientConfig(url=url, warmup_requests=4))
        record = measure(
            Run.alone(settings), Workload("w", 64, requests), on_start=lambda now: before.append(len(seen))
        )
    assert before == [4]
    assert sorted(len(body["prompt"]) for body in seen[:4]) == [10, 20, 30, 40]
    assert {body["max_tokens"] for body in seen[:4]} == {8}
    assert len({tuple(body["prompt"][:10]) for body in seen}) == 8
    assert len(record.requests) == 4


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (hangs_up, "the server closed the connection"),
        (refuses, 'HTTP 429: {"error":{"message":"no"}}'),
        (stops_without_done, "the stream ended without [DONE]"),
        (fails_in_the_stream, "error in the stream: {'message': 'boom'}"),
        (speaks_nonsense, "the answer is not valid HTTP/1.1"),
        (never_answers, "timeout"),
        (says_nothing, "the answer contains no tokens"),
    ],
)
def test_a_failed_request_says_why_and_the_next_is_sent(answer, error):
    with strange_server(answer) as url:
        sent = send(url, workload(3), timeout_s=1.0 if error == "timeout" else PATIENCE_S)
    assert all(found.startswith(error) for found in sent.requests.error), sent.requests.error
    assert len(sent.requests.error) == 3
    assert spoilt(sent, LoadConfig(), is_complete=True)[0].startswith("every request failed")


def test_an_answer_split_anywhere_is_the_same():
    text = (
        EVENT * 3
        + FINISH
        + 'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}}\n\ndata: [DONE]\n\n'
    )

    for cut in (1, 7, 60, 61, 62, 63, 64, 65, 66, 130, 200, len(text) - 3):

        async def answer(reader, writer, cut=cut):
            writer.write(HEAD + chunk(text[:cut]))
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(chunk(text[cut:]) + b"0\r\n\r\n")
            await writer.drain()
            await reader.read()

        with strange_server(answer) as url:
            columns = send(url, workload(1)).requests
        assert (columns.error[0], columns.osl[0], columns.cached_tokens[0]) == ("", 3, 1), cut


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ("data: {not json}\n\n", "an event is malformed (JSON is malformed"),
        ('data: {"choices":[{"index":0,"text":"a"\n\n', "an event is malformed (Input data was truncated"),
        ('data: {"choices":"none"}\n\n', "an event is malformed (Expected `array"),
        ('data: {"choices":[{"text":5}]}\n\n', "an event is malformed (Expected `str | null`"),
        ('data: {"ping":1}\n\n', "an event is malformed (no choices)"),
        ("data: [1]\n\n", "an event is malformed (Expected `object`"),
        ('{"choices":[]}\n\n', "an event is malformed (not a field)"),
        (f"data: {'[' * 5000}\n\n", "an event is malformed"),
        ("event: error\ndata: out of memory\n\n", "error in the stream: event: error data: out of memory"),
        ('data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n', "the answer broke off: finish_reason abort"),
    ],
)
@pytest.mark.parametrize("before", [0, 3])
def test_a_malformed_event_fails_its_request(event, error, before):
    with strange_server(says(EVENT * before + event, FINISH + DONE)) as url:
        columns = send(url, workload(2)).requests
    assert all(found.startswith(error) for found in columns.error), columns.error


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([EVENT, usage(1, 1), DONE], "the answer ended without a finish_reason: "),
        ([EVENT, usage(1, 1)], "the stream ended without [DONE]: "),
        ([FINISH, usage(1, 1), DONE], "the answer contains no tokens"),
        ([EVENT * 2000], "the answer does not end: "),
    ],
)
def test_an_answer_that_does_not_end_as_one_does_has_failed(texts, error):
    with strange_server(says(*texts)) as url:
        columns = send(url, workload(2)).requests
    assert all(found.startswith(error) for found in columns.error), columns.error


async def goes_on_in_one_event(reader, writer):
    writer.write(HEAD)
    while True:
        writer.write(chunk("x" * (1 << 18)))
        await writer.drain()


async def goes_on_in_an_error(reader, writer):
    writer.write(b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(chunk("x" * (1 << 18)))
        await writer.drain()


async def goes_on_in_its_head(reader, writer):
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x: y\r\n" * 1000)
        await writer.drain()


async def goes_on_without_tokens(reader, writer):
    writer.write(HEAD)
    while True:
        writer.write(chunk(": still here\n\n"))
        await writer.drain()
        await asyncio.sleep(0.01)


async def goes_on_without_text(reader, writer):
    writer.write(HEAD)
    while True:
        writer.write(chunk('data: {"choices":[{"text":""}]}\n\n' * 1000))
        await writer.drain()


async def goes_on_behind_its_end(reader, writer):
    writer.write(HEAD + chunk(EVENT + FINISH + DONE) + b"0\r\n")
    while True:
        writer.write(b"x: y\r\n" * 1000)
        await writer.drain()


async def wants_another_protocol(reader, writer):
    writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    await writer.drain()
    await reader.read()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (goes_on_in_one_event, "an event is longer than 1,048,576 bytes: xxx"),
        (goes_on_in_an_error, "HTTP 500: xxx"),
        (goes_on_in_its_head, "the headers of the answer are longer than 65,536 bytes"),
        (goes_on_without_tokens, "timeout"),
        (goes_on_without_text, "the answer does not end"),
        (goes_on_behind_its_end, "the answer is not valid HTTP/1.1: "),
        (wants_another_protocol, "the answer is not valid HTTP/1.1"),
    ],
)
def test_what_never_ends_is_given_up_in_one_line(answer, error):
    with strange_server(answer) as url:
        columns = send(url, workload(2), timeout_s=2.0 if error == "timeout" else PATIENCE_S).requests
    for found in columns.error:
        assert found.startswith(error), found
        assert len(found) < 400
        assert found.isprintable()


def test_a_host_that_is_no_name_fails_the_request():
    columns = send("http://a..b", workload(1)).requests
    assert columns.error[0].startswith("cannot connect to a..b: ")


def test_what_a_server_says_is_one_printable_line():
    async def answer(reader, writer):
        body = b"no \x1b]0;owned\x07\r\n[/b] \xff"
        writer.write(b"HTTP/1.1 400 Bad\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()

    with strange_server(answer) as url:
        columns = send(url, workload(1)).requests
    assert columns.error.tolist() == ["HTTP 400: no \\x1b]0;owned\\x07 [/b] \ufffd"]


@pytest.mark.parametrize("end", ["\r\n\r\n", "\n\n"])
def test_events_may_have_comments_names_and_other_line_ends(end):
    texts = [
        f": hello{end}",
        f'event: message{end[: len(end) // 2]}id: 7{end[: len(end) // 2]}data:{{"choices":[{{"text":"a"}}]}}{end}',
        *(f'data: {{"choices":[{{"delta":{{"content": "b {n}"}},"finish_reason":null}}]}}{end}' for n in range(3)),
        f'data: {{"choices":[{{"delta":{{"content":""}},"finish_reason":null}}]}}{end}',
        f'data: {{"choices":[{{"delta":{{}},"finish_reason":"stop"}}]}}{end}',
        "data: [DONE]",
    ]
    with strange_server(says(*texts)) as url:
        columns = send(url, workload(1)).requests
    assert (columns.error[0], columns.osl[0]) == ("", 4)


def test_interim_answers_are_passed_over():
    async def answer(reader, writer):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        writer.write(HEAD + chunk(EVENT + FINISH + DONE) + b"0\r\n\r\n")
        await writer.drain()

    with strange_server(answer) as url:
        assert send(url, workload(3)).requests.error.tolist() == [""] * 3


@pytest.mark.parametrize(
    "wrong", [(333, 2**31 - 1), (333, 10**12), (333, 60), (-5, -7), ('"12"', '"lots"'), (1.5, "true")]
)
def test_a_usage_that_cannot_be_is_not_used_and_that_is_known(wrong):
    with strange_server(says(EVENT, EVENT, FINISH + usage(*wrong) + DONE)) as url:
        sent = send(url, workload(2))
    columns = sent.requests
    assert (columns.error.tolist(), columns.osl.tolist()) == ([""] * 2, [2] * 2)
    assert columns.isl.tolist() == [wrong[0] if wrong[0] == 333 else 16] * 2
    assert (sent.facts["wrong_usage"], sent.facts["without_usage"]) == (2, 0)


def test_more_tokens_than_were_asked_for_can_be_if_they_came():
    with strange_server(says(*[EVENT] * 9, FINISH + usage(16, 9) + DONE)) as url:
        sent = send(url, workload(1, tokens=6))
    assert (sent.requests.osl.tolist(), sent.facts["wrong_usage"]) == ([9], 0)


def test_lengths_are_those_that_the_server_counted():
    with strange_server(says(EVENT * 2, EVENT * 2, FINISH + usage(333, 12) + DONE)) as url:
        sent = send(url, workload(3, tokens=32))
    columns = sent.requests
    assert columns.error.tolist() == [""] * 3
    assert (columns.isl.tolist(), columns.osl.tolist()) == ([333] * 3, [12] * 3)
    assert (columns.planned_isl.tolist(), columns.planned_osl.tolist()) == ([16] * 3, [32] * 3)


def test_tokens_of_one_event_came_together():
    with strange_server(says(EVENT, EVENT, EVENT, EVENT, FINISH + usage(16, 12) + DONE)) as url:
        sent = send(url, workload(2, tokens=12))
    assert (sent.facts["tokens"], sent.facts["tokens_together"]) == (24, 24)
    columns = sent.requests
    assert columns.first_chunk_tokens[0] >= 3
    assert metrics.TokenGaps(sent.gaps).count == (12 - columns.first_chunk_tokens).sum()


def test_an_answer_without_usage_is_counted_by_its_events_and_that_is_known():
    with strange_server(says(EVENT, EVENT, FINISH + DONE)) as url:
        sent = send(url, workload(2))
    assert (sent.requests.isl.tolist(), sent.requests.osl.tolist()) == ([16, 16], [2, 2])
    assert sent.facts["without_usage"] == 2


@pytest.mark.parametrize("content", [None, "Hello", [{"role": "user", "content": "Hello"}]])
def test_any_workload_can_be_sent_as_chats(content):
    seen = []
    with strange_server(answers, seen) as url:
        columns = send(url, workload(1, content=content), prompts="chat").requests
    assert columns.error.tolist() == [""]
    text = "Hello" if content else seen[0]["messages"][0]["content"]
    assert seen[0]["messages"] == [{"role": "user", "content": text}]
    assert len(text.split()) == (1 if content else 16)


def test_what_waits_for_a_failed_request_is_not_sent():
    rows = [Request(0.0, 4, 2, (0,)), Request(0.0, 4, 2, (1,), "", (0,)), Request(0.0, 4, 2, (2,), "", (1,))]
    with strange_server(refuses) as url:
        columns = send(url, Workload("w", 64, rows)).requests
    assert [error.split(":")[0] for error in columns.error] == ["HTTP 429", "not sent", "not sent"]


def sent_with(lag, busy=0.1, num_failed=0):
    count = len(lag)
    intended = np.arange(count) * 0.1
    errors = np.array(["HTTP 500: no"] * num_failed + [""] * (count - num_failed), dtype=object)
    requests = Requests.of(intended_s=intended, sent_s=intended + lag, isl=np.full(count, 10), error=errors)
    return ClientRecords(requests, np.empty((0, 5)), {"cpu_share": busy})


@pytest.mark.parametrize(
    ("num_failed", "share", "note"),
    [
        (0, 0.01, None),
        (10, 0.01, None),
        (
            11,
            0.01,
            "11 of 1,000 requests failed (1.1%, more than --max-failed-share 0.01), most often with: HTTP 500: no",
        ),
        (11, 0.05, None),
        (1, 0.0, "1 of 1,000 requests failed (0.1%, more than --max-failed-share 0), most often with: HTTP 500: no"),
        (1000, 1.0, "every request failed, the first with: HTTP 500: no"),
    ],
)
def test_a_run_in_which_too_many_failed_is_not_valid(num_failed, share, note):
    found = spoilt(
        sent_with(np.zeros(1000), num_failed=num_failed), LoadConfig(), is_complete=True, max_failed_share=share
    )
    assert found == ([note] if note else [])


def test_failures_of_the_warm_up_spoil_nothing():
    sent = sent_with(np.zeros(100), num_failed=50)
    sent = sent._replace(requests=sent.requests.replace(is_measured=np.arange(100) >= 50))
    assert spoilt(sent, LoadConfig(warmup_s=5.0), is_complete=True) == []


def test_a_client_that_spoiled_the_run_is_told():
    assert spoilt(sent_with(np.zeros(100)), LoadConfig(), is_complete=True) == []
    assert "the client was late" in spoilt(sent_with(np.full(100, 0.3)), LoadConfig(), is_complete=True)[0]
    assert spoilt(sent_with(np.full(100, 0.3)), LoadConfig(max_concurrency=1), is_complete=True) == []
    assert "used 97% of a core" in spoilt(sent_with(np.zeros(100), busy=0.97), LoadConfig(), is_complete=True)[0]
    slow = spoilt(sent_with(np.linspace(0, 2.0, 100)), LoadConfig(), is_complete=True)
    assert any("of the intended rate" in note for note in slow)
