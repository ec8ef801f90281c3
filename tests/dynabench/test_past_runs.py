"""Records of requests, as others write them."""

import json
import re

import pytest

from dynabench.fidelity.past_runs import read_requests
from foundation.errors import UserError
from reports import folder
from reports.record.records import COLUMNS
from tests.support.commands import dynabench
from tests.workloads.test_formats import SAMPLES

ROW = {"arrival_s": 0.5, "isl": 10, "osl": 2, "first_token_s": 1.0, "last_token_s": 2.0}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_may_lack_what_is_optional(tmp_path):
    _, run = read_requests(lines(tmp_path / "r.jsonl", ROW | {"cached_tokens": 4, "error": "lost"}, ROW))
    assert run.requests.cached_tokens.tolist() == [4, None]
    assert run.requests.error.tolist() == ["lost", ""]


def test_a_csv_gives_what_its_json_lines_give(tmp_path):
    table = tmp_path / "r.csv"
    table.write_text(
        "arrival_s,isl,osl,first_token_s,last_token_s,preemptions\n0.75,7,3,1.5,2.5,1\n0.5,10,2,1.0,2.0,0\n"
    )
    other = ROW | {"arrival_s": 0.75, "isl": 7, "osl": 3, "first_token_s": 1.5, "last_token_s": 2.5, "preemptions": 1}
    (one, first), (two, second) = (
        read_requests(table),
        read_requests(lines(tmp_path / "r.jsonl", other, ROW | {"preemptions": 0})),
    )
    assert one.requests == two.requests
    for name in COLUMNS:
        assert getattr(first.requests, name).tolist() == getattr(second.requests, name).tolist(), name


def test_recorded_answers_end_as_their_finish_reasons_say(tmp_path):
    rows = [ROW | {"finish_reason": reason} for reason in ("stop", "length", None)]
    workload, run = read_requests(lines(tmp_path / "r.jsonl", *rows))
    assert [request.ends for request in workload] == ["stop", "length", "length"]
    assert run.requests.finish_reason.tolist() == ["stop", "length", ""]
    assert {request.ends for request in read_requests(lines(tmp_path / "q.jsonl", ROW))[0]} == {"length"}


def test_what_the_prompts_of_records_share_is_not_known(tmp_path):
    workload, _ = read_requests(lines(tmp_path / "r.jsonl", ROW, ROW))
    assert not workload.knows_prefixes


def test_what_aiperf_wrote_of_a_run_is_a_record_of_it(tmp_path):
    path = tmp_path / "profile_export.jsonl"
    path.write_text(SAMPLES["aiperf-export"])
    workload, run = read_requests(path)
    assert [(request.input_length, request.output_length) for request in workload] == [(64, 20)]
    assert run.requests.first_token_s.tolist() == [pytest.approx(0.05)]
    assert run.requests.last_token_s.tolist() == [pytest.approx(0.25)]
    assert workload.notes[1:] == (
        "requests of the warm-up left out: 1",
        "rows without prompt or response tokens left out: 1",
    )


def test_what_vllm_bench_wrote_of_a_run_is_a_record_of_it(tmp_path):
    whole = json.loads(SAMPLES["vllm-bench"]) | {"ttfts": [0.5, 0.25, 0.0], "itls": [[0.125, 0.25], [1.0], []]}
    path = tmp_path / "run.json"
    for text in (json.dumps(whole), json.dumps(whole, indent=1)):
        path.write_text(text)
        workload, run = read_requests(path)
        assert [request.input_length for request in workload] == [374, 396]
        assert run.requests.first_token_s.tolist() == [0.5, 2.75]
        assert run.requests.last_token_s.tolist() == [0.875, 3.75]
    path.write_text(json.dumps(whole | {"latencies": [2.0, 3.0, 0.0]}))
    assert read_requests(path)[1].requests.last_token_s.tolist() == [2.0, 5.5]


def test_what_load_generators_wrote_without_times_or_answers_is_refused_in_a_line(tmp_path):
    path = lines(tmp_path / "run.json", json.loads(SAMPLES["vllm-bench"]))
    with pytest.raises(UserError, match="there is no ttfts, itls; save the run with --save-detailed"):
        read_requests(path)
    failed = SAMPLES["aiperf-export"].splitlines()[2]
    (tmp_path / "p.jsonl").write_text(failed + "\n")
    with pytest.raises(UserError, match="has no requests that were answered"):
        read_requests(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps(ROW | {"isl": "ten"}), "isl is not a column of numbers"),
        (json.dumps(ROW | {"isl": [1]}), "isl is not a column of numbers"),
        ("5", "cannot be read as request records"),
        ("{", "cannot be read as request records"),
        ("", "has no column arrival_s"),
    ],
)
def test_what_is_no_record_of_requests_is_refused_in_a_line(tmp_path, text, problem):
    path = tmp_path / "r.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UserError, match=re.escape(f"{path}: ") + problem) as caught:
        read_requests(path)
    assert "\n" not in str(caught.value)


def test_validate_says_which_requests_of_a_run_it_left_out(tmp_path):
    (tmp_path / "profile_export.jsonl").write_text(SAMPLES["aiperf-export"])
    done = dynabench("validate", "--real", tmp_path / "profile_export.jsonl", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "read as aiperf-export; requests of the warm-up left out: 1; rows without prompt" in done.stdout


def test_records_of_requests_are_compared_with_every_router_mode(tmp_path):
    (tmp_path / "profile_export.jsonl").write_text(SAMPLES["aiperf-export"])
    modes = ("--router-mode", "round-robin", "--router-mode", "kv", "--workers", 2)
    done = dynabench("validate", "--real", tmp_path / "profile_export.jsonl", *modes, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    arms = [run.arm for run in folder.read(tmp_path / "out")[1]]
    assert arms == ["round-robin, real", "round-robin, simulated", "kv, real", "kv, simulated"]
