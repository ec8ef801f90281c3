"""What fleets took and kept, made of runs small enough to check by hand."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from reports import folder
from reports.charts import sweep as sweep_charts
from reports.figures import fleet as fleet_figures
from reports.figures import slo
from reports.figures.metrics import Goodput
from reports.figures.outcomes import Outcome
from reports.record.fleet import FleetUse, Headcount, Oracle, PoolFleet
from reports.record.pools import PoolUse
from reports.summarize import summarize
from reports.sweep import report as sweep_report
from reports.tables import comparison as tables
from reports.tables import fleet as fleet_table
from reports.tables import use as use_tables
from reports.verdicts import fleet as fleet_verdict
from tests.reports.runs import GROWN, planned, run
from tests.reports.test_results_folder import MANIFEST as SMALL
from tests.reports.test_sweep_report import MANIFEST, point

LIMITS = [slo.parse_slo("ttft <= 2s")]
STILL = FleetUse(
    (PoolFleet("worker", "aggregated", 2, (Headcount(0.0, 0, 0, 2, 0),), gpu_s=400.0),),
    length_s=100.0,
)
"""Two workers of two GPUs, all the time."""
TEN_S = Oracle(10.0, {"worker": (1, 1, 1, 2, 2, 2, 2, 1, 1, 1)}, possible=(1.0,) * 5 + (0.9,) * 5)


def figures(*runs, limits=LIMITS):
    return fleet_figures.figures(list(runs), limits, fleet_figures.windows(runs))


def standing(arm="static", **changes):
    return planned(arm, fleet=STILL, **changes)


def written(path, *runs, limits=("ttft <= 2s",)):
    folder.write(path, SMALL | {"limits": list(limits), "runs": folder.facts_of(runs)}, list(runs))
    return path


def test_gpu_hours_count_from_the_start_of_a_worker_until_it_is_gone():
    found = figures(planned())
    assert found.gpu_h == pytest.approx(440 / 3600)
    assert found.busy_gpu_h == pytest.approx(110 / 3600)
    assert found.good_per_gpu_h == pytest.approx(70 / (440 / 3600))  # 30 of 100 came too late
    assert found.peak_gpu_h == pytest.approx(3 * 2 * 100 / 3600)
    assert (found.mean_workers, found.least_workers, found.most_workers) == (
        pytest.approx(2.2),
        1,
        3,
    )  # one of them waits


def test_good_requests_of_the_warm_up_count_because_its_gpu_hours_do():
    late = planned(is_measured=[second >= 60 for second in range(100)])
    assert figures(late).good_per_gpu_h == figures(planned()).good_per_gpu_h
    assert figures(late).out_of_limits.total_s == 0


def test_changes_are_counted_and_their_workers_up_and_down():
    found = figures(planned())
    assert (found.planner, found.changes, found.added, found.removed) == ("hpa", 2, 2, 1)
    assert (found.failed_starts, found.died, found.lost) == (1, 1, 3)


def test_the_longest_break_lasts_until_the_limits_are_kept_again():
    found = figures(planned()).out_of_limits
    assert (found.window_s, found.total_s, found.breaks, found.longest_s) == (10, 30, 1, 30)


def test_a_window_without_requests_ends_a_break():
    edges = fleet_figures.windows([planned()])
    shares = [1.0, 0.9, float("nan"), 0.94, 0.0, 0.95, 1.0, 1.0, 1.0, 0.5]
    found = fleet_figures.out_of_limits(np.array(shares), edges)
    assert edges[-2:].tolist() == [90, 99]
    assert (found.breaks, found.longest_s, found.total_s) == (3, 20, 10 + 20 + 9)


@pytest.mark.parametrize(("span_s", "width_s"), [(0, 10), (600, 10), (601, 15), (3600, 60), (100 * 3600, 7200)])
def test_windows_are_about_a_sixtieth_of_the_run_but_ten_seconds_at_least(span_s, width_s):
    edges = fleet_figures.windows([run(intended_s=[0.0, float(span_s)])])
    assert edges[1] - edges[0] == width_s
    assert edges[-1] == max(span_s, width_s)


def test_without_limits_there_is_no_time_out_of_limits():
    found = figures(planned(), limits=[])
    assert (found.out_of_limits, found.good_per_gpu_h) == (None, None)
    assert "limits" not in " ".join(fleet_table.fleet_grid(summarize([planned()])).columns)


def test_against_the_fewest_workers_gpu_seconds_are_over_on_gpus_and_under_where_not_ready():
    found = figures(planned(fleet=structs.replace(GROWN, oracle=TEN_S))).against_oracle
    assert found.possible == pytest.approx(0.95)  # all of the first half, and 90% of the other
    assert found.needed_gpu_h == pytest.approx(14 * 10 * 2 / 3600)
    # On GPUs: 1 until 30 s, 2 until 50 s, then 3; ready: 1 until 50 s, 3 until 80 s, then 2.
    assert found.over_gpu_s == 2 * (20 * 1 + 30 * 2)
    assert found.under_gpu_s == 2 * 20 * 1
    assert found.steady_gpu_h * 3600 == pytest.approx(max(TEN_S.replicas["worker"]) * 2 * GROWN.length_s)


def test_a_fleet_is_compared_only_for_as_long_as_both_are_known():
    short = Oracle(40.0, {"worker": (2,)}, (1.0,))
    found = fleet_figures.against_oracle(GROWN, short, np.arange(100.0))
    assert (found.needed_gpu_h * 3600, found.over_gpu_s, found.under_gpu_s) == (160, 0, 80)
    long = Oracle(60.0, {"worker": (3, 3, 3)}, (1.0,) * 3)
    assert fleet_figures.against_oracle(GROWN, long, np.arange(100.0)).needed_gpu_h * 3600 == pytest.approx(3 * 100 * 2)


def test_an_oracle_of_other_windows_than_the_run_is_no_error():
    for oracle in (Oracle(1e-9, {"worker": (1,) * 3}, (0.5,) * 2), Oracle(10.0, {}, ())):
        found = fleet_figures.against_oracle(GROWN, oracle, np.arange(100.0))
        assert found.needed_gpu_h < 1e-9


def test_figures_are_means_over_the_repeats():
    again = planned(repeat=1, fleet=structs.replace(GROWN, changes=GROWN.changes[:1], lost=6))
    found = figures(planned(), again)
    assert (found.changes, found.added, found.removed, found.lost) == (1.5, 2, 0.5, 4.5)
    grid = fleet_table.fleet_grid(summarize([planned(), again], LIMITS))
    assert dict(zip(grid.columns, grid.rows[0][1], strict=True))["up / down"] == "2 / 0.5"


def test_pools_that_differ_in_gpus_add_up():
    pools = (GROWN.pools[0], replace_pool(STILL.pools[0], "decode", gpus_per_worker=1, gpu_s=200.0))
    found = figures(planned(fleet=structs.replace(GROWN, pools=pools)))
    assert found.gpu_h == pytest.approx(640 / 3600)
    assert (found.mean_workers, found.most_workers) == (pytest.approx(4.2), 5)
    assert found.peak_gpu_h == pytest.approx((6 + 2) * 100 / 3600)


def replace_pool(pool, name, **changes):
    return structs.replace(pool, pool=name, **changes)


def test_where_all_workers_stand_still_nothing_is_said_or_written_of_them(tmp_path):
    summary = summarize([standing("a"), standing("b")], LIMITS)
    assert "fleet" not in json.dumps(summary.as_json()["arms"])
    assert fleet_table.fleet_grid(summary) is None
    path = written(tmp_path / "x", standing())
    assert "fleet" not in json.loads((path / "experiment.json").read_text())["runs"][0]
    assert not (path / "charts" / "fleet.svg").exists()
    assert folder.read(path)[1][0].fleet is None


def test_fleets_come_back_as_they_were(tmp_path):
    known = structs.replace(GROWN, oracle=TEN_S)
    _, found = folder.read(written(tmp_path / "x", standing(), planned(fleet=known)))
    assert [one.fleet for one in found] == [STILL, known]
    before = (tmp_path / "x" / "summary.json").read_text()
    folder.rebuild(tmp_path / "x")
    assert (tmp_path / "x" / "summary.json").read_text() == before


def test_a_folder_that_does_not_know_its_fleet_is_compared_as_one_that_stood_still(tmp_path):
    pools = (PoolUse("worker", "aggregated", 2, 4),)
    old = replace(run("static", ttft=[1.0] * 91), pools=pools)  # the last answer ends at 100 s
    folders = [written(tmp_path / "old", old, limits=()), written(tmp_path / "new", planned(), limits=())]
    manifest, runs = folder.combine(folders)
    arms = summarize(runs).arms
    assert (arms["static"].fleet.gpu_h, arms["hpa"].fleet.gpu_h) == (400 / 3600, 440 / 3600)
    assert arms["static"].fleet.is_still
    assert [one.get("fleet") is None for one in manifest["runs"]] == [True, False]


def test_a_live_run_whose_workers_are_not_known_has_no_figures():
    arms = summarize([planned(), replace(run("url", is_live=True), pools=())], LIMITS).arms
    assert not arms["url"].fleet
    assert fleet_table.fleet_grid(summarize([planned(), run("url", pools=())], LIMITS)).rows[1][1][1] == "n/a"


def test_the_table_has_a_line_for_each_arm_and_leaves_out_what_did_not_happen():
    quiet = structs.replace(GROWN, lost=0, pools=(structs.replace(GROWN.pools[0], died=0, died_s=(), failed_starts=0),))
    grid = fleet_table.fleet_grid(summarize([standing(), planned(fleet=quiet)], LIMITS))
    cells = {label: dict(zip(grid.columns, row, strict=True)) for label, row in grid.rows}
    assert cells["hpa"] == {
        "within limits": "70.0%",
        "GPU-hours": "0.12",
        "good per GPU-hour": "573",
        "workers (mean / most)": "2.2 / 3",
        "out of limits (s)": "30",
        "longest break (s)": "30",
        "breaks": "1",
        "changes": "2",
        "up / down": "2 / 1",
        "busy GPU-hours": "0.031",
    }
    assert cells["static"]["changes"] == "0"
    assert "windows of 10 s" in grid.note
    assert use_tables.grids(summarize([standing(), planned()], LIMITS))[0].title == grid.title


def arm(gpu_h, *, planner="hpa", needed=None, steady=3.0):
    its = figures(planned(fleet=structs.replace(GROWN, planner=planner)))
    oracle = None if needed is None else fleet_figures.AgainstOracle(0.98, needed, 0.0, 0.0, steady)
    return structs.replace(its, gpu_h=gpu_h, peak_gpu_h=6.0, against_oracle=oracle)


def still(gpu_h):
    return structs.replace(figures(standing()), gpu_h=gpu_h)


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        (
            {"static": (still(4.0), 0.99), "hpa": (arm(2.0), 0.96), "kpa": (arm(1.0), 0.94)},
            "hpa meets the limits with the fewest GPU-hours: 2.00; static takes 4.00 (+100%), with 99.0% of the "
            "requests within the limits.",
        ),
        (
            {"static": (still(1.0), 0.9), "hpa": (arm(2.0), 0.8)},
            "No arm meets the limits; static comes closest, with 90.0% of the requests within the limits, in 1.00 GPU-hours.",
        ),
        (
            {"hpa": (arm(2.0, needed=1.5), 0.97)},
            "hpa meets the limits, in 2.00 GPU-hours; running its peak number of GPUs all the time would take 6.00. The fewest "
            "workers that meet the limits in each part (which is possible for 98.0% of the requests) would take 1.50; running as many as the busiest part needs all the time would take 3.00.",
        ),
        (
            {"static": (still(4.0), 0.99), "hpa": (arm(2.0, needed=1.5, steady=1.8), 0.97)},
            "hpa meets the limits with the fewest GPU-hours: 2.00; static takes 4.00 (+100%), with 99.0% of the requests within "
            "the limits. The fewest workers that meet the limits in each part (which is possible for 98.0% of the requests) would take 1.50; running as "
            "many as the busiest part needs all the time would take 1.80, less than this planner.",
        ),
        (
            {"hpa": (arm(2.0), 0.9)},
            "hpa has 90.0% of the requests within the limits, in 2.00 GPU-hours; running its peak number of GPUs all the "
            "time would take 6.00.",
        ),
        ({}, ""),
    ],
)
def test_the_verdict_says_who_keeps_the_limits_with_the_fewest_gpu_hours(arms, said):
    kept = {name: fleet_verdict.Kept(its, share, share >= 0.95) for name, (its, share) in arms.items()}
    assert fleet_verdict.told(kept, "meets the limits") == said


def test_limits_of_a_run_are_kept_if_they_are_met():
    runs = [standing(), planned()]  # 30 of 100 have a TTFT of 3 s
    within = summarize(runs, [slo.parse_slo("ttft.p50 <= 2s")]).verdict
    assert "static meets every limit with the fewest GPU-hours: 0.11." in within
    assert (
        "No arm meets every limit; static comes closest, with 70.0%"
        in summarize(runs, [slo.parse_slo("ttft.p90 <= 2s")]).verdict
    )
    assert "GPU-hours" not in summarize(runs).verdict


def test_the_verdict_of_a_comparison_ends_with_it():
    summary = summarize([standing(), planned()], LIMITS)
    assert (
        "No arm meets the limits for at least 95% of the requests; static comes closest, with 70.0%" in summary.verdict
    )
    assert summary.formulas["gpu_h"] == fleet_figures.FORMULAS["gpu_h"]


def test_the_page_shows_the_fleet_over_time_and_why_it_changed(tmp_path):
    known = structs.replace(GROWN, oracle=TEN_S)
    path = written(tmp_path / "x", standing(), planned(fleet=known))
    text = (path / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    panels = data["fleet"]["panels"]
    assert len(panels) == 2 * 5  # requests, tokens, workers, limits, TTFT: of two arms
    workers = {series["label"]: (series["x"], series["y"]) for series in panels[7]["series"]}
    assert workers["hpa, ready"] == ([5, 15, 25, 35, 45, 55, 65, 75, 85, 94.5], [1, 1, 1, 1, 1, 3, 3, 3, 2, 2])
    assert workers["hpa, waiting for GPUs"][1] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    assert workers["hpa, needed"][1] == list(TEN_S.replicas["worker"])
    within = panels[8]["series"][0]["y"]
    assert within == [100, 100, 0, 0, 0, 100, 100, 100, 100, 100]
    for said in (
        "a worker died",
        "1 to 3",
        "queue is 7, its target 3",
        "2 changes of 10 decisions.",
        "a load is not known",
    ):
        assert said in text


def test_only_the_first_changes_of_many_are_shown():
    many = structs.replace(GROWN, changes=GROWN.changes * 150)
    (grid,) = fleet_table.changes({"static": standing(), "hpa": planned(fleet=many)})
    assert len(grid.rows) == 200
    assert grid.note == "300 changes of 10 decisions. The first 200 of 300."


def test_with_several_pools_each_has_its_panel_and_each_change_its_pool(tmp_path):
    pools = (GROWN.pools[0], replace_pool(STILL.pools[0], "decode"))
    apart = planned(fleet=structs.replace(GROWN, pools=pools))
    (grid,) = fleet_table.changes({"hpa": apart})
    assert grid.rows[0] == ("30 s", ["worker", "1 to 3", "queue is 7, its target 3"])
    svg = (written(tmp_path / "x", apart) / "charts" / "fleet.svg").read_text()
    assert "workers: worker" in svg
    assert "workers: decode" in svg


def priced(name, gpu_h, share, *, is_met=False, its=None):
    outcome = Outcome("ttft <= 2000 ms in 99%", "met" if is_met else "missed", share, share / 0.99 - 1, is_share=True)
    found = structs.replace(its or figures(planned()), gpu_h=gpu_h)
    made = point(f"planner {name}", 0.1, outcomes=[outcome], planner=name)
    return structs.replace(made, fleet=found, goodput=Goodput(share * 100, 100, share, 1.0))


POINTS = [
    priced("static", 4.0, 0.995, is_met=True, its=figures(standing())),
    priced("hpa", 3.0, 0.8),
    priced("lead-time", 2.0, 0.99, is_met=True),
]


def test_a_sweep_over_planners_compares_gpu_hours(tmp_path):
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": ["ttft <= 2000 ms"]}, POINTS, POINTS, is_complete=True)
    assert found.columns[:6] == ["planner", "limits", "within limits", "GPU-hours", "good/GPU-h", "mean workers"]
    assert found.rows[2][2:6] == ["99.0%", "2.00", "573", "2.2"]
    assert found.verdict.startswith(
        "2 of 3 combinations meet every limit; planner lead-time needs the fewest GPU-hours (2.00). "
    )
    with (tmp_path / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["fleet.gpu_h"] for line in lines] == ["4.0", "3.0", "2.0"]
    assert lines[0]["fleet.out_of_limits.longest_s"] == "30.0"
    assert (tmp_path / "charts" / "cost.svg").exists()


def test_a_sweep_draws_what_is_within_the_limits_against_gpu_hours():
    chart = sweep_charts.cost(sweep_charts.swept(POINTS, [slo.parse_slo("ttft <= 2000 ms")]))
    (panel,) = chart.panels
    assert {series.label: (series.x, series.y) for series in panel.series} == {
        "planner static": ([4.0], [99.5]),
        "planner hpa": ([3.0], [80.0]),
        "planner lead-time": ([2.0], [99.0]),
    }
    front = panel.axes.lines[0]
    assert sorted(zip(front.x.tolist(), front.y.tolist(), strict=True)) == [(2.0, 99.0), (4.0, 99.5)]


def test_a_sweep_whose_workers_stand_still_is_as_before(tmp_path):
    points = [priced("a", 4.0, 0.9, its=figures(standing())), priced("b", 3.0, 0.8, its=figures(standing()))]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": ["ttft <= 2000 ms"]}, points, points, is_complete=True)
    assert "GPU-hours" not in found.columns
    assert not (tmp_path / "charts" / "cost.svg").exists()


def test_a_pull_request_has_the_table():
    text = tables.markdown(summarize([standing(), planned()], LIMITS), SMALL, [])
    assert "**What does the fleet cost, and which limits does it meet?**" in text
