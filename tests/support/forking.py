"""The process that has imported the project's programs, and forks to run one: `python -m tests.support.forking SOCKET`."""

import contextlib
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

IMPORTED = [
    "dynabench.cli.app",
    "joblib",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "numpy",
    "pyarrow.parquet",
    "serving.cli.commands",
    "serving.cli.dynamo_run",
]
"""What commands import, now or later; and the modules of all commands."""

OF_TERMINALS = ("COLORTERM", "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""The variables that a console reads when it is made, as modules of our command lines do when they are imported."""

MOST_BYTES = 1 << 20


def import_all():
    for name in IMPORTED:
        importlib.import_module(name)
    import dynabench.cli

    for module in pkgutil.iter_modules(dynabench.cli.__path__, "dynabench.cli."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def serve(requests):
    """Fork for each request, and report pids and how processes ended; return in a fork, with what it has to run."""
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not requests:
                waiting.unregister(key.fileobj)
                report(key.fileobj, *key.data)
                continue
            said, streams, *_ = socket.recv_fds(requests, MOST_BYTES, 4)
            if not said:
                os._exit(0)
            *streams, status = streams
            pid = os.fork()
            if pid == 0:
                waiting.close()  # at once: what is collected later would close a number that has another owner by then
                requests.close()
                return json.loads(said), streams
            for stream in streams:
                os.close(stream)
            os.write(status, b"%d\n" % pid)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))


def report(pidfd, pid, status):
    os.close(pidfd)
    _, ended = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # nobody asks any more
        os.write(status, b"%d\n" % ended)
    os.close(status)


def become(wanted, streams):
    """Make this fork what a fresh process would be: streams, folder, environment, session and arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1 << 16)
    os.chdir(wanted["cwd"])
    if any(os.environ.get(name) != wanted["env"].get(name) for name in OF_TERMINALS):
        for name in [name for name in sys.modules if name.startswith(("dynabench.cli", "serving.cli"))]:
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(wanted["env"])
    if wanted["new_session"]:
        os.setsid()
    sys.stdin = sys.__stdin__ = opened_like(sys.stdin, "rb")
    sys.stdout = sys.__stdout__ = opened_like(sys.stdout, "wb")
    sys.stderr = sys.__stderr__ = opened_like(sys.stderr, "wb")


def opened_like(stream, mode):
    """Return a new stream on the number of one that Python opened when it started, with all that Python chose for it."""
    settings = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
    unbuffered = isinstance(getattr(stream.buffer, "raw", None), type(None))
    return io.TextIOWrapper(open(stream.fileno(), mode, 0 if unbuffered else -1, closefd=False), **settings)


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
    wanted, streams = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, on_interrupt)
    become(wanted, streams)
    run(wanted["words"])
