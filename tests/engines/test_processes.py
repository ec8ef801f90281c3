"""An engine's processes end with the worker, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from serving.engines.processes import EngineProcesses, descendants
from tests.support.processes import is_alive
from tests.support.waiting import PATIENCE_S, until

WORKER = """
import asyncio, os, subprocess, sys
from serving.engines.processes import POLL_S, EngineProcesses, descendants

async def main():
    processes = EngineProcesses()
    child = await processes.start(lambda: subprocess.Popen(
        [sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"]
    ))
    while len(descendants(os.getpid())) < 3:
        await asyncio.sleep(0.01)
    await asyncio.sleep(2 * POLL_S)  # the reaper is told of them
    print("ready", flush=True)
    await asyncio.sleep(600 if sys.argv[1] == "stay" else 0)
    await processes.close()
    print("closed", child.wait(60), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_worker_leaves_is_ended(number):
    worker = subprocess.Popen([sys.executable, "-c", WORKER, "stay"], stdout=subprocess.PIPE, text=True)
    try:
        assert worker.stdout.readline() == "ready\n"
        below = descendants(worker.pid)
        assert len(below) == 3  # the engine, its own child, and the reaper
        worker.send_signal(number)
        worker.wait(PATIENCE_S)
        until(lambda: not any(map(is_alive, below)))
    finally:
        worker.kill()
        worker.communicate()


def test_what_an_engine_leaves_behind_is_ended_when_the_worker_closes_it():
    done = subprocess.run(
        [sys.executable, "-c", WORKER, "go"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == f"ready\nclosed {-signal.SIGKILL}\n"
    assert done.stderr == ""


def test_processes_that_were_there_before_the_engine_go_on():
    async def main(processes):
        child = await processes.start(lambda: subprocess.Popen(["sleep", "600"]))
        await processes.close()
        return child.wait(PATIENCE_S)

    other = subprocess.Popen(["sleep", "600"])
    try:
        assert asyncio.run(main(EngineProcesses())) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_is_known_by_its_number_and_its_start():
    child = subprocess.Popen(["sleep", "600"])
    try:
        found = descendants(os.getpid())
        assert found[child.pid] > 0
    finally:
        child.kill()
        child.wait()
    assert child.pid not in descendants(os.getpid())
