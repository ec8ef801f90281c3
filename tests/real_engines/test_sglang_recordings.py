"""An SGLang that is installed repeats the recordings, and what `dynabench record` writes verifies."""

import gzip
import json
from pathlib import Path

import pytest

from dynabench.fidelity.sglang.recordings import SENT
from tests.support import commands

pytestmark = pytest.mark.timeout(300)
GOLDEN = Path(__file__).parent.parent / "golden" / "sglang-0.5"


def dynabench(home, *arguments):
    return commands.dynabench(*arguments, cwd=home, timeout=200, env={"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", ["ov_lpm_aborts", "splits", "priority_low_first"])
def test_a_recording_is_made_again(tmp_path, name):
    path = GOLDEN / f"{name}.jsonl.gz"
    done = dynabench(tmp_path, "record", "--engine", "sglang", "--scenario", str(path), "--out", "again.jsonl")
    assert done.returncode == 0, done.stderr[-3000:]
    with gzip.open(path, "rt") as lines:
        recorded = [json.loads(line) for line in lines]
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    for row in again[1:]:
        del row[SENT]  # these recordings are without
    assert again == recorded
    assert "matches SGLang 0.5.23" in dynabench(tmp_path, "verify", "again.jsonl").stdout


def test_a_request_that_never_runs_is_reported(tmp_path):
    add = {"op": "add", "before_step": 0, "id": "a", "prompt": list(range(3, 137)), "max_new_tokens": 7}
    scenario = {"config": {"page_size": 16, "max_total_tokens": 150}, "actions": [add]}
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    done = dynabench(tmp_path, "record", "--engine", "sglang", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.stdout == "steps.jsonl: 64 steps; 1 request still waits, which never runs\n", done.stderr[-3000:]


def test_settings_that_sglang_refuses_are_one_line(tmp_path):
    scenario = {"config": {"schedule_policy": "no such policy"}, "actions": []}
    (tmp_path / "scenario.json").write_text(json.dumps(scenario))
    done = dynabench(tmp_path, "record", "--engine", "sglang", "--scenario", "scenario.json", "--out", "steps.jsonl")
    assert done.returncode == 2
    assert "rejects the settings of the scenario" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "steps.jsonl").exists()
