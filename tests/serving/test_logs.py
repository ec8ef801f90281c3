"""What is logged: -v shows decisions, discovery and engine calls, -vv also each frame, and DYN_LOG picks."""

import contextlib
import logging
import os
import re
import signal
import sys

import httpx
import pytest

from foundation.log_levels import TRACE
from serving.supervision.logs import ALL, OWN, LogError, levels
from tests.support import warm
from tests.support.commands import DYNAMO_RUN
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until, wait_for

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (?P<level>[A-Z]+) +(?P<logger>[\w.]+): (?P<text>.*)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("info", dict.fromkeys(OWN, logging.INFO)),
        ("trace", dict.fromkeys(ALL, TRACE)),
        ("serving.routing", {"serving.routing": TRACE}),
        ("serving::routing", {"serving.routing": TRACE}),
        ("serving.routing.live", {"serving.routing.live": TRACE}),
        ("asyncio", {"asyncio": TRACE}),
        ("nobody.knows=Debug", {"nobody.knows": logging.DEBUG}),
        (
            "info, serving.routing , mocker = warn",
            {"serving": 20, "dynabench": 20, "mocker": 30, "serving.routing": TRACE},
        ),
        ("off,serving.worker=trace", dict.fromkeys(OWN, logging.CRITICAL + 1) | {"serving.worker": TRACE}),
    ],
)
def test_a_filter_says_which_logger_logs_what(text, expected):
    assert levels(text) == expected


@pytest.mark.parametrize(
    "wrong", ["inof", "serving.routng", "serving.routing.live.more", "a=b", "=", "serving=", ".", "a..b"]
)
def test_a_part_that_is_neither_a_level_nor_a_module_is_refused(wrong):
    with pytest.raises(LogError, match="is not a level; expected one of error, warn, info, debug, trace, off"):
        levels(f"info,{wrong}")


def test_a_level_that_is_misspelt_is_suggested():
    with pytest.raises(LogError, match=r"'inf' is not a level; .*; did you mean info\?$"):
        levels("inf")
    with pytest.raises(LogError, match=r"a module such as serving.routing$"):
        levels("x.y")


def logged(folder, *words, until_it_logs=None, **environment):
    """Run a server, ask it once, stop it, and return what it logged as (level, logger, text)."""
    port = free_port()
    log = folder / "log"
    given = {"DYN_DISCOVERY_DIR": str(folder / "d"), "ETCD_ENDPOINTS": "", "NATS_SERVER": ""} | environment
    with log.open("w") as file:
        process = warm.start([*map(str, words), "--http-port", str(port)], stderr=file, env=os.environ | given)
    try:
        url = f"http://127.0.0.1:{port}"
        if until_it_logs is None:
            wait_for(url, 1, process)
            asked = {"model": "mock", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            assert httpx.post(f"{url}/v1/completions", json=asked).json()["usage"]["completion_tokens"] == 3
        else:
            until(lambda: re.search(until_it_logs, log.read_text(), re.DOTALL), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    found = [LINE.search(line) for line in log.read_text().splitlines()]
    return [match.group("level", "logger", "text") for match in found if match is not None]


def server(folder, *flags, **environment):
    return logged(folder, DYNAMO_RUN, "in=http", "out=mocker", "--router-mode", "kv", *flags, **environment)


def texts(lines, level, logger):
    return "\n".join(text for at, of, text in lines if (at, of) == (level, logger))


def test_without_v_nothing_below_info_is_logged(tmp_path):
    assert {level for level, _, _ in server(tmp_path, DYN_LOG="")} <= {"WARN", "ERROR"}
    assert {level for level, _, _ in server(tmp_path, DYN_LOG="info")} == {"INFO"}


def test_v_shows_decisions_discovery_and_engine_calls(tmp_path):
    lines = server(tmp_path, "-v", DYN_LOG="off")  # -v replaces it
    assert re.search(
        r"request 0, 5 tokens: to [0-9a-f]+/0, which has 0 of its blocks", texts(lines, "DEBUG", "serving.routing.live")
    )
    clients = texts(lines, "DEBUG", "serving.runtime.client")
    assert re.search(r"instance [0-9a-f]+ of dyn://dynamo.backend.generate has joined, at unix:", clients)
    network = texts(lines, "DEBUG", "serving.runtime.distributed")
    assert re.search(r"this is instance [0-9a-f]+; discovery: folder .*; requests and events: sockets", network)
    assert re.search(r"registers v1/mdc/dynamo/backend/generate/", network)
    engine = texts(lines, "DEBUG", "serving.worker.loop")
    assert "starts the engine: mocker.Engine(" in engine
    assert re.search(r"call \d+ asks the engine to serve [0-9a-f]+", engine)
    calls = texts(lines, "DEBUG", "serving.runtime.server")
    number = re.search(r"call (\d+) of dynamo.backend.generate, with a request of \d+ bytes", calls)[1]
    assert f"call {number} has ended" in calls
    assert "TRACE" not in {level for level, _, _ in lines}


def test_vv_shows_frames_too(tmp_path):
    lines = server(tmp_path, "-vv")
    sent = texts(lines, "TRACE", "serving.runtime.server")
    assert re.search(r"received \d+ bytes: Call 0", sent)
    assert re.search(r"sent a frame of \d+ bytes: \d+ items, 1 ends", sent)
    received = texts(lines, "TRACE", "serving.runtime.connection")
    assert re.search(r"sent \d+ bytes: Call", received)
    assert re.search(r"received a frame: \d+ items, 1 ends", received)
    assert "request 0, 5 tokens" in texts(lines, "DEBUG", "serving.routing.live")


def test_a_target_alone_shows_all_of_that_target_and_nothing_else(tmp_path):
    lines = server(tmp_path, DYN_LOG="off,serving.routing")
    assert "request 0, 5 tokens" in texts(lines, "DEBUG", "serving.routing.live")
    assert {logger.rpartition(".")[0] for _, logger, _ in lines} == {"serving.routing"}


def test_processes_that_a_process_starts_log_as_much(tmp_path):
    frontends = [sys.executable, "-m", "serving.frontend", "--http-workers", "2"]
    lines = logged(tmp_path, *frontends, "-v", until_it_logs="this is instance.*this is instance", DYN_LOG="info")
    assert texts(lines, "DEBUG", "serving.runtime.distributed").count("this is instance") == 2
