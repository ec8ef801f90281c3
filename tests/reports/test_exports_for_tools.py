"""What we write for other tools has their names and units: compared with what they wrote of a real run."""

import json
from pathlib import Path

import pytest

from reports import exports
from tests.reports.runs import MANIFEST, live, run

THEIRS = Path(__file__).parent / "other_tools"


def read(name):
    return json.loads((THEIRS / name).read_text())


def test_aiperf_has_every_figure_and_its_unit():
    ours = json.loads(exports.export_files(MANIFEST, [live()], "aiperf")["a/profile_export_aiperf.json"])
    theirs = read("profile_export_aiperf.json")
    figures = {name: value for name, value in ours.items() if isinstance(value, dict) and "unit" in value}
    figures.pop("error_request_count")  # nothing failed there
    assert {name: value["unit"] for name, value in figures.items()} == {name: theirs[name]["unit"] for name in figures}
    assert {name: value.keys() for name, value in figures.items()} == {name: theirs[name].keys() for name in figures}
    assert ours.keys() - figures.keys() - {"error_request_count"} <= theirs.keys()
    rows = exports.export_files(MANIFEST, [run()], "aiperf")["a/profile_export.jsonl"].decode().splitlines()
    row, their_row = json.loads(rows[0]), json.loads((THEIRS / "profile_export.jsonl").read_text().splitlines()[0])
    assert row["metadata"].keys() <= their_row["metadata"].keys()
    assert {name: one["unit"] for name, one in row["metrics"].items()} == {
        name: their_row["metrics"][name]["unit"] for name in row["metrics"]
    }


@pytest.mark.parametrize(
    "engine",
    [
        {"model": "m"},
        {"model": None, "model_name": "m"},
        {"a": {"model": None}, "b": {"model": "x", "model_name": "m"}},
    ],
)
def test_the_model_is_the_one_that_requests_asked_for(engine):
    ours = json.loads(exports.export(MANIFEST | {"engine": engine}, [run()], "guidellm"))
    assert ours["config"]["spec"]["backend"]["model"] == "m"


def test_guidellm_has_every_metric_and_statistic():
    ours = json.loads(exports.export(MANIFEST, [run()], "guidellm"))["benchmarks"][0]
    theirs = read("guidellm.json")["benchmarks"][0]
    assert ours.keys() <= theirs.keys() | {"scheduler_state"}
    assert ours["scheduler_metrics"].keys() <= theirs["scheduler_metrics"].keys()
    for name, by_status in theirs["metrics"].items():
        if isinstance(by_status, dict) and "successful" in by_status:
            assert by_status.keys() <= ours["metrics"][name].keys(), name
            statistics = by_status["successful"]
            if isinstance(statistics, dict):
                assert ours["metrics"][name]["successful"].keys() == statistics.keys(), name
                assert ours["metrics"][name]["successful"]["percentiles"].keys() == statistics["percentiles"].keys()
    request, their_request = (one["requests"]["successful"][0] for one in (ours, theirs))
    assert request["info"]["timings"].keys() <= their_request["info"]["timings"].keys()


@pytest.mark.parametrize(
    ("name", "ours", "left_out"),
    [
        (
            "vllm-bench.json",
            lambda: exports.export_files(MANIFEST, [live()], "vllm-bench")["a.json"],
            {"itls", "generated_texts", "burstiness", "request_goodput", "rtfx"},
        ),
        (
            "sglang-bench.jsonl",
            lambda: exports.export(MANIFEST, [live()], "sglang-bench"),
            {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "sharegpt_output_len"}
            | {"random_input_len", "random_output_len", "random_range_ratio"}
            | {"total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens_retokenized"},
        ),
    ],
)
def test_benches_have_every_figure_but_those_left_out(name, ours, left_out):
    peaks = {"max_output_tokens_per_s", "max_concurrent_requests"}
    assert json.loads(ours()).keys() == read(name).keys() - left_out - peaks
