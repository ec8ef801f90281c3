"""The load generator against a server whose delays and faults are known."""

import asyncio
import contextlib
import itertools
import json
import threading

import numpy as np
import pytest
import uvloop

from dynabench.clients import Order, Sent, send_all, shares
from dynabench.known_server import MODEL
from dynabench.live import run_live, spoilt
from dynabench.load import LoadGenerator, Target
from dynabench.selftest import known_server
from dynabench.settings import LiveConfig, SelftestConfig
from mocker import EngineConfig
from reports import metrics
from reports.records import ArmResult
from serving.router import RouterConfig
from workloads import Request, Workload
from workloads.pacing import LoadConfig


def workload(count=40, *, gap=0.005, tokens=6, **changes):
    requests = [Request(number * gap, 16, tokens, (number,), **changes) for number in range(count)]
    return Workload("w", 64, requests)


def send(url, requests, load=None, *, clients=1, timeout_s=20.0, **target) -> Sent:
    order = Order(requests, Target(url, MODEL, **target), load or LoadConfig(), "", timeout_s)

    async def run():
        return await send_all(order, num_clients=clients, stop=asyncio.Event())

    return uvloop.run(run())


@pytest.fixture(scope="module")
def quick():
    with known_server(SelftestConfig(ttft_ms=10, itl_ms=2)) as url:
        yield url


@pytest.mark.parametrize("is_ours", [True, False])
def test_every_token_is_counted_and_no_time_goes_backwards(quick, is_ours):
    columns = send(quick, workload(), is_ours=is_ours).columns
    assert set(columns["error"]) == {""}
    assert columns["osl"].tolist() == [6] * 40
    assert (columns["first_chunk_tokens"] >= 1).all()  # a busy machine may read two tokens at once
    order = ["intended_s", "sent_s", "first_byte_s", "first_token_s", "last_token_s", "done_s"]
    for before, after in itertools.pairwise(order):
        assert (columns[before] <= columns[after]).all(), (before, after)
    assert (columns["first_token_s"] - columns["sent_s"] >= 0.010).all()


def test_chat_messages_go_where_chats_go(quick):
    requests = workload(5, content=[{"role": "user", "content": "Hello"}])
    columns = send(quick, requests, prompts="text").columns
    assert (set(columns["error"]), columns["osl"].tolist()) == ({""}, [6] * 5)


def test_a_salt_keeps_other_runs_caches_out_of_texts_too():
    def body(content, salt):
        one = Workload("w", 64, [Request(0.0, 4, 2, (0,), content=content)])
        generator = LoadGenerator(
            one, target=Target("http://x", "m", "text"), load=LoadConfig(), salt=salt, timeout_s=1.0
        )
        return json.loads(generator._body(one.requests[0]))

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
            assert sent.columns["osl"].tolist() == [12] * 10
            assert set(sent.columns["first_chunk_tokens"]) <= {4, 8}
            assert metrics.TokenGaps(sent.gaps).count == (12 - sent.columns["first_chunk_tokens"]).sum()
            assert sent.facts["tokens_together"] == sent.facts["tokens"] == 120


def test_a_closed_loop_keeps_so_many_in_flight(quick):
    columns = send(quick, workload(30), LoadConfig(concurrency=3)).columns
    in_flight = [int(((columns["sent_s"] <= time) & (columns["done_s"] > time)).sum()) for time in columns["sent_s"]]
    assert max(in_flight) == 3


def test_turns_wait_for_answers_and_think(quick):
    rows = [Request(0.0, 16, 4, (n,), "s", (n - 1,) if n else (), 0.05 if n else 0.0) for n in range(4)]
    columns = send(quick, Workload("w", 64, rows)).columns
    thought = columns["intended_s"][1:] - columns["done_s"][:-1]
    assert thought == pytest.approx([0.05] * 3, abs=1e-6)
    assert (columns["sent_s"] >= columns["intended_s"]).all()


def test_several_processes_share_one_schedule(quick):
    requests = workload(60)
    sent = send(quick, requests, clients=3)
    assert sent.columns["request"].tolist() == list(range(60))
    assert sent.columns["intended_s"] == pytest.approx([request.arrival_s for request in requests])
    assert sent.facts["tokens"] == 360


def test_what_belongs_together_goes_to_one_process():
    rows = [Request(0.0, 1, 1, (n,), "a" if n in (0, 3) else "", (1,) if n == 4 else ()) for n in range(6)]
    parts = shares(Workload("w", 64, rows), 3)
    assert sorted(number for part in parts for number in part) == list(range(6))
    assert any({0, 3} <= set(part) for part in parts)
    assert any({1, 4} <= set(part) for part in parts)


def test_the_warm_up_is_measured_but_does_not_count(quick):
    sent = send(quick, workload(40, gap=0.01), LoadConfig(warmup_s=0.2))
    assert sent.columns["is_measured"].sum() == 20
    counted = sent.columns["is_measured"]
    assert metrics.TokenGaps(sent.gaps).count == (6 - sent.columns["first_chunk_tokens"][counted]).sum()
    run = ArmResult("a", sent.columns, sent.gaps, 0.0, 1)
    assert len(run.measured.columns["request"]) == 20


@contextlib.contextmanager
def strange_server(answer, seen=None):
    """Serve one behaviour: `answer(reader, writer)` after the request was read; `seen` gets what was asked."""
    started, stopping = threading.Event(), None
    port = 0

    async def serve():
        nonlocal port, stopping
        stopping = asyncio.Event()

        async def on_client(reader, writer):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                body = await reader.readexactly(length)
                if seen is not None:
                    seen.append(json.loads(body))
                await answer(reader, writer)
            writer.close()

        server = await asyncio.start_server(on_client, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        loops.append(asyncio.get_running_loop())
        started.set()
        await stopping.wait()
        server.close()

    loops = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loops[0].call_soon_threadsafe(stopping.set)
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text):
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = 'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'


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


async def answers(reader, writer):
    end = 'data: {"choices":[],"usage":{"prompt_tokens":16,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    writer.write(HEAD + chunk(EVENT) + chunk(end) + b"0\r\n\r\n")
    await writer.drain()


def test_warm_ups_are_as_long_as_the_workloads_requests_and_left_out():
    requests = [Request(0.0, length, 20, (length,)) for length in (40, 10, 30, 20)]
    seen, before = [], []
    with strange_server(answers, seen) as url:
        run = run_live(
            Workload("w", 64, requests),
            live=LiveConfig(url=url, warmup_requests=4),
            mode="endpoint",
            engine=EngineConfig(),
            router=RouterConfig(),
            num_workers=1,
            seed=0,
            on_start=lambda now: before.append(len(seen)),
        )
    assert before == [4]
    assert sorted(len(body["prompt"]) for body in seen[:4]) == [10, 20, 30, 40]
    assert {body["max_tokens"] for body in seen[:4]} == {8}
    assert len({tuple(body["prompt"][:10]) for body in seen}) == 8
    assert len(run.columns["request"]) == 4


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (hangs_up, "the server closed the connection"),
        (refuses, 'HTTP 429: {"error":{"message":"no"}}'),
        (stops_without_done, "the stream ended without [DONE]"),
        (fails_in_the_stream, "error in the stream: {'message': 'boom'}"),
        (speaks_nonsense, "the answer is not HTTP"),
        (never_answers, "timeout"),
        (says_nothing, "the answer has no tokens"),
    ],
)
def test_a_failed_request_says_why_and_the_next_is_sent(answer, error):
    with strange_server(answer) as url:
        sent = send(url, workload(3), timeout_s=1.0)
    assert all(found.startswith(error) for found in sent.columns["error"]), sent.columns["error"]
    assert len(sent.columns["error"]) == 3
    assert spoilt(sent, LoadConfig(), is_complete=True)[0].startswith("every request failed")


def test_an_answer_split_anywhere_is_the_same():
    text = (
        EVENT * 3
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
            columns = send(url, workload(1)).columns
        assert (columns["error"][0], columns["osl"][0], columns["cached_tokens"][0]) == ("", 3, 1), cut


def test_what_waits_for_a_failed_request_is_not_sent():
    rows = [Request(0.0, 4, 2, (0,)), Request(0.0, 4, 2, (1,), "", (0,)), Request(0.0, 4, 2, (2,), "", (1,))]
    with strange_server(refuses) as url:
        columns = send(url, Workload("w", 64, rows)).columns
    assert [error.split(":")[0] for error in columns["error"]] == ["HTTP 429", "not sent", "not sent"]


def sent_with(lag, busy=0.1):
    count = len(lag)
    intended = np.arange(count) * 0.1
    columns = {"intended_s": intended, "sent_s": intended + lag, "error": np.full(count, "", dtype=object)}
    return Sent(columns, np.empty((0, 5)), {"cpu_share": busy})


def test_a_client_that_spoiled_the_run_is_told():
    assert spoilt(sent_with(np.zeros(100)), LoadConfig(), is_complete=True) == []
    assert "the client was late" in spoilt(sent_with(np.full(100, 0.3)), LoadConfig(), is_complete=True)[0]
    assert spoilt(sent_with(np.full(100, 0.3)), LoadConfig(max_concurrency=1), is_complete=True) == []
    assert "used 97% of a core" in spoilt(sent_with(np.zeros(100), busy=0.97), LoadConfig(), is_complete=True)[0]
    slow = spoilt(sent_with(np.linspace(0, 2.0, 100)), LoadConfig(), is_complete=True)
    assert any("of the intended rate" in note for note in slow)
