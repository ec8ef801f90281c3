"""Start the project's programs as forks of a process that has imported them, since imports are most of a short command.

`python -m dynabench` imports for one or two seconds of CPU and then works for a tenth of one. A fork of a process that
has imported it has its own arguments, environment, folder, pipes, session and exit code, as a fresh process does; it
shares only what imports leave behind. So what is read while Python starts or imports keeps a command from being
forked: see `is_warm`. A test of start-up itself starts a fresh process.

Workers and frontends that a stack starts are forked too, whether the stack runs in the tests or in a fork. The process
that forks is the parent of all: `children` in `processes.py` returns whom a process started.
"""

import asyncio
import inspect
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

BIN = Path(sys.executable).parent
PROGRAMS = {BIN / "dynabench", BIN / "dynamo-run"}
PACKAGES = {"dynabench", "serving"}
OPTIONS = {"cwd", "encoding", "env", "errors", "start_new_session", "stderr", "stdin", "stdout", "text"}
"""The options of subprocess.Popen that a fork follows."""

OF_GROUPS = {"stdin", "stdout", "stderr", "env", "pass_fds", "preexec_fn"}
"""The options with which serving.supervision starts the processes of a stack."""

READ_EARLY = re.compile(
    r"^((PYTHON(?!UNBUFFERED$)|LC_|LANG|LD_|HF_(?!HUB_DISABLE_PROGRESS_BARS$)|HUGGINGFACE_|MPL|XDG_|OMP_|OPENBLAS_|MKL_|TOKENIZERS_|ARROW_).*|VIRTUAL_ENV|HOME|TZ)$"
)
"""The variables that Python or a library reads when it starts or is imported.

Two others stand in the environment of many tests: forks follow PYTHONUNBUFFERED, and our own code sets the one on
progress bars, in the tests' process too, for a library that forks import only when they need it.
"""


def _read_early(environment):
    return {name: value for name, value in environment.items() if READ_EARLY.match(name)}


AT_FIRST = dict(os.environ)
"""The environment before any test changed it."""


def start(command, **options):
    """Start a command like subprocess.Popen, warm where nothing but the time can differ."""
    words = [*map(str, command)]
    return (WarmProcess if is_warm(words, options) else subprocess.Popen)(words, **options)


def is_warm(words, options):
    """Return whether a fork does the same as a fresh process: our program, nothing special asked of Python, no terminal."""
    environment = os.environ if options.get("env") is None else options["env"]
    return (
        _is_ours(words)
        and options.keys() <= OPTIONS
        and _read_early(environment) == _read_early(AT_FIRST)
        and not any(
            _is_terminal(options.get(name), number) for number, name in enumerate(("stdin", "stdout", "stderr"))
        )
    )


def _is_ours(words):
    if words[0] != sys.executable:
        return Path(words[0]) in PROGRAMS
    match words[1:]:
        case ["-m", module, *_]:
            return module.partition(".")[0] in PACKAGES
        case [file, *_]:
            return file.endswith(".py")
    return False


def _is_terminal(stream, inherited):
    number = inherited if stream is None else stream if isinstance(stream, int) else stream.fileno()
    return number >= 0 and os.isatty(number)  # below are PIPE and its like


class WarmProcess(subprocess.Popen):
    """A fork that is used like a Popen; only how it is started, and how its end is learned, differ."""

    def _execute_child(self, *args):
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *args).arguments
        ends = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        streams = [inherited if end == -1 else end for inherited, end in enumerate((ends[0], ends[3], ends[5]))]
        try:
            self.pid, self._status = _forking().start(
                streams,
                words=given["args"],
                cwd=given["cwd"],
                env=given["env"],
                new_session=given["start_new_session"],
            )
        finally:
            self._close_pipe_fds(*ends)
        self._child_created = True

    def _try_wait(self, wait_flags):
        if not select.select([self._status], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        with os.fdopen(self._status, "rb") as status:
            return self.pid, int(status.readline())

    def _internal_poll(self, _deadstate=None, **_):
        if self.returncode is None and self._child_created and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


async def create_subprocess_exec(*words, **options):
    """Start a process of a stack like the function of asyncio, warm where nothing but the time can differ."""
    if not _is_warm_in_group(words, options):
        return await of_asyncio(*words, **options)
    discarded = os.open(os.devnull, os.O_RDWR)
    streams = []
    for inherited, name in enumerate(("stdin", "stdout", "stderr")):
        match options.get(name):
            case None:
                streams.append(inherited)
            case asyncio.subprocess.DEVNULL:
                streams.append(discarded)
            case asyncio.subprocess.STDOUT:
                streams.append(streams[1])
            case file:
                streams.append(file.fileno())
    try:
        return WarmChild(*_forking().start(streams, words=words, env=options["env"], kept=options["pass_fds"]))
    finally:
        os.close(discarded)


def _is_warm_in_group(words, options):
    return (
        options.keys() == OF_GROUPS
        and options["preexec_fn"] is os.setpgrp
        and options["stdin"] != asyncio.subprocess.PIPE
        and options["stdout"] != asyncio.subprocess.PIPE
        and is_warm(words, {"env": options["env"], "stdin": options["stdin"], "stdout": asyncio.subprocess.DEVNULL})
    )


of_asyncio = asyncio.create_subprocess_exec


class WarmChild:
    """A fork that is used like an asyncio.subprocess.Process without pipes."""

    def __init__(self, pid, status):
        self.pid = pid
        self.returncode = None
        self._status = status
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(status, self._learn)

    def _learn(self):
        asyncio.get_running_loop().remove_reader(self._status)
        with os.fdopen(self._status, "rb") as status:
            self.returncode = os.waitstatus_to_exitcode(int(status.readline()))
        self._ended.set()

    async def wait(self):
        await self._ended.wait()
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Forking:
    """The process that forks, of which every process that runs tests has one."""

    def __init__(self, socket):
        self._socket = socket

    @classmethod
    def launched(cls):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            forking = cls(ours)
            forking.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                cwd=Path(__file__).parents[2],
                env=AT_FIRST,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        return forking

    @classmethod
    def reached(cls, address):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        return cls(connection)

    def start(self, streams, *, words, cwd=None, env=None, new_session=False, kept=None):
        """Start a fork; return its pid, and the number of a file in which its status will be the only line."""
        wanted = {
            "words": words,
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "new_session": new_session,
            "new_group": kept is not None,
            "kept": [*(kept or ())],
            "parent": os.getpid(),
        }
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(wanted).encode()], [theirs, *streams, *wanted["kept"]])
        finally:
            os.close(theirs)
        return int(_line(status)), status

    def children(self, pid):
        """Return which running processes a process had started, oldest first, with their words."""
        status, theirs = os.pipe()
        with os.fdopen(status, "rb") as answer:
            socket.send_fds(self._socket, [json.dumps({"children": pid}).encode()], [theirs])
            os.close(theirs)
            return {int(child): words for child, words in json.loads(answer.read()).items()}


def _line(file):
    line = b""
    while not line.endswith(b"\n"):
        character = os.read(file, 1)
        assert character, "the process that forks has ended"
        line += character
    return line


_lock = threading.Lock()
_started = []
_address = None


def _forking():
    with _lock:
        if not _started:
            _started.append(Forking.reached(_address) if _address else Forking.launched())
        return _started[0]


def children(pid):
    """Return which running forks a process had started, with their words; none if nothing was forked."""
    return _forking().children(pid) if _started else {}


def reach(address):
    """Have this process, a fork, start its own processes as forks of the same process."""
    global _address
    _address = address
    asyncio.create_subprocess_exec = create_subprocess_exec
