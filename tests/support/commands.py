"""The commands of this project, run as a user runs them."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import PATIENCE_S

BIN = Path(sys.executable).parent
DYNAMO_RUN = BIN / "dynamo-run"
PROGRESS = re.compile(r"^ *[\d.,]+ s  .*\n", re.MULTILINE)
"""What commands say on stderr every few seconds: how many such lines there are is a matter of the machine."""


def dynabench(*arguments, **options):
    return run(sys.executable, "-m", "dynabench", *arguments, **options)


def in_process(*words):
    """Run a command of dynabench in this process; return what it prints, or raise what the program says in one line."""
    from dynabench.cli.app import app

    command, bound, _ = app.parse_args([*words], exit_on_error=False, print_error=False)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command(*bound.args, **bound.kwargs)
    return printed.getvalue()


def dynamo_run(*arguments, **options):
    return run(DYNAMO_RUN, *arguments, **options)


def run(*command, env=None, **options):
    """Run a command to its end, without input where none is given; `env` is added to the environment, progress left out."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    pipes |= {} if "input" in options else {"stdin": subprocess.DEVNULL}
    done = subprocess.run(
        [*map(str, command)], text=True, env=os.environ | (env or {}), **({"timeout": PATIENCE_S} | pipes | options)
    )
    if done.stderr:
        done.stderr = PROGRESS.sub("", done.stderr)
    return done
