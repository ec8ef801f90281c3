"""What other tools measured, in our terms: read from what they wrote of real runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from foundation.errors import UserError
from reports import exports, folder, theirs
from reports.figures.load import Load, load_of, sent_as
from reports.theirs import comparison
from reports.theirs.measured import NO_REQUESTS
from tests.reports.runs import MANIFEST, live, run

SAMPLES = Path(__file__).parent / "other_tools"


def only(path):
    (measured,) = theirs.read(path).values()
    return measured


def written(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.fixture
def vllm():
    return json.loads((SAMPLES / "vllm-bench.json").read_text())


def test_vllms_detailed_run_has_its_own_means_and_an_interval(vllm):
    measured = only(SAMPLES / "vllm-bench.json")
    assert (measured.tool, measured.load, measured.arm.requests) == ("vllm bench serve", Load(2), 6)
    assert measured.arm.ttft.mean == pytest.approx(vllm["mean_ttft_ms"] / 1000)
    assert measured.arm.tpot.mean == pytest.approx(vllm["mean_tpot_ms"] / 1000)
    assert measured.arm.e2e.mean == pytest.approx(vllm["mean_e2el_ms"] / 1000)
    assert measured.arm.ttft.intervals.mean
    assert (measured.isl, measured.osl) == (vllm["total_input_tokens"] / 6, 16)


def test_vllms_plain_run_has_figures_without_intervals_and_says_so(vllm, tmp_path):
    lists = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors", "generated_texts")
    plain = {name: value for name, value in vllm.items() if name not in lists}
    measured = only(written(tmp_path / "plain.json", plain | {"failed": 2}))
    assert measured.arm.ttft.mean == pytest.approx(vllm["mean_ttft_ms"] / 1000)
    assert measured.arm.ttft.p99 is None  # of six requests
    assert not measured.arm.ttft.intervals
    assert (measured.arm.requests, measured.arm.failed, measured.lacks[0]) == (8, 2, NO_REQUESTS)
    assert measured.arm.throughput.requests_per_s == vllm["request_throughput"]


def test_vllms_plain_run_has_latencies_where_it_was_not_asked_for_figures_of_them(vllm, tmp_path):
    names = [name for name in vllm if name.endswith("_e2el_ms")] + ["start_times"]
    value = {key: one for key, one in vllm.items() if key not in names} | {"latencies": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
    assert only(written(tmp_path / "v.json", value)).arm.e2e.mean == 3.0  # 0 is a failure


def test_a_failed_request_of_vllm_is_a_failure(vllm, tmp_path):
    vllm["errors"][0], vllm["ttfts"][0], vllm["latencies"][0], vllm["itls"][0] = "500", 0.0, 0.0, []
    arm = only(written(tmp_path / "v.json", vllm)).arm
    assert (arm.failed, arm.errors, arm.ttft.count) == (1, {"500": 1}, 5)


def test_runs_appended_to_a_file_are_named_by_their_load(vllm, tmp_path):
    other = vllm | {"max_concurrency": 4}
    path = written(tmp_path / "v.json", f"{json.dumps(vllm)}\n{json.dumps(other)}")
    assert list(theirs.read(path)) == ["2 streams", "4 streams"]
    path = written(tmp_path / "w.json", f"{json.dumps(vllm)}\n{json.dumps(vllm)}")
    assert list(theirs.read_all([path])) == ["w.json 2 streams (1)", "w.json 2 streams (2)"]


def test_sglangs_line_has_figures_only():
    whole = json.loads((SAMPLES / "sglang-bench.jsonl").read_text())
    measured = only(SAMPLES / "sglang-bench.jsonl")
    assert (measured.tool, measured.lacks[0]) == ("SGLang bench_serving", NO_REQUESTS)
    assert measured.arm.e2e.mean == pytest.approx(whole["mean_e2e_latency_ms"] / 1000)


def test_aiperfs_requests_and_its_figures_agree():
    rows, figures = only(SAMPLES / "profile_export.jsonl"), only(SAMPLES / "profile_export_aiperf.json")
    for metric in ("ttft", "tpot", "e2e", "itl"):
        assert rows.arm.metric(metric).mean == pytest.approx(figures.arm.metric(metric).mean), metric
    assert rows.arm.ttft.intervals
    assert not figures.arm.ttft.intervals
    assert (figures.load, rows.isl, figures.isl) == (Load(2), figures.isl, pytest.approx(rows.isl))


def test_aiperfs_folder_is_its_requests_with_the_load_of_its_settings(tmp_path):
    for name in ("profile_export.jsonl", "profile_export_aiperf.json"):
        written(tmp_path / name, (SAMPLES / name).read_text())
    assert theirs.is_theirs(tmp_path)
    assert only(tmp_path).load == Load(2)
    assert only(tmp_path).arm.ttft.intervals


def test_guidellms_benchmarks_are_runs_by_their_load():
    found = theirs.read(SAMPLES / "guidellm.json")
    (report,) = [json.loads((SAMPLES / "guidellm.json").read_text())]
    assert list(found) == ["1 stream", "2 streams"]
    for measured, benchmark in zip(found.values(), report["benchmarks"], strict=True):
        metrics = benchmark["metrics"]
        assert measured.arm.ttft.mean == pytest.approx(metrics["time_to_first_token_ms"]["successful"]["mean"] / 1000)
        assert measured.arm.itl.mean == metrics["inter_token_latency_ms"]["successful"]["mean"] / 1000
        assert measured.arm.tpot.intervals


def test_guidellms_sampled_requests_give_figures(tmp_path):
    report = json.loads((SAMPLES / "guidellm.json").read_text())
    for benchmark in report["benchmarks"]:
        del benchmark["requests"]["successful"][1:]
    first, _ = theirs.read(written(tmp_path / "g.json", report)).values()
    assert not first.arm.tpot.count  # its TPOT is another
    assert "it keeps 1 of 6 requests" in " ".join(first.lacks)
    assert first.arm.e2e.mean == pytest.approx(
        report["benchmarks"][0]["metrics"]["request_latency"]["successful"]["mean"]
    )


@pytest.mark.parametrize("to", ["vllm-bench", "aiperf", "guidellm", "sglang-bench"])
def test_what_we_export_is_read_back_with_the_same_figures(to, tmp_path):
    record = live(ttft=(1.0, 2.0, 1.5), first_token_s=[1.25, 3.25, 3.75], last_token_s=[10.25, 4.25, 5.75],
                  done_s=[10.25, 4.25, 5.75], osl=[10, 2, 3], error=["", "", ""], gaps=np.array([[1.0, 0, 0, 1, 1]] * 12))  # fmt: skip
    if to in exports.FOLDERS:
        for name, data in exports.export_files(MANIFEST, [record], to).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(data)
        path = tmp_path / ("a.json" if to == "vllm-bench" else "a")
    else:
        path = tmp_path / "ours"
        path.write_bytes(exports.export(MANIFEST, [record], to))
    arm = only(path).arm
    assert (arm.requests, arm.ttft.mean) == (3, pytest.approx(1.5))
    assert (arm.e2e.mean, arm.tpot.mean) == (pytest.approx(16.5 / 3), pytest.approx(1.0))


def test_two_means_differ_with_the_interval_of_both():
    found = theirs.read_all(
        [SAMPLES / "vllm-bench.json", SAMPLES / "sglang-bench.jsonl", SAMPLES / "profile_export.jsonl"]
    )
    first, second, third = found.values()
    assert comparison.between(first, second, "ttft").interval is None
    change = comparison.between(first, third, "ttft")
    assert change.interval[0] < change.value < change.interval[1]
    said = " ".join(comparison.verdict(found))
    assert "TTFT from sent of sglang-bench.jsonl is 3.9% higher than of vllm-bench.json, but it is not known" in said
    assert "profile_export.jsonl had other prompts than vllm-bench.json" in said


def test_runs_are_compared_at_the_same_load(tmp_path):
    again = tmp_path / "again.json"
    again.write_text((SAMPLES / "guidellm.json").read_text())
    found = theirs.read_all([SAMPLES / "guidellm.json", again])
    assert comparison.bases(found) == {
        "guidellm.json 2 streams": "guidellm.json 1 stream",
        "again.json 1 stream": "guidellm.json 1 stream",
        "again.json 2 streams": "guidellm.json 2 streams",
    }
    said = comparison.verdict(found)
    assert said[-1] == (
        "guidellm.json 2 streams had other load than guidellm.json 1 stream, so their times do not compare servers."
    )
    assert "TTFT from sent of again.json 2 streams and guidellm.json 2 streams may be equal" in " ".join(said)
    assert "TTFT from sent mean vs the first of its load" in dict(comparison.grid(found).rows)


def test_what_is_known_in_no_run_is_left_out_of_the_table():
    found = theirs.read_all([SAMPLES / "sglang-bench.jsonl"])
    labels = [label for label, _ in comparison.grid(found).rows]
    assert "TTFT from sent mean (ms)" in labels
    assert "TTFT from sent p99 (ms)" not in labels
    assert "each run" not in " ".join(comparison.remarks(found))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ttfts": [1.0]}, "the lists of its requests differ in length"),
        ({"ttfts": ["a"] * 6}, r"Expected `float`, got `str` - at `\$.ttfts\[0\]`"),
        ({"start_times": [1e300] * 6}, "Expected `float` <="),
        ({"duration": 0}, "Expected `float` > 0"),
        ({"errors": ["no"] * 6}, "no request succeeded"),
        ({"latencies": None, "itls": None}, "it is not known when answers ended"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(vllm, tmp_path, change, problem):
    with pytest.raises(UserError, match=problem):
        theirs.read(written(tmp_path / "v.json", vllm | change))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"schema": "dynabench.summary/2"}', "is ours; give the results folder that it is from"),
        ('{"request_latency": {"unit": "ms"}, "request_count": {"unit": "requests", "avg": 1e999}}', "cannot be read"),
        ("{}", "not the output of a tool that is known here; looked for guidellm's report"),
        ("", "not the output of a tool"),
        ("[]", r"a JSON object is expected, but there is \[\]"),
        ("<html>", "cannot be read"),
        ('{"benchmarks": []}', "it has no benchmarks"),
        ('{"metadata": {}, "metrics": {}}', "missing required field `request_start_ns`"),
        ('{"request_latency": {"unit": "furlong", "count": 1, "avg": 1}}', "'furlong'; expected one of ms"),
    ],
)
def test_unknown_files_are_refused_by_what_was_looked_for(tmp_path, text, problem):
    path = written(tmp_path / "x.json", text)
    with pytest.raises(UserError, match=problem) as caught:
        theirs.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_of_ours_stands_beside_theirs(tmp_path):
    folder.write(
        tmp_path / "ours",
        MANIFEST | {"schema": folder.SCHEMA, "runs": folder.facts_of([run()])},
        [run()],
        with_charts=False,
    )
    found = theirs.read_all([tmp_path / "ours", SAMPLES / "vllm-bench.json"])
    assert list(found) == ["ours", "vllm-bench.json"]
    assert comparison.summarize(found).arms["ours"].ttft.mean == 1.25
    assert comparison.markdown(found).splitlines()[4].startswith("|  | ours | vllm-bench.json |")


def test_equal_loads_are_equal_whichever_tool_wrote_them(tmp_path):
    aiperf = json.loads((SAMPLES / "profile_export_aiperf.json").read_text())
    report = json.loads((SAMPLES / "guidellm.json").read_text())
    (phase,), (first, other) = aiperf["input_config"]["phases"], report["benchmarks"]
    phase["concurrency"], first["config"]["strategy"]["streams"] = 1024, 1024
    other["config"]["strategy"] = {"type_": "constant", "rate": 10}
    closed = only(written(tmp_path / "closed.json", aiperf)).load
    phase |= {"concurrency": None, "rate": 10.0}
    paced = only(written(tmp_path / "paced.json", aiperf)).load
    found = theirs.read(written(tmp_path / "g.json", report))
    assert list(found) == ["1,024 streams", "10 requests/s"]
    assert [one.load for one in found.values()] == [closed, paced]
    assert closed.is_other_than(paced)


def test_arms_of_ours_are_compared_at_their_own_loads(tmp_path):
    arms = {"concurrency=2": {"concurrency": 2}, "concurrency=8": {"concurrency": 8}, "rate=2.5": {"rate": 2.5}}
    runs = [run(name) for name in arms]
    manifest = MANIFEST | {"schema": folder.SCHEMA, "runs": folder.facts_of(runs), "arms": arms}
    folder.write(tmp_path / "ours", manifest, runs, with_charts=False)
    found = theirs.read_all([tmp_path / "ours", SAMPLES / "vllm-bench.json"])
    assert dict(comparison.grid(found).rows)["load"] == ["2 streams", "8 streams", "2.5 requests/s", "2 streams"]
    assert "ours concurrency=8 and ours rate=2.5 had other load than ours concurrency=2" in " ".join(
        comparison.verdict(found)
    )


def test_runs_of_several_folders_keep_their_loads(tmp_path):
    for name, streams in (("a", 2), ("b", 8)):
        manifest = MANIFEST | {
            "schema": folder.SCHEMA,
            "runs": folder.facts_of([run()]),
            "load": {"concurrency": streams},
        }
        folder.write(tmp_path / name, manifest, [run()], with_charts=False)
    manifest, runs = folder.combine([tmp_path / "a", tmp_path / "b"])
    folder.write(tmp_path / "both", manifest, runs, with_charts=False)
    assert [one.load for one in theirs.read(tmp_path / "both").values()] == [Load(2), Load(8)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"concurrency": 1}, "1 stream"),
        ({"session_concurrency": 8}, "8 streams"),
        ({"rate": 10.0, "max_concurrency": 16}, "10 requests/s, at most 16 streams"),
        ({"rate": 10.0, "rate_profile": "ramp"}, "arrival times"),
        ({}, "arrival times"),
    ],
)
def test_a_load_is_said_in_words(settings, said):
    assert str(load_of({"load": settings}, "a")) == said


def test_the_rate_of_a_trace_is_not_known_and_so_not_another():
    assert not Load(is_trace=True).is_other_than(Load(rate=10))
    assert Load(is_trace=True).is_other_than(Load(10))
    assert Load(rate=9).is_other_than(Load(rate=10))


def test_a_load_that_is_no_number_is_not_known():
    assert [sent_as(8, "inf"), sent_as(None, math.inf), sent_as([8], None), sent_as(8, "ten")] == [
        Load(8),
        None,
        None,
        None,
    ]
