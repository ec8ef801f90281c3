"""Ctrl-C: the first says what it waits for, the second ends everything at once and leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from tests.support import warm
from tests.support.processes import below
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until

SLOW = '{"timing": "constant", "constant_decode_ms": 50}'


@pytest.fixture
def tmp_path():
    """A folder with a short name: below it are sockets, whose names the kernel limits."""
    with tempfile.TemporaryDirectory(prefix="d-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def running(tmp_path, *command, start=warm.start):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "slow.json").write_text(SLOW)
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d"), "TMPDIR": str(tmp_path / "tmp")}
    words = [sys.executable, "-m", *map(str, command)]
    process = start(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_model(url, process):
    def is_listed():
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/v1/models").json()["data"]

    until(is_listed, process)


def streaming(stack, url, process):
    """Return an answer that streams: of several frontend processes, one may not know the model yet."""
    body = {"model": "mock", "prompt": "x", "max_tokens": 5000, "stream": True}

    def answer():
        answer = stack.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=body))
        return answer if answer.status_code == httpx.codes.OK else None

    return until(answer, process)


def read_until(process, text):
    log = []
    while text not in (line := process.stdout.readline()):
        assert line, "".join(log)
        log.append(line)
    return line


def assert_nothing_is_left(tmp_path, pids):
    until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
    assert not list((tmp_path / "tmp").iterdir())
    assert not (tmp_path / "d").exists() or not list((tmp_path / "d").iterdir())


@pytest.mark.parametrize(
    "way",
    [("in=http", "out=mocker"), ("in=http", "out=dyn")],
    ids=["engine and frontend in one process", "frontend processes"],
)
def test_the_second_ctrl_c_ends_dynamo_run_at_once(tmp_path, way):
    port = free_port()
    flags = ["--http-workers", 2] if way[1] == "out=dyn" else ["--extra-engine-args", tmp_path / "slow.json"]
    worker = ("serving.cli.dynamo_run", "in=dyn://", "out=mocker", "--extra-engine-args", tmp_path / "slow.json")
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(running(tmp_path, "serving.cli.dynamo_run", *way, "--http-port", port, *flags))
        if way[1] == "out=dyn":
            environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d"), "TMPDIR": str(tmp_path / "tmp")}
            other = warm.start(
                [sys.executable, "-m", *map(str, worker)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(other.wait)
            stack.callback(other.terminate)
        url = f"http://127.0.0.1:{port}"
        wait_for_model(url, process)
        pids = below(process)
        pieces = streaming(stack, url, process).iter_lines()
        next(pieces)
        process.send_signal(signal.SIGINT)
        assert "requests in progress (1)" in read_until(process, "Ctrl-C again stops at once")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert "error" in "".join(pieces)
        log, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert "Traceback" not in log
        if way[1] == "out=dyn":
            other.terminate()
            other.wait(PATIENCE_S)
    assert_nothing_is_left(tmp_path, pids)


def test_two_interrupts_that_come_together_end_a_worker_without_waiting(tmp_path):
    command = ("serving.cli.dynamo_run", "in=dyn://", "out=mocker", "--extra-engine-args", tmp_path / "slow.json", "-v")
    with running(tmp_path, *command) as process:
        until(lambda: list(tmp_path.glob("d/*.sock")), process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, 130)
        assert "Traceback" not in log
    assert_nothing_is_left(tmp_path, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_stack_of_a_live_run_starts_ends_it(tmp_path, number):
    command = ("dynabench", "run", "--workers", 4, "--out", tmp_path / "out")
    with running(tmp_path, *command, start=subprocess.Popen) as process:  # a stack of forks starts at once
        pids = until(lambda: below(process), process)
        process.send_signal(number)
        assert "Ctrl-C again stops at once" in read_until(process, "while the stack was starting")
        log, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (2, 130)
        assert "Traceback" not in log
    assert not (tmp_path / "out").exists()
    assert_nothing_is_left(tmp_path, pids)


def test_the_second_ctrl_c_of_a_live_run_ends_it_at_once(tmp_path):
    command = (
        "dynabench",
        "run",
        "--workers",
        1,
        "--concurrency",
        4,
        "--speedup-ratio",
        0.01,
        "--out",
        tmp_path / "out",
    )
    with running(tmp_path, *command) as process:
        until(lambda: list((tmp_path / "tmp").glob("dynabench-*/*.sock")), process)
        pids = below(process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        log, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (2, 130)  # 2: nothing was measured yet
        assert "Traceback" not in log
    assert_nothing_is_left(tmp_path, pids)
