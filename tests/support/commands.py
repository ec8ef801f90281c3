"""The commands of this project, run as a user runs them."""

import contextlib
import io
import os
import re
import subprocess
import sys

from tests.support.waiting import PATIENCE_S
from tests.support.warm import BIN, start

DYNAMO_RUN = BIN / "dynamo-run"
PROGRESS = re.compile(r"^ *[\d.,]+ s  .*\n", re.MULTILINE)
"""What commands say on stderr every few seconds: how many such lines there are is a matter of the machine."""


ONE_AT_A_TIME = {"LOKY_MAX_CPU_COUNT": "1"}
"""Lets simulations without --jobs run in the command's own process: each other one imports for seconds."""


def dynabench(*arguments, env=None, **options):
    return run(sys.executable, "-m", "dynabench", *arguments, env=ONE_AT_A_TIME | (env or {}), **options)


def in_process(*words):
    """Run a command of dynabench in this process; return what it prints, or raise what the program says in one line."""
    from dynabench.cli.app import app

    command, bound, _ = app.parse_args([*words], exit_on_error=False, print_error=False)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command(*bound.args, **bound.kwargs)
    return printed.getvalue()


def inherited() -> dict[str, str]:
    """Return the environment without the width that xdist gives its workers; without one, items of lists stay lines."""
    return {name: value for name, value in os.environ.items() if name != "COLUMNS"}


def dynamo_run(*arguments, **options):
    return run(DYNAMO_RUN, *arguments, **options)


def run(*command, env=None, fresh=False, **options):
    """Run a command to its end, without input where none is given; `env` is added to the environment, progress left out.

    `fresh` starts a new Python, for tests of start-up itself; `warm.py` says what else a command is started as.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipes |= {"stdin": subprocess.PIPE if "input" in options else subprocess.DEVNULL}
    input, timeout, check = options.pop("input", None), options.pop("timeout", PATIENCE_S), options.pop("check", False)
    begin = subprocess.Popen if fresh else start
    with begin([*map(str, command)], **({"text": True, "env": inherited() | (env or {})} | pipes | options)) as process:
        try:
            stdout, stderr = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        done.check_returncode()
    if done.stderr:
        done.stderr = PROGRESS.sub("", done.stderr)
    return done
