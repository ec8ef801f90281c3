"""Figures for other programs."""

import csv
import io
import json

import pandas as pd
import pytest

from reports import exports
from tests.reports.runs import run

MANIFEST = {
    "title": "t", "subtitle": "s", "created": "2026-01-01", "limits": [], "bound_s": None, "workers": {"a": 2}, "engine": {"block_size": 64},
    "arms": {"a": {"router_mode": "kv"}}, "router": {}, "versions": {"dynabench": "1"}, "workload": {"name": "w", "requests": 2}, "command": "c", "load": {},
}  # fmt: skip


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
