"""docs/fidelity.md has the figures of the files of predictions, and those of BLIS's runs are what is simulated now."""

import pandas as pd
import pytest

from tests.support import benchmarks


@pytest.fixture(scope="module")
def page():
    return benchmarks.program("fidelity_page")


@pytest.fixture(scope="module")
def blis(page):
    return benchmarks.program("blis_runs")


def test_tables_and_pictures_are_those_of_the_files(page):
    """After a change of a file, run `python benchmarks/fidelity_page.py`."""
    text = page.PAGE.read_text()
    assert page.fill(text) == text
    stale = [path.name for path, _, description in page.pictures() if description.encode() not in path.read_bytes()]
    assert not stale


def test_the_first_table_begins_with_the_largest_error(page):
    rows = page.errors_by_case().splitlines()[2:]
    worst = [max(float(cell.split(" / ")[0]) for cell in row.split(" | ")[-2:]) for row in rows[:-1]]
    assert worst == sorted(worst, reverse=True)
    assert rows[-1].startswith("| **all points**")


def test_the_table_of_runs_begins_with_those_that_others_predict_better(page, blis):
    table = page.runs()
    means = {who: blis.errors(table, who).abs().mean(axis=1) for who in page.SIMULATORS}
    lost = means.pop(blis.OURS) - pd.DataFrame(means).min(axis=1)
    assert lost.is_monotonic_decreasing
    assert (lost > 0).sum() == 1, "the page says so"


@pytest.mark.parametrize("run", [53, 57])
def test_predictions_of_blis_runs_are_those_of_the_file(blis, run):
    """A better or worse model is written with `blis_runs.py --csv`, and the page."""
    table = pd.read_csv(blis.FILE)
    (row,) = table[table.run == run].itertuples()
    found = blis.predict(row)
    assert list(found.values()) == pytest.approx([row.dynabench_ttft, row.dynabench_itl, row.dynabench_e2e], rel=1e-3)


def test_errors_on_blis_runs_are_no_worse_than_before(blis):
    found = blis.errors(pd.read_csv(blis.FILE), blis.OURS).abs().mean()
    assert found.ttft < 8.8
    assert found.itl < 3.4
    assert found.e2e < 3.4


def test_every_prompt_but_the_first_of_its_kind_finds_all_but_its_last_block(blis):
    workload = blis.workload_of(blis.WORKLOADS["codegen"])
    first, again = workload.requests[0], workload.requests[44]
    assert first.hash_ids == again.hash_ids
    assert workload.requests[11].hash_ids[:6] == first.hash_ids[:6]  # of the same group: 100 tokens are shared
    assert not set(workload.requests[11].hash_ids[6:]) & set(first.hash_ids)
    assert [len(workload), workload.requests[3000].arrival_s, workload.requests[3001].arrival_s] == [9000, 600.0, 600.1]


def test_no_run_that_is_judged_chose_what_is_outside_the_engine(blis):
    """Runs of `short_prompts.py` are others: of the same authors, but none has the measured TTFT of one of these."""
    others = pd.read_csv(benchmarks.program("short_prompts").FILE)
    judged = pd.read_csv(blis.FILE)
    assert not set(others.run) & set(judged.run.astype(str))
    assert not set(others.real_ttft.round(1)) & set(judged.real_ttft.round(1))
