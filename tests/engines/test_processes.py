"""An engine's processes end with the worker, however it ends."""

import asyncio
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from serving.engines import processes
from serving.engines.processes import EngineProcesses, descendants
from tests.support.commands import run
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
    while len(descendants(os.getpid())) < 4:
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
        assert len(below) == 4  # the engine, its own child, the reaper, and the tracker of shared memory
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


SHARING = """
import os, time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *_: None  # as if it had been killed with the rest
made = shared_memory.SharedMemory(create=True, size=4096)
print(made._name.lstrip("/"), flush=True)
time.sleep(600)
"""
SHARING_WORKER = """
import asyncio, subprocess, sys
from serving.engines.processes import POLL_S, EngineProcesses

async def main():
    processes = EngineProcesses()
    def start():
        child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=subprocess.PIPE)
        return child, child.stdout.readline().decode().strip()

    child, name = await processes.start(start)
    await asyncio.sleep(2 * POLL_S)  # the reaper is told of it
    print(name, flush=True)
    await asyncio.sleep(600 if sys.argv[1] == "stay" else 0)
    if sys.argv[1] == "dies":
        child.kill()
        child.wait()
    await processes.close(child.kill)

asyncio.run(main())
"""


@pytest.mark.parametrize("ends", ["stay", "go", "dies"])
def test_shared_memory_goes_with_the_processes_that_had_it(ends):
    command = [sys.executable, "-c", SHARING_WORKER, ends, SHARING]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        file = Path("/dev/shm") / worker.stdout.readline().strip()
        assert file.name.startswith("psm_")
        if ends == "stay":
            assert file.exists()
            worker.kill()
        worker.wait(PATIENCE_S)
        until(lambda: not file.exists())
    finally:
        worker.kill()
        worker.communicate()


def test_shared_memory_that_another_process_maps_stays():
    mine = shared_memory.SharedMemory(create=True, size=4096)
    try:
        file = f"/dev/shm/{mine.name}"
        assert file in processes.shared_memory([os.getpid()])
        processes.remove_unmapped({file})
        assert Path(file).exists()
    finally:
        mine.close()
        mine.unlink()


STARTED = """
import asyncio, multiprocessing.resource_tracker, subprocess, sys
from serving.engines.processes import EngineProcesses

def work():
    multiprocessing.resource_tracker.ensure_running()  # as engines do that start processes
    command = [sys.executable, "-c", "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"]
    return subprocess.run(command, capture_output=True, text=True).stdout

async def main():
    processes = EngineProcesses()
    print(await processes.start(work))
    await processes.close()

asyncio.run(main())
"""


def test_a_terminals_ctrl_c_does_not_reach_an_engines_processes():
    done = run(sys.executable, "-c", STARTED)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


KILLED = """
import asyncio, multiprocessing.resource_tracker
from serving.engines.processes import EngineProcesses

def work():  # as an engine's process does that is then killed: it writes to the tracker that it inherits
    multiprocessing.resource_tracker.register("/psm_of_a_killed_process", "shared_memory")

async def main():
    processes = EngineProcesses()
    await processes.start(work)
    await processes.close()

asyncio.run(main())
"""


def test_a_killed_engines_shared_memory_is_not_reported_as_a_leak():
    done = run(sys.executable, "-c", KILLED)
    assert (done.stderr, done.returncode) == ("", 0)
