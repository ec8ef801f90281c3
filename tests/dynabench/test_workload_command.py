"""`dynabench workload`: what its commands write."""

import json
import shlex
from pathlib import Path

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


def lengths_only(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{number},1,,m,{600 + number},5,{605 + number},API log\n" for number in range(30))
    trace.write_text(
        f"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}"
    )
    return trace


def test_what_prompts_share_is_unknown_where_only_lengths_are_known(tmp_path):
    trace, own, lossy = lengths_only(tmp_path), tmp_path / "own.jsonl", tmp_path / "lossy.jsonl"
    assert "unlimited cache hit share  unknown" in dynabench("workload", "inspect", trace).stdout
    done = dynabench("workload", "convert", trace, own)
    assert "unknown -> " in done.stdout
    assert "0.0%" not in done.stdout
    facts = json.loads(dynabench("workload", "inspect", own, "--json").stdout)
    assert facts["endless_cache_hit_share"] is facts["best_hit_shares"] is None
    refused = dynabench("workload", "convert", own, lossy, "--to", "mooncake")
    assert (refused.returncode, "the fact that sharing is unknown" in refused.stderr) == (2, True), refused.stderr
    done = dynabench("workload", "convert", own, lossy, "--to", "mooncake", "--lossy")
    assert "left out: the fact that sharing is unknown" in done.stdout
    spec, like = tmp_path / "spec.json", tmp_path / "like.jsonl"
    assert dynabench("workload", "fit", own, spec).returncode == 0
    assert dynabench("workload", "synth", like, "--spec", spec).returncode == 0
    assert not formats.read(like).knows_prefixes


def test_converting_to_lengths_says_that_sharing_is_then_unknown(tmp_path):
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.csv"
    row = '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]}\n'
    trace.write_text(2 * row)
    done = dynabench("workload", "convert", trace, out, "--to", "burstgpt", "--lossy")
    assert "50.0% -> unknown" in done.stdout


def test_a_simulation_gives_no_hits_where_prefixes_are_unknown(tmp_path):
    trace, out = lengths_only(tmp_path), tmp_path / "results"
    columns = "arrival=Timestamp,input=Request tokens,output=Response tokens"
    done = dynabench("simulate", trace, "--columns", columns, "--out", out)
    assert done.returncode == 0, done.stderr
    (arm, *_) = json.loads((out / "summary.json").read_text())["arms"].values()
    assert arm["cache"]["hit_share"] is None
    assert any("differ only in how they balance the load" in remark for remark in arm["remarks"])
    assert json.loads((out / "experiment.json").read_text())["experiment"]["columns"] == columns


def test_what_is_written_fits_the_name_of_its_file(tmp_path):
    trace, out = lengths_only(tmp_path), tmp_path / "out.csv"
    refused = dynabench("workload", "convert", trace, out)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "out.csv: dynabench is JSONL; name the file *.jsonl, or choose --to burstgpt or azure" in refused.stderr
    assert not out.exists()


def test_convert_fit_and_merge_take_the_file_to_write_last_or_by_name(tmp_path):
    trace = lengths_only(tmp_path)
    for command in ("convert", "merge", "fit"):
        last, named = tmp_path / f"{command}-last.json", tmp_path / f"{command}-named.json"
        for arguments in ((trace, last), (trace, "--out", named)):
            done = dynabench("workload", command, *arguments)
            assert done.returncode == 0, done.stderr
        assert last.read_bytes() == named.read_bytes()


def test_an_empty_file_is_called_empty(tmp_path):
    for name in ("empty.csv", "empty.jsonl"):
        (tmp_path / name).write_text("")
        for options in ((), ("--format", "azure"), ("--format", "mooncake")):
            refused = dynabench("workload", "inspect", tmp_path / name, *options)
            assert (refused.returncode, f"{name} is empty" in refused.stderr) == (2, True), refused.stderr


def test_the_readmes_commands_work_when_pasted():
    """Those that stand together: the environment is activated, and what one reads is there or written by one before."""
    root = Path(__file__).parents[2]
    start = (root / "README.md").read_text().split("    . .venv/bin/activate\n")[1].split("\n\n")[0]
    commands = [shlex.split(line, comments=True) for line in start.splitlines()]
    assert commands[0][:4] == ["dynabench", "workload", "synth", "trace.jsonl.gz"]
    files = {word for words in commands for word in words if word.endswith((".csv", ".json", ".jsonl", ".gz", ".yaml"))}
    assert [file for file in files - {"trace.jsonl.gz"} if not list(root.glob(file))] == []
    assert not any(word.isupper() for words in commands for word in words)


def test_first_comparison_leads_with_the_readers_model_and_gpu():
    text = (Path(__file__).parents[2] / "docs" / "first-comparison.md").read_text()
    first = text[text.index("dynabench simulate") :].split("\n\n")[0]
    assert "--model" in first
    assert "--gpu" in first


def shared_prompts(tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": n, "input_length": 1024, "output_length": 5, "hash_ids": [n // 2 * 2, n // 2 * 2 + 1]}
        for n in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return trace


def test_inspect_says_how_many_gib_a_cache_is_where_a_model_is_named(tmp_path):
    """Llama 3.1 70B has 320 KiB of KV a token, so 16,384 tokens are 5 GiB."""
    trace = shared_prompts(tmp_path)
    plain = dynabench("workload", "inspect", trace).stdout
    assert "best share by cache size   16k tokens 50.0%\n" in plain
    named = dynabench("workload", "inspect", trace, "--model", "meta-llama/Llama-3.1-70B").stdout
    assert "best share by cache size   16k tokens (5 GiB) 50.0%\n" in named
    half = dynabench("workload", "inspect", trace, "--model", "meta-llama/Llama-3.1-70B", "--kv-cache-dtype", "fp8")
    assert "16k tokens (2.5 GiB) 50.0%\n" in half.stdout
    refused = dynabench("workload", "inspect", trace, "--model", "no/such-model")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)


def test_inspect_looks_at_the_first_requests_only(tmp_path):
    trace = shared_prompts(tmp_path)
    done = dynabench("workload", "inspect", trace, "--max-requests", "3", "--json")
    facts = json.loads(done.stdout)
    assert (facts["requests"], facts["notes"]) == (3, ["cut to 3 requests"])
    refused = dynabench("workload", "inspect", trace, "--max-requests", "0")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
