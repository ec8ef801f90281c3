"""The project keeps its own rules."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_ci_runs_the_readmes_test_command():
    commands = re.findall(r"^    (python3 -m venv .*pytest.*)$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_no_module_has_two_nouns():
    for package in ("dynabench", "mocker", "reports", "serving", "workloads"):
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 420, path
