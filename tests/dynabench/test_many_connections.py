"""A client with more connections than a process may open by default, and what it brings home."""

import asyncio
import multiprocessing
import os
import resource

import pytest
import uvloop

from dynabench.live import clients
from dynabench.live.bodies import MeasuredServer
from dynabench.live.call import ClientCall
from dynabench.live.http_client import NO_CONNECTION
from dynabench.live.selftest import known_server
from dynabench.live.settings import SelftestConfig
from dynabench.live.validity import is_client_limited, spoilt
from foundation.errors import UserError
from foundation.open_files import room_for
from tests.dynabench.test_load import send, workload
from tests.support.waiting import PATIENCE_S
from workloads.pacing import LoadConfig


@pytest.fixture
def few_files():
    """Let this process open few files, as most systems do by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_to_what_is_needed_and_no_further(few_files):
    assert room_for(200) == 200
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
    assert room_for(700) == 700
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, few_files)


def test_more_streams_than_files_by_default(few_files):
    with known_server(SelftestConfig(ttft_ms=100, itl_ms=1)) as url:
        sent = send(url, workload(600, gap=0.0, tokens=2), LoadConfig(concurrency=600))
    assert set(sent.requests.error) == {""}
    columns = sent.requests
    assert ((columns.sent_s.min() <= columns.sent_s) & (columns.done_s > columns.sent_s.max())).sum() > 300


@pytest.mark.parametrize(
    ("load", "num_clients", "problem"),
    [
        (
            LoadConfig(concurrency=10_000),
            1,
            r"--concurrency 10000 needs 10,128 open files in each of 1 client processes, but the hard limit is 4,096; raise it "
            r"\(ulimit -Hn 10128; of a container, --ulimit nofile=10128\), or use --clients 3",
        ),
        (LoadConfig(max_concurrency=10_000), 2, "--max-concurrency 10000 needs 5,128 open files .* or use --clients 3"),
        (LoadConfig(concurrency=10_000), 3, None),
        (LoadConfig(concurrency=3000), 1, None),
        (LoadConfig(), 1, None),
    ],
)
def test_a_load_with_too_many_connections_is_refused_with_the_way_out(monkeypatch, load, num_clients, problem):
    monkeypatch.setattr(clients, "room_for", lambda wanted: min(wanted, 4096))
    order = clients.Order(workload(20_000), MeasuredServer("http://x", "m"), load, "", 1.0)
    if problem is None:
        clients._make_room(order, num_clients)
        return
    with pytest.raises(UserError, match=problem):
        clients._make_room(order, num_clients)


@pytest.mark.parametrize("end", [lambda parent: parent.send("stop"), lambda parent: parent.close()])
def test_a_client_hears_its_parent_and_can_still_send_more_than_fits_a_pipe(end):
    ours, theirs = multiprocessing.Pipe()

    async def run():
        stop = asyncio.Event()
        waiting = asyncio.create_task(clients._wait_for_stop(theirs, stop))
        await asyncio.sleep(0)
        assert not stop.is_set()
        end(ours)
        await asyncio.wait_for(stop.wait(), PATIENCE_S)
        await waiting

    uvloop.run(run())
    assert os.get_blocking(theirs.fileno())


def test_an_open_loop_opens_no_more_connections_than_it_may_and_says_so(monkeypatch):
    monkeypatch.setattr(clients, "room_for", lambda wanted: clients.OTHER_FILES + 20)
    with known_server(SelftestConfig(ttft_ms=500, itl_ms=1)) as url:
        sent = send(url, workload(200, gap=0.0, tokens=2))
    errors = sent.requests.error.tolist()
    assert {error: errors.count(error) for error in errors} == {"": 20, NO_CONNECTION: 180}
    notes = spoilt(sent, LoadConfig(), is_complete=True)
    assert notes[0].startswith("the client may open no more connections, so 180 of 200 requests were not sent")
    assert is_client_limited(notes)


@pytest.mark.parametrize("at", ["dialled", "answered"])
def test_an_error_in_a_callback_ends_the_run(at, monkeypatch, capfd):
    def fails(call, *told):
        raise UserError("no room")

    monkeypatch.setattr(ClientCall, "on_failure" if at == "dialled" else "on_data", fails)
    with known_server(SelftestConfig(ttft_ms=1, itl_ms=1)) as url, pytest.raises(UserError, match="no room"):
        send("http://127.0.0.1:9" if at == "dialled" else url, workload(5))
    assert capfd.readouterr().err == ""
