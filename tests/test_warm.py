"""A program that `tests/support/warm.py` forks is what a fresh process is: only then do tests of commands mean anything."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.commands import run
from tests.support.waiting import PATIENCE_S

SEEN = """\
import json, os, signal, sys
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv,
    "path": sys.path[0],
    "folder": os.getcwd(),
    "said": sys.stdin.read(),
    "variables": {name: os.environ.get(name) for name in ("SEEN", "LEFT_OUT", "COLUMNS")},
    "open": len(os.listdir("/proc/self/fd")),
    "leads a session": os.getsid(0) == os.getpid(),
    "handlers": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
    "encodings": [(file.encoding, file.errors, file.line_buffering, file.write_through) for file in (sys.stdin, sys.stdout, sys.stderr)],
    "its own child's variable": os.popen("echo $SEEN").read(),
}))
print("an error", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "seen.py"
    file.write_text(SEEN)
    return [sys.executable, file]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"start_new_session": True},
        {"env": {"SEEN": "yes", "COLUMNS": "33", "PYTHONUNBUFFERED": ""}},
        {"env": {"PYTHONUNBUFFERED": "1"}},
    ],
    ids=str,
)
def test_a_fork_sees_what_a_fresh_process_sees(program, tmp_path, options):
    command = [*program, "a word", "--flag"]
    fork, fresh = (run(*command, input="hello", cwd=tmp_path, fresh=fresh, **options) for fresh in (False, True))
    assert (fork.returncode, fork.stdout, fork.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert '"said": "hello"' in fork.stdout


def test_a_program_is_forked_unless_python_or_a_library_reads_its_environment_early(program, tmp_path):
    words = [*map(str, program)]
    assert warm.is_warm(words, {"stdout": subprocess.PIPE, "cwd": tmp_path})
    assert warm.is_warm([sys.executable, "-m", "serving.mocker"], {})
    assert warm.is_warm(words, {"env": warm.AT_FIRST | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}})
    assert not warm.is_warm(words, {"env": warm.AT_FIRST | {"HF_HOME": str(tmp_path)}})
    assert not warm.is_warm(words, {"env": warm.AT_FIRST | {"HOME": str(tmp_path)}})
    assert not warm.is_warm(words, {"env": warm.AT_FIRST | {"PYTHONPATH": str(tmp_path)}})
    assert not warm.is_warm(words, {"preexec_fn": print})
    assert not warm.is_warm([sys.executable, "-c", "pass"], {})
    assert not warm.is_warm(["sleep", "1"], {})


def test_how_a_fork_ends_is_known_as_of_any_process(tmp_path):
    file = tmp_path / "waits.py"
    file.write_text("import time; print('here', flush=True); time.sleep(600)")
    with warm.start([sys.executable, file], stdout=subprocess.PIPE, text=True) as process:
        assert isinstance(process, warm.WarmProcess)
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE_S) == process.poll() == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


CHILD = """\
import json, os, sys
sys.stdin.read()
with open(int(sys.argv[1]), "w") as status:
    status.write(json.dumps([
        os.environ["SEEN"], os.getpgrp() == os.getpid(), sys.stdout.write_through, "77" in os.listdir("/proc/self/fd"),
    ]))
print("printed")
sys.exit(3)
"""
PARENT = """\
import asyncio, json, os, sys, uvloop

async def main():
    ends = [os.pipe() for _ in range(3)]
    (lifeline, ours), (status, theirs), (log, output) = ends
    os.dup2(theirs, 77)
    with open(lifeline) as stdin, open(output, "w") as stdout:
        child = await asyncio.create_subprocess_exec(
            sys.executable, sys.argv[1], "77", stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"SEEN": "yes", "PYTHONUNBUFFERED": "1"}, pass_fds=(77,), preexec_fn=os.setpgrp,
        )
    for file in (77, theirs):
        os.close(file)
    assert child.returncode is None
    os.close(ours)
    code = await child.wait()
    print(type(child).__name__, code, child.returncode, open(log).read(), *json.load(open(status)))

uvloop.run(main())
"""


def test_a_stack_in_a_fork_starts_its_processes_as_forks_that_are_what_fresh_ones_are(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, tmp_path / "parent.py", tmp_path / "child.py"]
    fork, fresh = (run(*command, fresh=fresh, check=True) for fresh in (False, True))
    assert (fork.stderr, fresh.stderr) == ("", "")
    assert fork.stdout.split()[0] == "WarmChild"
    assert fork.stdout.split()[1:] == fresh.stdout.split()[1:]
