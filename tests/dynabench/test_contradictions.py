"""Which published points count: not runs that are listed twice, nor rows that contradict others of their source."""

from pathlib import Path

import pandas as pd
import pytest

from tests.support import benchmarks

POINTS = Path(__file__).parents[2] / "dynabench" / "experiment" / "published_points.csv"
ENGINE = {
    "silicon_data_source": "2026-03-25.csv;",
    "backend": "vllm",
    "backend_version": "0.18.0",
    "model_path": "openai/gpt-oss-120b",
    "gpu": "h100",
    "precision": "fp4",
    "drafts": False,
    **dict.fromkeys(("tp_size", "moe_tp_size"), 4),
    **dict.fromkeys(("attention_dp_size", "moe_ep_size"), 1),
}


@pytest.fixture(scope="module")
def program():
    return benchmarks.program("contradictions")


def table(*rows, **engine):
    """Rows of (ISL, OSL, concurrency, TTFT, TPOT)."""
    load = ["isl", "osl", "concurrency", "silicon_ttft_ms", "silicon_tpot_ms"]
    return pd.DataFrame([dict(zip(load, row, strict=True)) for row in rows]).assign(
        **{"split": "other"} | ENGINE | engine
    )


def test_a_row_contradicts_one_that_is_faster_with_more_requests(program):
    rows = table((1024, 1024, 16, 62.2, 5.83), (1024, 1024, 32, 166.3, 15.92), (1024, 1024, 64, 116.4, 9.70))
    assert program.doubts(rows).tolist() == [
        "",
        "contradicts another row: 64 requests at a time of 1024/1024 take 9.7 ms a token",
        "",
    ]


@pytest.mark.parametrize(
    ("light", "heavy", "contradicts"),
    [
        ((1024, 1024, 16, 90, 11.7), (1024, 1024, 32, 80, 10.0), True),
        ((1024, 1024, 16, 90, 11.4), (1024, 1024, 32, 80, 10.0), False),  # as far apart as repeated runs may be
        ((1024, 8192, 16, 90, 12.0), (8192, 1024, 16, 300, 10.0), True),  # more prompt for each token, longer context
        ((1024, 8192, 16, 90, 12.0), (1024, 1024, 16, 90, 10.0), False),  # more prompt for each token, shorter context
        ((1024, 1024, 16, 90, 12.0), (1024, 1024, 8, 90, 10.0), False),  # of course
        ((1024, 1024, 16, 900, 9.0), (1024, 1024, 32, 80, 10.0), False),  # TTFT is not compared
    ],
)
def test_only_a_longer_tpot_under_a_lighter_load_is_a_contradiction(program, light, heavy, contradicts):
    found = program.doubts(table(light, heavy))
    assert [bool(doubt) for doubt in found] == [contradicts, False]


def test_rows_of_different_engines_do_not_contradict_each_other(program):
    newer = table((1024, 1024, 32, 80, 10.0), backend_version="0.19.0")
    wider = table((1024, 1024, 32, 70, 9.0), tp_size=8)
    rows = pd.concat([table((1024, 1024, 16, 90, 20.0)), newer, wider], ignore_index=True)
    assert not any(program.doubts(rows))


def test_a_run_that_files_list_with_and_without_all_digits_counts_once_and_as_fitted(program):
    rows = table((1024, 1024, 16, 90.123, 9.876), (1024, 1024, 16, 90.12, 9.88), (1024, 1024, 16, 90.2, 9.88))
    rows["split"] = ["other half", "fitted", "other half"]
    assert program.doubts(rows).tolist() == [program.TWICE, "", ""]


def test_what_the_file_says_of_its_rows_follows_from_the_rows():
    program, points = benchmarks.program("contradictions"), benchmarks.program("fidelity_points").points_in(POINTS)
    found = {place for place, _ in program.contradictions(points[~points.problem.isin([program.TWICE, program.LOST])])}
    assert found == set(points.index[points.problem.str.contains("contradicts")])
    assert len(found) == 5
    assert (points.problem == program.TWICE).sum() == 146


def test_rows_whose_requests_mostly_waited_do_not_count():
    """Ten rounds one after another: TTFT is nine halves of a round, whatever the lengths."""
    program, points = benchmarks.program("contradictions"), benchmarks.program("fidelity_points").points_in(POINTS)
    rows = points[points.problem == program.LOST]
    assert len(rows) == 9
    shares = rows.silicon_ttft_ms / (rows.silicon_ttft_ms + rows.silicon_tpot_ms * 0.9 * rows.osl)
    assert shares.between(0.80, 0.83).all()
