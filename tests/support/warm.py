"""Start the project's programs as forks of a process that has imported them, since imports are most of a short command.

`python -m dynabench` imports for one or two seconds of CPU and then works for a tenth of one. A fork of a process that
has imported it has its own arguments, environment, folder, pipes, session and exit code, as a fresh process does; it
shares only what imports leave behind. So what is read while Python starts or imports keeps a command from being
forked: see `is_warm`. A test of start-up itself starts a fresh process.
"""

import inspect
import json
import os
import re
import select
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

READ_EARLY = re.compile(
    r"^((PYTHON|LC_|LANG|LD_|HF_|HUGGINGFACE_|MPL|XDG_|OMP_|OPENBLAS_|MKL_|TOKENIZERS_|ARROW_).*|VIRTUAL_ENV|HOME|TZ)$"
)
"""The variables that Python or a library reads when it starts or is imported."""


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
        wanted = {
            "words": given["args"],
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "env": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": given["start_new_session"],
        }
        self._status, far_end = os.pipe()
        try:
            _forking().start(wanted, [*streams, far_end])
        finally:
            os.close(far_end)
            self._close_pipe_fds(*ends)
        self._said = b""
        self.pid = int(self._line())
        self._child_created = True

    def _line(self):
        while b"\n" not in self._said:
            said = os.read(self._status, 64)
            assert said, "the process that forks has ended"
            self._said += said
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _try_wait(self, wait_flags):
        if not select.select([self._status], [], [], 0 if wait_flags & os.WNOHANG else None)[0]:
            return 0, 0
        status = int(self._line())
        os.close(self._status)
        return self.pid, status

    def _internal_poll(self, _deadstate=None, **_):
        if self.returncode is None and self._child_created and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class Forking:
    """The process that forks, of which every process that runs tests has one."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
                cwd=Path(__file__).parents[2],
                env=AT_FIRST,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def start(self, wanted, streams):
        socket.send_fds(self._socket, [json.dumps(wanted).encode()], streams)


_lock = threading.Lock()
_started = []


def _forking():
    with _lock:
        if not _started:
            _started.append(Forking())
        return _started[0]
