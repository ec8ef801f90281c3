"""`dynabench compare` with files of other tools."""

import json

from tests.reports.test_theirs import SAMPLES
from tests.support.commands import dynabench


def test_files_of_other_tools_are_compared_and_gated():
    files = (SAMPLES / "vllm-bench.json", SAMPLES / "profile_export.jsonl")
    done = dynabench("compare", *files, "--fail-if", "ttft_sent.mean > 1ms", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert list(found["arms"]) == ["vllm-bench.json", "profile_export.jsonl"]
    assert [gate["state"] for gate in found["gates"]] == ["failed", "failed"]
    assert "These are not the same requests" in done.stderr


def test_what_other_tools_cannot_say_is_refused(tmp_path):
    file = SAMPLES / "sglang-bench.jsonl"
    done = dynabench("compare", file, "--fail-if", "ttft.mean > 1ms")
    assert (done.returncode, "other tools measure from sending; use ttft_sent" in done.stderr) == (2, True)
    done = dynabench("compare", file, "--out", tmp_path / "out")
    assert (done.returncode, "--out needs results folders" in done.stderr) == (2, True)
