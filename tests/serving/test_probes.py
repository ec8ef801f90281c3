"""What a cluster asks a process: whether it lives, and whether it does its work."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios

import httpx
import pytest

from serving.supervision.group import STATUS_FD
from serving.supervision.probes import PORT, probed
from serving.supervision.process import report_ready
from tests.support import warm
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
def port(monkeypatch):
    port = free_port()
    monkeypatch.setenv(PORT, str(port))
    return port


async def ask(port, path):
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://127.0.0.1:{port}{path}")
    return answer.status_code, answer.json()["status"]


def test_a_process_is_healthy_from_its_report_until_it_is_asked_to_end(port):
    async def main():
        stopping = asyncio.Event()
        async with probed(stopping):
            assert await ask(port, "/live") == (200, "live")
            assert await ask(port, "/health") == (503, "starting")
            report_ready("7")
            assert await ask(port, "/health") == (200, "healthy")
            stopping.set()
            assert await ask(port, "/health") == (503, "draining")
            assert await ask(port, "/live") == (200, "live")
            assert (await ask(port, "/else"))[0] == 404

    asyncio.run(main())


def test_every_report_is_read_so_that_none_keeps_the_process_busy(port):
    async def main():
        async with probed(asyncio.Event()):
            for _ in range(2):
                report_ready("7")
                assert await ask(port, "/health") == (200, "healthy")
            left = bytearray(4)
            fcntl.ioctl(int(os.environ[STATUS_FD]), termios.FIONREAD, left)
            assert int.from_bytes(left, sys.byteorder) == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "text", [b"\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 5000 + b"\r\n\r\n", b"GET /live HTTP/1.1\r\nno end"]
)
def test_what_is_no_request_leaves_the_probes_well(port, text):
    async def main():
        async with probed(asyncio.Event()):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(text)
            writer.write_eof()
            await reader.read()
            writer.close()
            assert await ask(port, "/live") == (200, "live")

    asyncio.run(main())


def test_without_the_variable_nobody_listens(monkeypatch):
    monkeypatch.delenv(PORT, raising=False)

    async def main():
        async with probed(asyncio.Event()):
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("text", ["http", "0", "65536", "1.5", "²"])
def test_what_is_no_port_is_one_line(text, tmp_path):
    environment = os.environ | {PORT: text, "DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    done = subprocess.run(
        [sys.executable, "-m", "serving.echo"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2
    assert done.stderr == f"serving.echo: {PORT} is {text!r}; expected a port from 1 to 65535\n"


def test_a_worker_is_healthy_once_it_serves(port, tmp_path):
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    process = warm.start(
        [sys.executable, "-m", "serving.mocker", "--model-name", "mock"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def is_healthy():
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        except httpx.TransportError:
            return False

    until(is_healthy, process)
    process.send_signal(signal.SIGTERM)
    log, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, log
