"""What commands say of runs: no more than is known, and every time what was run on what."""

import json

import pytest

from tests.support.commands import dynabench

GENERIC = "generic: a polynomial of no particular model or GPU"
SMALL = ("--max-requests", "60", "--jobs", "1")


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Three arms, one of them the first once more, none of which draws anything."""
    out = tmp_path_factory.mktemp("verdicts") / "x"
    modes = ("--router-mode", "round-robin", "--router-mode", "kv", "--noise-floor")
    limits = ("--slo", "ttft.mean <= 10s", "--slo", "e2e.mean <= 1ms", "--slo", "ttft.p99 <= 10s")
    return out, dynabench("simulate", *SMALL, *modes, *limits, "--out", out)


def test_two_runs_that_draw_nothing_are_said_to_be_equal_and_no_number_of_requests_is_promised(repeated):
    _, done = repeated
    said = "Two runs of round-robin are exactly equal: nothing in them is random, so there is no noise."
    assert said in done.stdout.replace("\n", " ")
    assert "take about 0 requests" not in done.stdout


def test_every_limit_of_a_run_is_met_or_missed_by_so_much_or_not_known(repeated):
    _, done = repeated
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("kv: ttft.mean"))
    met, missed, unknown = line.split("; ", 2)
    assert met.startswith("kv: ttft.mean <= 10000 ms met by 9")
    assert missed.startswith("e2e.mean <= 1 ms missed by ")
    assert unknown == "ttft.p99 <= 10000 ms not known: 60 samples; a p99 needs 368"


def test_step_times_of_no_engine_are_called_that_every_time(repeated):
    out, done = repeated
    again = dynabench("report", out)
    beside = dynabench("compare", out, "--markdown")
    for text in (done.stdout, again.stdout, beside.stdout, (out / "report.html").read_text()):
        assert GENERIC in text
    assert done.stdout.replace("\n", " ").startswith(
        "chat.jsonl: round-robin vs kv vs round-robin (A/A): 60 requests on 4 simulated engines"
    )


def test_a_gate_that_passes_says_by_what(repeated):
    out, _ = repeated
    done = dynabench("compare", out, "--fail-if", "ttft.mean > +5000%")
    assert done.returncode == 0
    assert "\npassed: ttft.mean > +5000%: " in done.stdout


def test_engines_with_nothing_to_do_kept_up(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{n},{n % 7},,m,{900 + n},200,{1100 + n},API log\n" for n in range(200))
    trace.write_text(
        f"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n{rows}"
    )
    done = dynabench("simulate", trace, "--workers", "40", "--jobs", "1", "--out", tmp_path / "x")
    assert done.returncode == 0, done.stderr
    assert "keep up" not in done.stdout
    assert "0.0%" not in json.dumps(done.stdout.split("cache hit share")[-1].splitlines()[:1])


def test_repeats_give_a_sweep_intervals(tmp_path):
    flags = ("--router-mode", "random", "--repeats", "3", "--slo", "ttft.mean <= 200ms", "--out", tmp_path / "x")
    done = dynabench(
        "sweep", *SMALL, "--find", "rate_scale", "--low", "0.5", "--high", "16", "--precision", "0.2", *flags
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "x" / "sweep.json").read_text())["summary"]
    (found,) = summary["points"]
    low, high = found["interval"]
    assert 0.5 <= low <= found["met"] < found["missed_at"] <= high <= 16
    assert summary["rows"][0][1] == f"{found['met']:g} [{low:g}, {high:g}]"
    (limit,) = (one for one in found["point"]["outcomes"] if one["limit"] == "ttft.mean <= 200 ms")
    assert limit["interval"][0] < limit["value"] < limit["interval"][1]
    assert "The brackets show the 95% interval over the repeats." in done.stdout.replace("\n", " ")


def test_one_point_that_cannot_be_is_marked_and_the_rest_goes_on(tmp_path):
    flags = ("--router-mode", "kv", "--vary", "num_gpu_blocks=20,2000", "--out", tmp_path / "x")
    done = dynabench("sweep", *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    impossible, possible = json.loads((tmp_path / "x" / "sweep.json").read_text())["summary"]["points"]
    assert (impossible["kind"], possible["kind"]) == ("impossible", "point")
    assert "num_gpu_blocks 20 is impossible: " in done.stdout.replace("\n", " ")


def test_sweeps_that_differ_share_no_folder_and_equal_ones_do(tmp_path):
    few = ("sweep", "--max-requests", "20", "--jobs", "1", "--router-mode", "kv")
    for vary in ("workers=1..2", "workers=2", "workers=1..2"):
        done = dynabench(*few, "--vary", vary, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    first, second = sorted(
        (tmp_path / "results").iterdir(), key=lambda folder: -len(list((folder / "points").iterdir()))
    )
    assert [len(list((folder / "points").iterdir())) for folder in (first, second)] == [2, 1]
    assert "2 of 2 points are already simulated" in done.stdout
