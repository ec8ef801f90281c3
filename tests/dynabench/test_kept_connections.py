"""Connections that a server keeps, and closes just when the next request arrives."""

import asyncio
import contextlib
import threading

import pytest

from dynabench.live.http_client import HttpPool
from reports.figures.insight import remarks
from tests.dynabench.test_load import send, workload
from tests.reports.runs import run
from tests.support.strange_server import DONE, EVENT, FINISH, chunk, usage
from tests.support.waiting import PATIENCE_S
from workloads.pacing import LoadConfig

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ANSWER = HEAD + chunk(EVENT + FINISH + usage(16, 1) + DONE) + b"0\r\n\r\n"


async def read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    await reader.readexactly(length)


@contextlib.asynccontextmanager
async def serving(answer):
    """Serve `answer(number of the request on its connection, writer)`; a connection lasts until that returns False."""

    async def on_client(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            number = 0
            while True:
                await read_request(reader)
                if not answer(number, writer):
                    break
                await writer.drain()
                number += 1
        writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


class Asked:
    """A request, and what came of it."""

    def __init__(self):
        self.is_over = asyncio.Event()
        self.sent, self.error, self.data = [], "", b""

    def on_status(self, status, headers, now):
        pass

    def on_data(self, data, now):
        self.data += data

    def on_end(self, now):
        self.is_over.set()

    def on_failure(self, reason, now):
        self.error = reason
        self.is_over.set()


def ask(answer, count):
    """Ask a server one request after the other; return them, and how many were sent again."""

    async def whole():
        async with serving(answer) as url:
            pool, asked = HttpPool(url), []
            for _ in range(count):
                asked.append(Asked())
                pool.send(pool.head("/", {}), b"{}", asked[-1], asked[-1].sent.append)
                await asyncio.wait_for(asked[-1].is_over.wait(), PATIENCE_S)
            await pool.close()
            return asked, pool.num_retried

    return asyncio.run(whole())


def answers_once(number, writer):
    if number == 0:
        writer.write(ANSWER)
    return number == 0


def breaks_off_later(number, writer):
    writer.write(ANSWER if number == 0 else ANSWER[:10])
    return number == 0


def never_answers(number, writer):
    return False


def test_a_request_on_a_kept_connection_that_is_closed_is_sent_once_more():
    asked, num_retried = ask(answers_once, 4)
    assert [one.error for one in asked] == [""] * 4
    assert [len(one.sent) for one in asked] == [1] * 4  # the time of the first sending stays
    assert num_retried == 3  # all but the first find a connection that was kept, and is closed


def test_an_answer_that_has_begun_is_not_asked_for_again():
    asked, num_retried = ask(breaks_off_later, 2)
    assert ([one.error for one in asked], num_retried) == (["", "the server closed the connection"], 0)


def test_a_new_connection_that_is_closed_fails_its_request():
    asked, num_retried = ask(never_answers, 2)
    assert ([one.error for one in asked], num_retried) == (["the server closed the connection"] * 2, 0)


@contextlib.contextmanager
def in_a_thread(answer):
    """Serve beside the test."""
    started, found = threading.Event(), {}

    async def serve():
        async with serving(answer) as url:
            found.update(url=url, loop=asyncio.get_running_loop(), stop=asyncio.Event())
            started.set()
            await found["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield found["url"]
    finally:
        found["loop"].call_soon_threadsafe(found["stop"].set)
        thread.join()


@pytest.mark.parametrize(("clients", "retried"), [(1, 7), (2, 6)])
def test_requests_that_were_sent_again_are_counted_apart(clients, retried):
    with in_a_thread(answers_once) as url:
        sent = send(url, workload(8), LoadConfig(concurrency=clients), clients=clients)
    assert set(sent.requests.error) == {""}
    assert sent.facts["retried"] == retried
    [note] = [note for note in remarks([run(facts=sent.facts)]) if "sent again" in note]
    assert note.startswith(f"{retried} requests were sent again on a new connection")
