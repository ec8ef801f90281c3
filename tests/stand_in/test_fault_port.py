"""The admin port, and what only a whole process can do."""

import asyncio
import signal
import subprocess
import sys

import httpx
import pytest

from serving.frontend.http.limits import Limits
from serving.stand_in.faults.admin import admin_port
from serving.stand_in.faults.config import AdminConfig
from serving.stand_in.faults.state import Faults
from serving.stand_in.faults.words import read_faults
from tests.stand_in.test_fault_state import Server
from tests.support.waiting import until

STAND_IN = """
import asyncio, sys
from serving.engines.mock.engine import EngineConfig
from serving.stand_in.config import HttpConfig, StandInConfig
from serving.stand_in.faults.config import AdminConfig
from serving.stand_in.faults.words import read_faults
from serving.stand_in.server import serve_stand_in
from serving.supervision.process import run_process

port, admin, *words = sys.argv[1:]
config = StandInConfig(
    model="tiny",
    engine=EngineConfig(block_size=16, num_gpu_blocks=256),
    http=HttpConfig(host="127.0.0.1", port=int(port)),
    faults=read_faults(words),
    admin=AdminConfig(port=int(admin)),
)
run_process(lambda stopping: serve_stand_in(config, stopping))
"""
ASKED = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def with_port(do, *words, token="", publishes_events=True):
    """Do something with a client of an admin port; return the server, and whether it was asked to stop."""

    async def main():
        faults, server = Faults(read_faults(words), publishes_events=publishes_events), Server()
        faults.connect(server)
        try:
            async with (
                admin_port(AdminConfig(token=token), faults) as url,
                httpx.AsyncClient(base_url=url, timeout=30) as client,
            ):
                await do(client)
        finally:
            faults.close()
        return server, faults.ending.is_set()

    return asyncio.run(main())


def test_faults_are_shown_replaced_changed_and_removed():
    async def do(client):
        shown = (await client.get("/faults")).json()
        assert shown["faults"] == {"429": 0.05, "slow": 2.0}
        assert (shown["seed"], shown["requests"], shown["counts"], shown["is_ready"]) == (0, 0, {"slow": 1}, True)
        assert (await client.patch("/faults", json={"cut": 0.5, "429": None})).json()["faults"] == {
            "cut": 0.5,
            "slow": 2,
        }
        assert (await client.put("/faults", json={"stall": "0.1:1s"})).json()["faults"] == {"stall": "0.1:1s"}
        assert (await client.delete("/faults")).json()["faults"] == {}

    server, _ = with_port(do, "429=0.05", "slow=2")
    assert server.factors == [2.0, 1.0]


@pytest.mark.parametrize(("publishes_events", "unused"), [(False, ["kv_events_drop"]), (True, None)])
def test_faults_of_kv_events_that_nobody_publishes_are_said_to_have_no_effect(publishes_events, unused):
    async def do(client):
        answer = await client.put("/faults", json={"kv_events_drop": 0.5, "cut": 0.1})
        assert answer.json().get("without_effect") == unused

    with_port(do, publishes_events=publishes_events)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("PUT", "/faults", b'{"429": 3}', 400, "429=3: expected a share from 0 to 1, such as 0.05"),
        ("PATCH", "/faults", b'{"nonsense": 3}', 400, "nonsense=3: expected one of 400 to 599"),
        ("PATCH", "/faults", b'{"cut": true}', 400, "cut=True: expected text or a number"),
        ("PATCH", "/faults", b'{"cut": 0.9, "429": 0.9}', 400, "add up to 1.9"),
        ("PATCH", "/faults", b'{"startup": "1s"}', 400, "only a flag can keep the port closed"),
        ("PUT", "/faults", b"[]", 400, "expected a JSON object"),
        ("PUT", "/faults", b"{", 400, "expected a JSON object"),
        ("PUT", "/faults", b'{"429": ' * 100_000, 413, "longer than 65536 bytes"),
        ("PUT", "/faults", b'{"429": ' + b"[" * 5000, 400, "expected a JSON object"),
        ("PUT", "/faults", b'{"429": ' + b"9" * 5000 + b"}", 400, "expected"),
        ("PUT", "/faults", b'{"\xff": 1}', 400, "expected a JSON object"),
        ("PUT", "/faults", b" " * 100_000, 413, "longer than 65536 bytes"),
        ("POST", "/faults", b"{}", 405, "/faults does not accept POST; expected GET, PUT, PATCH, DELETE"),
        ("POST", "/crash", b'{"how": "gently"}', 400, "with one of exit, kill, engine_death"),
        ("POST", "/crash", b'{"how": "exit", "when": 3}', 400, "with one of exit, kill, engine_death"),
        ("GET", "/nothing", b"", 404, "there is no /nothing"),
    ],
)
def test_what_it_cannot_do_is_refused_as_json_and_changes_nothing(method, path, body, status, message):
    async def do(client):
        answer = await client.request(method, path, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, status)
        assert message in error["message"]
        assert (await client.get("/faults")).json()["faults"] == {"500": 0.1}

    assert with_port(do, "500=0.1")[0].ends == []


def test_a_crash_comes_after_its_answer():
    async def do(client):
        for how in ("engine_death", "exit", "kill"):
            answer = await client.post("/crash", json={"how": how})
            assert (answer.status_code, answer.json()) == (202, {"how": how})
        assert (await client.get("/faults")).json()["is_engine_dead"]

    assert with_port(do)[0].ends == ["engine_death", "exit", "kill"]


def test_the_server_is_made_ready_and_drained():
    async def do(client):
        assert not (await client.get("/faults")).json()["is_ready"]
        assert (await client.post("/ready")).json()["is_ready"]
        assert (await client.post("/drain")).status_code == 202

    assert with_port(do, "unready=1h")[1]


def test_with_a_token_only_who_has_it_may_ask():
    async def do(client):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            assert (await client.delete("/faults", headers=headers)).status_code == 401
        answer = await client.get("/faults", headers={"authorization": "Bearer secret"})
        assert answer.json()["faults"] == {"500": 0.1}

    with_port(do, "500=0.1", token="secret")


PAGE = {"origin": "http://evil.example"}
REBOUND = {"host": "evil.example:8322"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 202),
        ({"host": "localhost:8322"}, 202),
        ({"host": "LOCALHOST"}, 202),
        ({"host": "127.9.9.9:8322"}, 202),
        ({"host": "[::1]:8322"}, 202),
        ({"content-type": "application/x-www-form-urlencoded"}, 202),
        ({"host": "localhost:8322", "origin": "http://localhost:8322", "content-type": "application/json"}, 202),
        (PAGE, 403),
        (PAGE | {"content-type": "application/json"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "localhost:8322", "origin": "http://localhost:80"}, 403),
        (REBOUND, 403),
        (REBOUND | {"origin": "http://evil.example:8322"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost@evil.example"}, 403),
        ({"host": ""}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, 415),
    ],
)
def test_without_a_token_programs_of_this_machine_may_ask_and_web_pages_may_not(headers, status):
    async def do(client):
        answer = await client.post("/crash", content=b'{"how": "exit"}', headers=headers)
        assert answer.status_code == status
        drained = await client.post("/drain", headers=headers)
        assert drained.status_code == status

    server, is_ending = with_port(do)
    assert (server.ends == ["exit"], is_ending) == (status == 202, status == 202)


def test_with_a_token_a_page_that_has_it_may_ask_under_any_name():
    async def do(client):
        answer = await client.delete("/faults", headers={"authorization": "Bearer secret"} | PAGE | REBOUND)
        assert answer.status_code == 200

    with_port(do, token="secret")


def test_a_body_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr("serving.frontend.http.body.BODY_TIMEOUT_S", 0.05)

    async def do(client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"PUT /faults HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()

    with_port(do)


def test_a_connection_that_asks_nothing_is_closed():
    async def main():
        async with admin_port(AdminConfig(), Faults(read_faults([])), Limits(head_timeout_s=0.05)) as url:
            reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
            assert not await reader.read()
            writer.close()

    asyncio.run(main())


def test_who_meets_faults_is_chosen_by_number_again_once_faults_are_replaced_or_removed():
    async def do(client):
        for heal in (client.put("/faults", json={"cut": 0.5}), client.delete("/faults")):
            await client.patch("/faults", json={"by": "id"})
            assert "by" not in (await heal).json()["faults"]

    with_port(do, "by=id", "429=0.1")


def test_counts_are_there_for_prometheus():
    async def do(client):
        text = (await client.get("/metrics")).text
        assert 'dynabench_faults_total{kind="slow"} 1\n' in text
        assert "dynabench_fault_requests_total 0\n" in text

    with_port(do, "slow=2")


def free_ports():
    """Return two ports that were free a moment ago."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


@pytest.fixture
def start():
    """Yield a function that runs a stand-in in a process of its own; end them all."""
    started = []

    def run(*words):
        port, admin = free_ports()
        process = subprocess.Popen([sys.executable, "-c", STAND_IN, str(port), str(admin), *words])
        started.append(process)
        return process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"

    yield run
    for process in started:
        process.kill()
        process.wait()


def answers(url):
    try:
        return httpx.get(url, timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_server_whose_engine_died_ends_as_vllms_does(start):
    process, url, _ = start("engine_death=1")
    until(lambda: answers(f"{url}/health"), process)
    assert httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60).status_code == 200
    assert httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60).status_code == 500
    assert process.wait(60) == 0


def test_a_process_exits_after_its_last_answer(start):
    process, url, _ = start("exit=2")
    until(lambda: answers(f"{url}/health"), process)
    found = [httpx.post(f"{url}/v1/completions", json=ASKED, timeout=60).status_code for _ in range(2)]
    assert found == [200, 200]
    assert process.wait(60) == 1


def test_the_port_is_closed_until_startup_is_over_and_a_kill_is_one(start):
    process, url, admin = start("startup=1h")
    until(lambda: answers(f"{admin}/faults"), process)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    httpx.post(f"{admin}/ready")
    until(lambda: answers(f"{url}/health"), process)
    assert httpx.post(f"{admin}/crash", json={"how": "kill"}).status_code == 202
    assert process.wait(60) == -signal.SIGKILL


def test_a_drained_process_ends_well(start):
    process, _, admin = start("unready=1h")
    until(lambda: answers(f"{admin}/faults"), process)
    assert httpx.post(f"{admin}/drain").status_code == 202
    assert process.wait(60) == 0
