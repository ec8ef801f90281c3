"""What the documentation shows of `dynabench record` and `dynabench verify`, run as it is printed."""

import re
import shlex
from pathlib import Path

from tests.support import commands

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

OF_VLLM = ("engines.md", "Recording vLLM's scheduler")
OF_SGLANG = ("engines.md", "Recording SGLang's scheduler")
OF_ONES_OWN_VLLM = ("how-to/is-the-mocker-my-vllm.md", "Replay recordings")


def section(page, heading):
    """Return the text of a page's section, up to the next heading."""
    text = (ROOT / "docs" / page).read_text()
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def scenario_in(text):
    """Return the scenario of a section, as it is printed."""
    return re.search(r'^    \{"name": .*?\n\n', text, re.MULTILINE | re.DOTALL)[0]


def commands_in(text):
    """Return the words of each record and verify of a section, which has one of each."""
    lines = [
        shlex.split(line, comments=True)
        for line in text.splitlines()
        if re.match(r" *dynabench (record|verify) ", line)
    ]
    assert [words[1] for words in lines] == ["record", "verify"]
    return lines


def run_all(text, folder):
    """Run a section's record and verify, and return what the last one printed."""
    for words in commands_in(text):
        done = commands.dynabench(*words[1:], cwd=folder, timeout=200, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
