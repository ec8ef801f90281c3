"""Figures for other programs."""

import csv
import io
import json
from typing import get_args, get_type_hints

import pandas as pd
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as prometheus_families

from dynabench.cli.results import export
from reports import exports
from tests.reports.runs import MANIFEST, live, run


def test_csv_has_a_line_a_request_and_an_empty_cell_for_what_is_unknown():
    rows = list(csv.DictReader(io.StringIO(exports.export(MANIFEST, [run(worker=[None, 1])], "csv").decode())))
    assert [row["worker"] for row in rows] == ["", "1"]
    assert [row["ttft_sched"] for row in rows] == ["1.0", "2.0"]
    assert list(rows[0])[:3] == ["arm", "repeat", "request"]


def test_parquet_has_null_for_what_is_unknown_and_for_the_times_of_failures(tmp_path):
    file = tmp_path / "x.parquet"
    file.write_bytes(exports.export(MANIFEST, [run(error=["no", ""])], "parquet"))
    table = pd.read_parquet(file)
    assert table["ttft_sched"].isna().tolist() == [True, False]
    assert table["best_tokens"].isna().all()


def test_json_is_the_summary_with_its_experiment():
    whole = json.loads(exports.export(MANIFEST, [run(ttft=[1.0] * 4)], "json"))
    assert whole["experiment"]["title"] == "t"
    assert whole["summary"]["schema"] == "dynabench.summary/2"
    assert whole["summary"]["arms"]["a"]["ttft"]["mean"] == 0.75


def test_llm_ds_report_uses_its_names_and_leaves_out_what_a_small_sample_cannot_say():
    (report,) = json.loads(exports.export(MANIFEST, [run(ttft=[1.0, 2.0])], "llm-d"))
    aggregate = report["results"]["request_performance"]["aggregate"]
    assert aggregate["latency"]["time_to_first_token"] == {"units": "s", "mean": 1.25, "p50": 1.25, "max": 1.75}
    assert aggregate["requests"]["input_length"] == {"units": "count", "mean": 100.0, "p50": 100.0, "max": 100.0}
    assert (aggregate["requests"]["total"], aggregate["requests"]["failures"]) == (2, 0)
    assert aggregate["throughput"]["request_rate"] == {"mean": 2 / 12, "units": "queries/s"}
    assert report["scenario"]["stack"][0]["standardized"] == {"kind": "inference_engine", "replicas": 2}
    assert report["run"]["time"]["duration"] == "PT0.100S"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"workers": [1]}, r"experiment.json: Expected `object`, got `array` - at `\$.workers`"),
        ({"arms": {"a": 3}}, r"at `\$.arms\[...\]`"),
        ({"versions": {}}, r"missing required field `dynabench` - at `\$.versions`"),
        ({"created": None}, r"at `\$.created`"),
    ],
)
def test_what_llm_ds_report_cannot_take_of_a_manifest_is_named(change, problem):
    with pytest.raises(ValueError, match=problem):
        exports.export(MANIFEST | change, [run()], "llm-d")


def test_a_line_per_arm_has_the_same_columns_for_every_run():
    lines = exports.export(MANIFEST, [run("=a"), run("b")], "csv-arms").decode().splitlines()
    assert len(lines) == 3
    first, other = csv.DictReader(lines)
    assert (first["arm"], other["arm"], other["requests"], other["ttft_mean_ms"]) == ("'=a", "b", "2", "1250.0")
    assert (other["ttft_p90_ms"], other["goodput_requests_per_s"], other["concurrency"]) == ("", "", "")
    closed = MANIFEST | {"arms": {"=a": {"concurrency": 2}, "b": {"concurrency": 8}}}
    text = exports.export(closed, [run("=a"), run("b")], "csv-arms").decode()
    assert [row["concurrency"] for row in csv.DictReader(io.StringIO(text))] == ["2", "8"]
    limited = exports.export(MANIFEST | {"limits": ["ttft <= 1s"]}, [run()], "csv-arms").decode().splitlines()
    assert limited[0] == lines[0]


def test_prometheus_reads_the_metrics_of_each_arm():
    text = exports.export(MANIFEST, [run('a"\\\n', ttft=[1.0] * 40), run("b")], "openmetrics").decode()
    families = {family.name: family for family in openmetrics_families(text)}
    ttft = families["dynabench_time_to_first_token_seconds"]
    assert (ttft.type, ttft.unit) == ("summary", "seconds")
    found = {(sample.name[10:], *sample.labels.values()): sample.value for sample in ttft.samples}
    assert found["time_to_first_token_seconds", 'a"\\\n', "0.9"] == 0.75
    assert ("time_to_first_token_seconds", "b", "0.9") not in found  # too few requests
    assert found["time_to_first_token_seconds_count", "b"] == 2
    assert found["time_to_first_token_seconds_sum", "b"] == 2.5
    assert {sample.value for sample in families["dynabench_requests"].samples} == {40, 2}
    assert "dynabench_goodput_requests_per_second" not in families
    assert len(list(prometheus_families(text))) == len(families)


def test_markdown_is_the_table_of_a_comparison():
    assert (
        "| TTFT mean (ms) |"
        in exports.export(MANIFEST | {"step_times": None}, [run("a"), run("b")], "markdown").decode()
    )


def test_aiperf_gets_a_folder_for_each_run_with_its_own_definitions():
    files = exports.export_files(MANIFEST, [live("x/y")], "aiperf")
    assert list(files) == ["x-y/profile_export_aiperf.json", "x-y/profile_export.jsonl"]
    found = json.loads(files["x-y/profile_export_aiperf.json"])
    assert found["inter_token_latency"] == {"unit": "ms", "count": 1, "sum": 1000.0, "std": 0.0} | dict.fromkeys(
        ["avg", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "min", "max"], 1000.0
    )
    assert (found["inter_chunk_latency"]["count"], found["time_to_first_token"]["avg"]) == (9, 1500.0)
    assert found["benchmark_duration"] == {"unit": "sec", "avg": 10.0}  # sent at 0.25 s, the last token at 10.25 s
    assert found["output_token_throughput"] == {"unit": "tokens/sec", "avg": 11 / 10.75}  # over the whole phase
    assert found["request_error_rate"]["avg"] == pytest.approx(100 / 3)
    assert found["error_summary"] == [{"error_details": {"message": "500"}, "count": 1}]
    rows = [json.loads(line) for line in files["x-y/profile_export.jsonl"].decode().splitlines()]
    assert [row["error"] for row in rows] == [None, None, {"message": "500"}]
    assert rows[0]["metrics"]["request_latency"] == {"value": 10_000.0, "unit": "ms"}
    assert rows[0]["metadata"]["request_end_ns"] - rows[0]["metadata"]["request_start_ns"] == 10_000_000_000


def test_vllm_bench_gets_a_file_for_each_run_and_repeat():
    files = exports.export_files(MANIFEST | {"load": {"concurrency": 4}}, [live(), live(repeat=1)], "vllm-bench")
    assert list(files) == ["a.0.json", "a.1.json"]
    found = json.loads(files["a.0.json"])
    assert (found["completed"], found["failed"], found["num_prompts"], found["max_concurrency"]) == (2, 1, 3, 4)
    assert found["request_rate"] == "inf"
    assert found["duration"] == 10.75  # to the end of the last stream
    assert (found["mean_tpot_ms"], found["mean_itl_ms"], found["median_e2el_ms"]) == (1000.0, 1000.0, 6000.0)
    assert (found["ttfts"], found["latencies"], found["output_lens"]) == ([1.0, 2.0, 0.0], [10.0, 2.0, 0.0], [10, 1, 0])
    assert found["errors"] == ["", "", "500"]


def test_sglang_gets_a_line_for_each_run_with_the_end_of_the_stream_as_that_of_an_answer():
    first, second = map(json.loads, exports.export(MANIFEST, [live(), live("b")], "sglang-bench").splitlines())
    assert (first["tag"], second["tag"], first["request_rate"]) == ("a", "b", 1.0)
    assert (first["mean_e2e_latency_ms"], first["mean_tpot_ms"]) == (6500.0, pytest.approx(9500 / 9))
    assert first["concurrency"] == pytest.approx(13 / 10.75)


def test_guidellm_gets_a_benchmark_for_each_run_with_tokens_as_weights():
    found = json.loads(exports.export(MANIFEST | {"load": {"concurrency": 4}}, [live(), live("b")], "guidellm"))
    assert [one["config"]["strategy"]["streams"] for one in found["benchmarks"]] == [4, 4]
    metrics = found["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": 2, "errored": 1, "incomplete": 0, "total": 3}
    tpot = metrics["time_per_output_token_ms"]["successful"]
    assert (tpot["mean"], tpot["median"], tpot["count"]) == (pytest.approx(12_000 / 11), 1000.0, 11)
    itl = metrics["inter_token_latency_ms"]["successful"]
    assert (itl["mean"], itl["count"]) == (1000.0, 9)
    assert metrics["request_latency"]["successful"]["mean"] == 6.5  # to the end of the stream
    rate = metrics["requests_per_second"]["successful"]
    assert (rate["mean"], rate["count"]) == (pytest.approx(2 / 10.5), 2)
    assert metrics["output_tokens_per_second"]["successful"]["mean"] == pytest.approx(11 / 10.5)
    assert metrics["time_to_first_output_token_ms"]["successful"]["count"] == 0


@pytest.mark.parametrize("to", ["guidellm", "sglang-bench"])
def test_what_has_no_answers_is_not_written_for_other_tools(to):
    failed = run(error=["no", "no"], first_token_s=[None, None], last_token_s=[None, None])
    with pytest.raises(ValueError, match="no request of a was answered"):
        exports.export(MANIFEST, [failed], to)


def test_simulated_runs_are_written_for_all_tools(tmp_path):
    for to in ("guidellm", "sglang-bench", "openmetrics", "csv-arms"):
        assert exports.export(MANIFEST, [run()], to)
    for to in exports.FOLDERS:
        assert exports.export_files(MANIFEST, [run()], to)


def test_the_command_offers_each_form_and_knows_which_are_folders():
    assert set(get_args(get_type_hints(export)["to"])) == {*get_args(exports.File), *get_args(exports.Folder), "png"}
    assert get_args(exports.Folder) == exports.FOLDERS


def test_arms_whose_names_are_no_file_names_get_files_of_their_own():
    names = list(exports.export_files(MANIFEST, [run("a/b"), run("a:b"), run("../")], "vllm-bench"))
    assert names == ["a-b.json", "a-b.1.json", "arm.json"]
