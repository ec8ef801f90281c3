"""When an engine does not start, the message names the cause, which one of its processes printed long before."""

import asyncio
import os
import subprocess
import sys

import pytest

from serving.engines.engine_log import root_cause
from serving.engines.processes import EngineProcesses
from serving.worker.engine import EngineError

LOG = """\
(Worker pid=12) ERROR 11-22 06:50:56 [executor.py:953] Traceback (most recent call last):
(Worker pid=12) ERROR 11-22 06:50:56 [executor.py:953]   File "worker.py", line 3, in start
(Worker pid=12) ERROR 11-22 06:50:56 [executor.py:953]     raise ValueError(
(Worker pid=12) ERROR 11-22 06:50:56 [executor.py:953] ValueError: Available memory (19/23 GiB) is less than desired.
(Worker pid=12) ERROR 11-22 06:50:56 [executor.py:953] Lower it.
(Core pid=11) ERROR 11-22 06:51:01 [core.py:1510] Exception: Worker initialization failed. See stack trace for root cause.
Traceback (most recent call last):
  File "core.py", line 5, in start
Exception: Worker initialization failed. See stack trace for root cause.
"""
WORKER = """\
(Worker pid=7) ERROR 11-24 08:29:48 [executor.py:1063]     raise Exception(
(Worker pid=7) ERROR 11-24 08:29:48 [executor.py:1063] Exception: CPU Offloading is not supported here
(Core pid=6) ERROR 11-24 08:29:48 [core.py:1510] RuntimeError: Worker failed, please check the stack trace for the root cause
"""
CHILD = """
import sys
print('noise ' * 10_000, file=sys.stderr)
raise {error}
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (LOG, "Available memory (19/23 GiB) is less than desired. Lower it."),
        ("\x1b[31mTraceback (most recent call last):\nKeyError: 'q'\x1b[0m\n", "KeyError: 'q'"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n", "OutOfMemoryError: CUDA out of memory."),
        ("OSError: first\n\nThe above exception was the direct cause\n\nValueError: second\n", "second"),
        ("[2025-11-22 10:00:00 TP0] Scheduler hit an exception: Traceback\nAssertionError\n", "AssertionError"),
        (WORKER, "CPU Offloading is not supported here"),
        ("all is well\nloading: 100%\n", None),
        ("", None),
    ],
)
def test_the_cause_is_the_last_exception_that_no_other_led_to(log, expected):
    assert root_cause(log) == expected


def start(error, own):
    """Start an engine whose process fails with one error, and which itself raises another."""

    def work():
        subprocess.run([sys.executable, "-c", CHILD.format(error=error)], check=False)
        raise own

    async def main():
        processes = EngineProcesses("Engine", "memory_share")
        try:
            await processes.start(work)
        finally:
            await processes.close()

    with pytest.raises(EngineError) as caught:
        asyncio.run(main())
    return str(caught.value)


def test_an_engine_whose_process_failed_names_what_that_failed_with_and_what_mends_it(capfd):
    own = RuntimeError("Engine core initialization failed. See root cause above.")
    message = start("ValueError('Memory is less than desired')", own)
    assert message == (
        "Engine does not start: Memory is less than desired; "
        "set memory_share (after --, or in --extra-engine-args) lower or start fewer workers"
    )
    assert "noise" in capfd.readouterr().err  # it is passed on


def test_an_engine_that_knows_why_it_failed_is_believed():
    assert start("OSError('a warning')", OSError("no\nweights")) == "Engine does not start: OSError: no weights"


def test_standard_error_is_ours_again_once_the_engine_runs(capfd):
    async def main():
        processes = EngineProcesses()
        before = os.stat(2).st_ino
        inside = await processes.start(lambda: os.stat(2).st_ino)
        after = os.stat(2).st_ino
        await processes.close()
        return before, inside, after

    before, inside, after = asyncio.run(main())
    assert before == after != inside
