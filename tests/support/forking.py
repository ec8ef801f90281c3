"""The process that has imported the project's programs, and forks to run one: `python -m tests.support.forking SOCKET`."""

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import sys
from pathlib import Path

from tests.support import warm

IMPORTED = [
    "dynabench.cli.app",
    "numpy",
    "pandas",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "serving.cli.commands",
    "serving.cli.dynamo_run",
    "serving.frontend.server",
    "serving.mocker",
]
"""What commands import, now or later."""

ROOMS = ["dynabench.cli", "dynabench.experiment", "dynabench.live", "dynabench.virtual"]
"""Packages of which commands import all modules, most of them later."""

OF_TERMINALS = ("COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""The variables that a console reads when it is made, as modules of our command lines do when they are imported."""

MOST_BYTES = 1 << 20
MOST_FILES = 64


def import_all():
    names = [*IMPORTED]
    for room in ROOMS:
        names += [module.name for module in pkgutil.iter_modules(importlib.import_module(room).__path__, f"{room}.")]
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Serving:
    """Forks for each request, and reports pids and how processes ended."""

    def __init__(self, requests):
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind("")  # Linux picks a name
        self._listening.listen()
        self.address = self._listening.getsockname()
        self._first = requests
        self._waiting = selectors.DefaultSelector()
        self._waiting.register(requests, selectors.EVENT_READ)
        self._waiting.register(self._listening, selectors.EVENT_READ)
        self._running = {}
        """By pid: who started it, and its words."""

    def until_forked(self):
        """Serve; return in a fork, with what it has to run and its descriptors."""
        while True:
            for key, _ in self._waiting.select():
                if key.data is not None:
                    self._waiting.unregister(key.fileobj)
                    self._report(key.fileobj, *key.data)
                elif key.fileobj is self._listening:
                    self._waiting.register(self._listening.accept()[0], selectors.EVENT_READ)
                elif (forked := self._answer(key.fileobj)) is not None:
                    return forked

    def _answer(self, requests):
        said, files, *_ = socket.recv_fds(requests, MOST_BYTES, MOST_FILES)
        if not said:
            if requests is self._first:
                os._exit(0)
            self._waiting.unregister(requests)
            requests.close()
            return None
        status, *files = files
        wanted = json.loads(said)
        if "children" in wanted:
            found = {pid: words for pid, (parent, words) in self._running.items() if parent == wanted["children"]}
            os.write(status, json.dumps(found).encode())
            os.close(status)
            return None
        pid = os.fork()
        if pid == 0:
            self._leave()
            return wanted, files
        for file in files:
            os.close(file)
        self._running[pid] = wanted["parent"], wanted["words"]
        with contextlib.suppress(BrokenPipeError):  # who asked has ended
            os.write(status, b"%d\n" % pid)
        self._waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
        return None

    def _report(self, pidfd, pid, status):
        os.close(pidfd)
        del self._running[pid]
        _, ended = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):  # nobody asks any more
            os.write(status, b"%d\n" % ended)
        os.close(status)

    def _leave(self):
        """Close what a fork has no use for, at once: what is collected later would close a number of another owner."""
        for key in [*self._waiting.get_map().values()]:
            if key.data is None:
                key.fileobj.close()
        self._waiting.close()


def become(wanted, files):
    """Make this fork what a fresh process would be: streams, folder, environment, session and arguments."""
    above = max([2, *wanted["kept"]]) + 1
    places = dict(
        zip((0, 1, 2, *wanted["kept"]), [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files], strict=True)
    )
    os.closerange(3, above)
    for number, file in places.items():
        os.dup2(file, number)
    os.closerange(above, 1 << 16)
    os.chdir(wanted["cwd"])
    if any(os.environ.get(name) != wanted["env"].get(name) for name in OF_TERMINALS):
        for name in [name for name in sys.modules if name.startswith(("dynabench.cli", "serving.cli"))]:
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(wanted["env"])
    if wanted["new_session"]:
        os.setsid()
    if wanted["new_group"]:
        os.setpgrp()
    sys.stdin = sys.__stdin__ = opened_like(sys.stdin, "rb")
    sys.stdout = sys.__stdout__ = opened_like(sys.stdout, "wb")
    sys.stderr = sys.__stderr__ = opened_like(sys.stderr, "wb")


def opened_like(stream, mode):
    """Return a new stream on the number of one that Python opened when it started, with all that Python chose for it."""
    is_unbuffered, number = bool(os.environ.get("PYTHONUNBUFFERED")), stream.fileno()
    file = os.fdopen(number, mode, 0 if is_unbuffered and mode == "wb" else -1, closefd=False)
    is_by_line = number == 2 and not is_unbuffered
    return io.TextIOWrapper(
        file, stream.encoding, stream.errors, line_buffering=is_by_line, write_through=is_unbuffered
    )


def run(words):
    """Run a program as Python runs a script or, after -m, a module."""
    if words[0] == sys.executable:
        words = words[1:]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    import_all()
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests and for what they started
    serving = Serving(socket.socket(fileno=int(sys.argv[1])))
    wanted, files = serving.until_forked()
    signal.signal(signal.SIGINT, on_interrupt)
    become(wanted, files)
    warm.reach(serving.address)
    run(wanted["words"])
