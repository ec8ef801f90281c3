"""Whatever a client sends on a connection, or does not send: it is answered or hung up on, and little of it is kept."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest
import uvicorn
import uvloop
from starlette.requests import Request

from serving.frontend.api.errors import ApiError
from serving.frontend.config import FrontendConfig
from serving.frontend.http import body as bodies
from serving.frontend.http.body import FREE_BYTES, BodyBudget
from serving.frontend.http.connection import PIECE_BYTES, ClientConnection, sweep_connections
from serving.frontend.http.limits import Limits
from tests.support.stacks import running
from tests.support.waiting import PATIENCE_S, until

BIG = 64 << 20
GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST % 0 + b"transfer-encoding: chunked\r\n\r\n"
SHORTEST = len("GET / HTTP/1.1\r\n\r\n")


class Server:
    """uvicorn with our connections, in a thread; its application answers once `gate` is open."""

    def __init__(self, limits):
        self.gate = threading.Event()
        self.gate.set()
        self.limits = limits
        self.calls = []
        self.answer = b"yes"
        self.connections = []
        self.errors = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))

    async def application(self, scope, receive, send):
        """Read the body (but not of /unread), then answer; /endless with many pieces until the client is gone."""
        path, size, type = scope["path"], 0, "http.request"
        self.calls.append(path)
        self.headers = scope["headers"]
        while path != "/unread" and type == "http.request":
            message = await receive()
            type = message["type"]
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        if type == "http.disconnect":
            return
        if path != "/stream":
            await self._open()
        answer = self.answer + b" %d" % size
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", path.encode())]})
        if path == "/stream":
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
            await self._open()
        if path == "/endless":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"more ", "more_body": True})
                await asyncio.sleep(0.002)
            return
        await send({"type": "http.response.body", "body": answer})

    async def _open(self):
        while not self.gate.is_set():
            await asyncio.sleep(0.002)

    def _connect(self, **settings):
        connection = ClientConnection(**settings, limits=self.limits)
        self.connections.append(connection)
        return connection

    async def _run(self):
        options = {
            "interface": "asgi3",
            "ws": "none",
            "lifespan": "off",
            "log_config": None,
            "timeout_graceful_shutdown": 1,
        }
        config = uvicorn.Config(self.application, http=self._connect, **options)
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext
        self.state = self.server.server_state
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.errors.append(context))
        sweeping = asyncio.ensure_future(
            sweep_connections(self.state.connections, replace(self.limits, linger_s=0.1))
        )  # often
        await self.server.serve(sockets=[self._listener])
        sweeping.cancel()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.gate.set()
        self.server.should_exit = True
        self._thread.join()
        assert not self.errors

    def open(self, data=b""):
        client = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        client.sendall(data)
        return client

    def ask(self, data):
        """Send some bytes; return all that comes back until we are hung up on."""
        with self.open() as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
            return everything(client)

    def limit(self, **limits):
        """Change the limits of the connections that there are."""
        for connection in self.connections:
            connection._limits = replace(self.limits, **limits)

    def is_empty(self):
        return not self.state.connections and not self.state.tasks


@pytest.fixture
def start():
    """What starts servers with some limits."""
    with contextlib.ExitStack() as stack:
        yield lambda **limits: stack.enter_context(Server(Limits(**limits)))


def everything(client):
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := client.recv(1 << 16):
            data += more
    return data


def until_read(client, end):
    """Read until some bytes have come; return all that was read."""
    data = b""
    while end not in data:
        data += (more := client.recv(1 << 16))
        assert more, data[-300:]
    return data


def flood(client, block, most=BIG):
    """Send a block over and over; return how much was taken before we were hung up on."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            client.sendall(block)
            sent += len(block)
    return sent


def check_refusal(data, status):
    """It is one answer, with OpenAI's error object, and the last one."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), data[:300]
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


# Bytes


@pytest.mark.parametrize(
    ("start_of_head", "block", "status"),
    [
        (b"GET /?", b"y" * 65536, 414),
        (b"GET / HTTP/1.1\r\nx-a: ", b"y" * 65536, 431),
        (b"GET / HTTP/1.1\r\n", b"x-a: y\r\n" * 8192, 431),
        (b"GET / HTTP/1.1\r\n" + b"a", b"b" * 65536, 431),
        (b"", b"\r\n" * 32768, 431),
    ],
    ids=["url", "value", "headers", "name", "blank lines"],
)
def test_a_head_without_end_is_refused_and_not_parsed(start, start_of_head, block, status):
    server = start(linger_bytes=1 << 20)
    client = server.open(start_of_head)
    assert flood(client, block) < BIG
    data = everything(client)
    if data:  # the reset may have overtaken it
        check_refusal(data, status)
    assert server.connections[0]._num_fed < 32 * 1024
    assert server.calls == []
    until(server.is_empty)


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /?%s HTTP/1.1\r\n\r\n" % (b"y" * 8192), 414),
        (b"GET / HTTP/1.1\r\nx-a: %s\r\n\r\n" % (b"y" * 16384), 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 101 + b"\r\n", 431),
    ],
    ids=["url", "bytes", "number"],
)
def test_heads_over_a_limit_are_refused_however_they_are_cut(start, head, status, size):
    server = start()
    with server.open() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for place in range(0, len(head), size):
                client.sendall(head[place : place + size])
        check_refusal(everything(client), status)
    assert server.calls == []


def test_heads_just_within_the_limits_are_served(start):
    server = start()
    url = b"/?" + b"y" * 8190
    headers = b"".join(b"x-%02d: %s\r\n" % (number, b"y" * 158) for number in range(99)) + b"connection: close\r\n"
    data = server.ask(b"GET %s HTTP/1.1\r\n%s\r\n" % (url, headers))
    assert data.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "block",
    [b"1;" + b"e" * 60_000 + b"\r\nx\r\n", b"1\r\nx\r\n" * 10_000, b"0\r\nx-t: " + b"y" * 60_000],
    ids=["chunk extensions", "one-byte chunks", "trailers"],
)
def test_what_is_neither_body_nor_head_is_bounded(start, block):
    server = start(linger_bytes=1 << 20)
    client = server.open(CHUNKED)
    assert flood(client, block) < BIG
    data = everything(client)
    if data:
        check_refusal(data, 400)
    until(server.is_empty)


def test_bodies_in_small_chunks_and_with_trailers_are_served(start):
    server = start()
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [b"abcde"] * 40_000 + [b"x"] * 10_000)
    data = server.ask(CHUNKED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + body + b"0\r\nx-t: y\r\n\r\n")
    assert data.endswith(b"yes 210000\r\n0\r\n\r\n")


def test_trailers_do_not_become_headers(start):
    server = start()
    with server.open(CHUNKED + b"1\r\nx\r\n0\r\nauthorization: Bearer secret\r\n\r\n") as client:
        until_read(client, b"yes 1")
    assert [name for name, _ in server.headers] == [b"host", b"transfer-encoding"]


def test_a_request_answered_before_its_end_is_thrown_away_and_the_next_one_served(start):
    server = start()
    one = b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (4 << 20) + b"x" * (4 << 20)
    data = server.ask(one + b"GET /next HTTP/1.1\r\nconnection: close\r\n\r\n")
    assert data.count(b"HTTP/1.1 200") == 2
    assert server.calls == ["/unread", "/next"]


def test_a_request_answered_before_its_end_is_not_read_forever(start):
    server = start(linger_bytes=1 << 20)
    client = server.open(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (1 << 40))
    assert flood(client, b"x" * 65536) < BIG
    until(server.is_empty)


def test_an_unwanted_body_that_was_announced_closes_the_connection(start):
    server = start()
    data = server.ask(b"POST /unread HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n")
    assert data.startswith(b"HTTP/1.1 200")  # and no 100


# The queue


@pytest.mark.parametrize("one", [GET, POST + b"content-length: 3\r\n\r\nabc"], ids=["get", "post"])
@pytest.mark.parametrize("size", [5, 1500, 1 << 20])
def test_pipelined_requests_are_all_answered_in_order(start, one, size):
    server = start()
    data, got = b"".join(one % number for number in range(400)), b""
    with server.open() as client:
        for place in range(0, len(data), size):
            client.sendall(data[place : place + size])
        while got.count(b"x-path") < 400:
            got += (more := client.recv(1 << 16))
            assert more, got[-300:]
    places = [got.index(b"x-path: /%d\r\n" % number) for number in range(400)]
    assert places == sorted(places)
    until(server.is_empty)


def test_few_requests_are_queued_however_many_are_sent(start):
    server = start(max_pipelined=4)
    server.gate.clear()
    client = server.open()
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(b"GET / HTTP/1.1\r\n\r\n" * 4000)
    until(lambda: server.connections and (flow := server.connections[0].flow) and flow.is_held)
    connection = server.connections[0]
    for _ in range(20):
        assert len(connection.pipeline) <= 4 + PIECE_BYTES // SHORTEST + 1
        assert len(connection._unparsed) <= 1 << 20
        time.sleep(0.005)
    assert server.calls == ["/"]
    client.close()
    server.gate.set()
    until(server.is_empty)


def test_a_client_that_pipelines_and_never_reads_is_hung_up_on(start):
    server = start(max_pipelined=4, unread_timeout_s=0.2)
    server.answer = b"x" * 100_000
    client = server.open()
    assert flood(client, GET % 1 * 1000, most=1 << 30) < 1 << 30
    until(server.is_empty)
    assert len(server.calls) < 1000


def test_a_client_that_leaves_its_last_answer_unread_is_hung_up_on(start):
    server = start(unread_timeout_s=0.2)
    server.answer = b"x" * (16 << 20)
    client = server.open(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    until(lambda: server.calls)
    until(server.is_empty)
    client.close()


def test_a_client_that_hangs_up_ends_the_request_in_progress_and_those_behind_it(start):
    server = start()
    with server.open(b"GET /endless HTTP/1.1\r\n\r\n" + GET % 1 * 3) as client:
        until_read(client, b"more")
    until(server.is_empty)
    assert not server.connections[0].pipeline
    assert server.calls == ["/endless"]


# Seconds


def test_a_head_that_comes_slowly_is_408(start):
    server = start()
    with server.open(b"GET / HTTP/1.1\r\nhost: x\r\nx-") as client:
        until(lambda: server.connections and server.connections[0]._num_fed)
        server.limit(head_timeout_s=0.3)
        client.settimeout(0.02)
        data = b""
        for _ in range(1000):
            with contextlib.suppress(TimeoutError):
                data = client.recv(1000)
                break
            with contextlib.suppress(ConnectionError):
                client.sendall(b"a")
        client.settimeout(PATIENCE_S)
        check_refusal(data + everything(client), 408)
    until(server.is_empty)


def test_the_second_head_of_a_connection_is_held_to_its_time(start):
    server = start()
    with server.open(GET % 1 + b"GET / HTTP/1.1\r\n") as client:
        until(lambda: server.calls)
        server.limit(head_timeout_s=0.3)
        data = everything(client)
    assert data.startswith(b"HTTP/1.1 200")
    check_refusal(data[data.index(b"HTTP/1.1 408") :], 408)


@pytest.mark.parametrize("data", [b"", b"\r\n"])
def test_a_silent_connection_is_closed(start, data):
    server = start(head_timeout_s=0.3)
    assert server.ask(data) == b""
    until(server.is_empty)


def test_an_idle_connection_is_closed_later_than_a_silent_one(start):
    server = start()
    with server.open(GET % 1) as client:
        until_read(client, b"yes 0\r\n0\r\n")
        server.limit(head_timeout_s=0.05)
        time.sleep(0.3)
        server.limit()
        client.sendall(GET % 2)
        until_read(client, b"yes 0\r\n0\r\n")
        server.limit(idle_timeout_s=0.05)
        assert everything(client) == b""


def test_a_request_in_progress_is_not_hung_up_on(start):
    server = start()
    server.gate.clear()
    with server.open(GET % 1 + b"GET /2") as client:
        until(lambda: server.calls)
        server.limit(head_timeout_s=0.05, idle_timeout_s=0.05, unread_timeout_s=0.05, linger_s=0.05)
        time.sleep(0.4)
        server.gate.set()
        data = everything(client)
    assert data.startswith(b"HTTP/1.1 200")


def test_an_answered_request_whose_body_does_not_come_is_closed(start):
    server = start(linger_s=0.2)
    data = server.ask(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nabc")
    assert data.startswith(b"HTTP/1.1 200")
    until(server.is_empty)


def test_a_refused_client_that_stays_is_hung_up_on(start):
    server = start(linger_s=0.2)
    with server.open(b"garbage\r\n\r\n") as client:
        check_refusal(everything(client), 400)
        until(server.is_empty)


# What is not HTTP


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100, 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (POST % 1 + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", 400),
        (POST % 1 + b"content-length: -5\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (CHUNKED + b"5\r\nhello\r\nzz\r\n", 400),
    ],
    ids=["garbage", "tls", "0.9", "2.0", "h2", "connect", "path", "lengths", "negative", "chunk size", "second chunk"],
)
def test_what_is_not_http_is_refused_with_openais_error(start, data, status):
    server = start()
    check_refusal(server.ask(data), status)
    until(server.is_empty)


@pytest.mark.parametrize(
    ("path", "rest", "status", "type"),
    [
        (b"/v1/messages", b" HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400, "invalid_request_error"),
        (b"/v1/messages/count_tokens?x=1", b" HTTP/2.0\r\n\r\n", 400, "invalid_request_error"),
        (b"/v1/messages/?", b"x" * (1 << 17), 414, "invalid_request_error"),
        (b"/v1/messages", b" HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_request_error"),
        (b"/v1/messages", b" HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 501, "api_error"),
    ],
    ids=["length", "version", "address", "chunk size", "coding"],
)
def test_a_refusal_has_the_form_of_the_api_that_was_asked(start, path, rest, status, type):
    data = start().ask(b"POST " + path + rest)
    assert data.startswith(b"HTTP/1.1 %d " % status), data[:300]
    error = json.loads(data.partition(b"\r\n\r\n")[2])
    assert (error["type"], error["error"]["type"]) == ("error", type)


def test_what_is_not_http_after_a_request_of_anthropics_is_of_no_api(start):
    data = start().ask(b"GET /v1/messages HTTP/1.1\r\n\r\n" + b"garbage\r\n\r\n")
    check_refusal(data[data.index(b"HTTP/1.1 400") :], 400)


def test_a_refusal_waits_for_the_answers_before_it(start):
    server = start()
    server.gate.clear()
    with server.open(b"GET /stream HTTP/1.1\r\n\r\n" + GET % 1 + CHUNKED + b"zz\r\n") as client:
        until(lambda: server.connections and server.connections[0]._refusal)
        server.gate.set()
        data = everything(client)
    first, second, last = data.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200")
    assert first.endswith(b"0\r\n\r\n")
    assert second.startswith(b"200")
    check_refusal(b"HTTP/1.1 " + last, 400)
    assert server.calls == ["/stream", "/1"]


def test_nothing_after_the_last_request_of_a_connection_is_served(start):
    server = start()
    data = server.ask(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n" + GET % 2 * 100)
    assert data.count(b"HTTP/1.1") == 1
    assert server.calls == ["/"]


def test_clients_that_come_and_go_leave_nothing_behind(start):
    server = start()
    for _ in range(50):
        server.open(b"GET /").close()
        server.open(GET % 1 * 40).close()
        server.open(CHUNKED + b"5\r\nhel").close()
        server.open(b"garbage").close()
    until(server.is_empty)
    for connection in server.connections:
        assert connection._unparsed is None
        assert not connection.pipeline
        assert connection.timeout_keep_alive_task is None


# Bodies


def test_a_budget_refuses_what_it_has_no_room_for_and_takes_back_what_was_used():
    budget = BodyBudget(1000)
    with budget.share() as share:
        share.grow(FREE_BYTES)
        assert budget.num_held == 0
        share.grow(FREE_BYTES + 400)
        share.grow(FREE_BYTES + 900)
        assert budget.num_held == 900
        with budget.share() as other:
            other.grow(FREE_BYTES)
            with pytest.raises(ApiError) as refusal:
                other.grow(FREE_BYTES + 101)
            assert refusal.value.status == 503
            with pytest.raises(ApiError):
                other.expect(FREE_BYTES + 101)
            other.grow(FREE_BYTES + 100)
        assert budget.num_held == 900
    assert budget.num_held == 0


def test_a_budget_holds_at_least_one_body():
    with pytest.raises(ValueError, match="max_buffered_mb"):
        FrontendConfig(max_body_mb=45, max_buffered_mb=44)


@pytest.fixture(scope="module")
def tight():
    """A stack that holds 2 MiB of bodies."""
    with running(1, frontend={"max_body_mb": 2, "max_buffered_mb": 2}) as stack:
        yield stack


def half_a_body(stack, size=1 << 20):
    client = socket.create_connection(("127.0.0.1", int(stack.url.rpartition(":")[2])), PATIENCE_S)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (size + 1) + b" " * size)
    return client


def test_bodies_beyond_the_budget_are_503_while_small_requests_are_served(tight):
    url, small = f"{tight.url}/v1/completions", {"model": "mock", "prompt": "x", "max_tokens": 1}
    large = json.dumps(small).encode() + b" " * (1 << 20)
    clients = [half_a_body(tight, (1 << 20) + FREE_BYTES - 1000) for _ in range(2)]
    until(lambda: httpx.post(url, content=large).status_code == 503)
    refused = httpx.post(url, content=large)
    assert refused.headers["retry-after"]
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.post(url, json=small).status_code == 200
    for client in clients:
        client.close()
    until(lambda: httpx.post(url, content=large).status_code == 200)


def test_a_body_that_is_refused_gives_its_share_back(tight):
    url, large = f"{tight.url}/v1/completions", b"{" + b" " * (2 << 20)
    for _ in range(5):
        assert httpx.post(url, content=large).status_code == 413
        assert httpx.post(url, content=large[:-1]).status_code == 400
        half_a_body(tight).close()
        with half_a_body(tight) as client:
            client.shutdown(socket.SHUT_WR)
    good = json.dumps({"model": "mock", "prompt": "x", "max_tokens": 1}).encode() + b" " * (2_000_000)
    until(lambda: httpx.post(url, content=good).status_code == 200)


def test_a_length_over_the_limit_is_413_before_anything_is_read(tight):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(tight.url.rpartition(":")[2])), PATIENCE_S) as client:
        client.sendall(head % ((2 << 20) + 1))
        check_refusal(everything(client), 413)


def test_a_body_that_comes_slowly_is_408_and_gives_its_share_back(monkeypatch):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.05)
    budget = BodyBudget(1 << 20)
    pieces = iter([b"x" * FREE_BYTES, b"x" * 1000])

    async def receive():
        if (piece := next(pieces, None)) is None:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def ask():
        with budget.share() as share:
            await bodies.read_body(Request({"type": "http", "headers": []}, receive), share, 1 << 20)

    with pytest.raises(ApiError) as refusal:
        asyncio.run(ask())
    assert refusal.value.status == 408
    assert budget.num_held == 0


@pytest.mark.parametrize("path", ["/health", "/live", "/v1/models"])
def test_every_route_is_within_the_limits(stack, path):
    for extra, status in (
        (b"?" + b"x" * 9_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b" HTTP/1.1\r\nx-a: " + b"y" * 17_000 + b"\r\n\r\n", 431),
    ):
        with socket.create_connection(("127.0.0.1", int(stack.url.rpartition(":")[2])), PATIENCE_S) as client:
            client.sendall(b"GET " + path.encode() + extra)
            check_refusal(everything(client), status)


# What else may be asked for


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("size", [1, 9, 1 << 20])
@pytest.mark.parametrize(
    "body",
    [b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"],
    ids=["length", "chunks"],
)
def test_the_offer_of_another_protocol_is_ignored_and_the_body_read(start, body, size):
    server = start()
    data = b"".join(POST % number + OFFER + body for number in range(3)) + GET % 3
    with server.open() as client:
        for place in range(0, len(data), size):
            client.sendall(data[place : place + size])
        got = until_read(client, b"x-path: /3\r\n")
    assert got.count(b"yes 3") == 3
    assert server.calls == ["/0", "/1", "/2", "/3"]


def test_the_limits_hold_for_a_head_with_an_offer(start):
    server = start()
    check_refusal(server.ask(POST % 0 + OFFER + b"x-a: %s\r\n\r\n" % (b"y" * 16384)), 431)
    assert server.calls == []


@pytest.mark.parametrize(
    ("refused", "status"),
    [
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        (POST % 1 + b"transfer-encoding: gzip, chunked\r\n\r\n", 501),
        (POST % 1 + b"x-a: b\r\n" * 120 + b"\r\n", 431),
    ],
    ids=["connect", "coding", "headers"],
)
def test_what_is_refused_after_an_offer_is_refused_as_without_one(start, refused, status):
    server = start()
    with server.open() as client:
        client.sendall(POST % 0 + OFFER + b"content-length: 3\r\n\r\nabc" + refused)
        got = until_read(client, b"connection: close")
    assert got.count(b"HTTP/1.1 200") == 1
    assert b"HTTP/1.1 %d" % status in got


def test_a_client_of_http_1_0_gets_a_body_without_chunks(start):
    server = start()
    data = server.ask(b"GET /stream HTTP/1.0\r\n\r\n")
    assert b"transfer-encoding" not in data
    assert data.endswith(b"\r\n\r\nfirst yes 0")


@pytest.mark.parametrize("coding", [b"gzip", b"gzip, chunked", b"identity"])
def test_another_transfer_encoding_is_501(start, coding):
    server = start()
    assert "only chunked" in check_refusal(server.ask(POST % 0 + b"transfer-encoding: %s\r\n\r\n" % coding), 501)
    assert server.calls == []
