"""The commands of this project, run as a user runs them."""

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
