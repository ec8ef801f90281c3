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


def test_a_workload_says_how_its_answers_end(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n')
    assert "answers end by             length 1\n" in dynabench("workload", "inspect", trace).stdout
    assert dynabench("workload", "convert", trace, out, "--ends", "stop").returncode == 0
    assert [request.ends for request in formats.read(out)] == ["stop"]
    assert json.loads(dynabench("workload", "inspect", out, "--json").stdout)["ends"] == {"stop": 1}
    refused = dynabench("workload", "convert", out, tmp_path / "lossy.jsonl", "--to", "mooncake")
    assert (refused.returncode, "answers that end by EOS" in refused.stderr) == (2, True)
