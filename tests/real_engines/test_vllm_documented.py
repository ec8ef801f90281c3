"""What the documentation shows of `dynabench record` works as it is printed."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support import commands

pytestmark = pytest.mark.timeout(500)
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def printed(page):
    """Return the commands `dynabench record` and `dynabench verify` of a page, in order, without their comments."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    found = [shlex.split(line, comments=True) for line in lines if re.match(r" *dynabench (record|verify) ", line)]
    assert [words[1] for words in found] == ["record", "verify"]
    return found


def run_all(page, folder):
    """Run a page's commands, and return what the last one printed."""
    for words in printed(page):
        done = commands.dynabench(*words[1:], cwd=folder, timeout=200, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_scenario_of_the_page_on_engines_is_recorded_and_verifies(tmp_path):
    page = (ROOT / "docs" / "engines.md").read_text()
    text = re.search(r'^    \{"name": "two stops".*?\n\n', page, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "scenario.json").write_text(text)
    assert "steps.jsonl.gz: matches vLLM" in run_all("engines.md", tmp_path)
    assert json.loads(text)["engine"]["async_scheduling"] is True


def test_a_recording_of_ours_is_repeated_by_the_installed_vllm(tmp_path):
    (tmp_path / "recordings").symlink_to(ROOT / "tests" / "golden" / "vllm-0.32")
    assert "mine.jsonl.gz: matches vLLM" in run_all("how-to/is-the-mocker-my-vllm.md", tmp_path)
