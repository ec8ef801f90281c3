"""`python -m serving.stand_in`: some of many stand-ins, started by `dynabench vllm --replicas`."""

import os

from serving.cli.commands import failing_in_one_line
from serving.stand_in.replicas import run_here
from serving.supervision.group import SETTINGS
from serving.supervision.logs import set_up

if __name__ == "__main__":
    with failing_in_one_line("serving.stand_in"):
        set_up()
        run_here(os.environ[SETTINGS])
