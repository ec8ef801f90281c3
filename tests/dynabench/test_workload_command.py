"""`dynabench workload`: what its commands write."""

import json

from tests.support.commands import dynabench
from workloads import formats


def test_merge_reads_files_in_the_format_that_is_named(tmp_path):
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"session_id": "a", "delay": 500, "input_length": 700, "output_length": 5, "hash_ids": [2, 3]},
    ]
    parts = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for part in parts:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert formats.detect(parts[0]) == "mooncake-delta"  # its turns share no beginning
    out = tmp_path / "both.jsonl"
    done = dynabench("workload", "merge", *parts, "--format", "mooncake-sessions", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(request.input_length for request in formats.read(out)) == [600, 600, 700, 700]
    refused = dynabench("workload", "merge", *parts, "--format", "moon", "--out", tmp_path / "none.jsonl")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "format 'moon' is unknown; expected one of dynabench, mooncake," in refused.stderr
