"""The table of a sweep, made of points small enough to check by hand."""

import csv
import json

import msgspec
import pytest
from msgspec import structs

from reports import sweep_report
from reports.insight import Imbalance
from reports.metrics import Cache, Goodput, Throughput
from reports.points import Highest, Point, Quantiles
from reports.split import Split
from reports.stability import Stability

MANIFEST = {"title": "t", "subtitle": "s", "command": "c", "limits": [], "sweep": {"find": None}, "experiment": {"router_mode": ["kv", "random"]}}  # fmt: skip


def point(name, mean, *, is_stable=True, missed=(), **changes):
    times = Quantiles(mean, mean, None, None)
    return Point(
        name, changes, 2, 4.0, is_stable, Stability(is_stable, 1.0, 1.0), list(missed), True, times, times,
        Split(4, 0.1, 0.04, 0.06), False, times, times, times, times,
        Throughput(4.0, 400.0), Goodput(3.0, 4.0, 0.75, 3.0), Cache(0.5, 0.5, 0.0), Imbalance(), 0, 1.0,
    )  # fmt: skip


def test_every_combination_has_a_line_and_the_best_is_named(tmp_path):
    points = [point("2 workers", 0.2, workers=2), point("4 workers", 0.1, workers=4)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict == "2 points, 0 of them with a queue that grew. Lowest mean TTFT: 4 workers (100.0 ms)."
    assert found.columns[:3] == ["workers", "offered/s", "TTFT mean"]
    assert found.rows[1][:4] == ["4", "4.00", "100.0", "n/a"]
    assert found.rows[1][-1] == "yes"
    with (tmp_path / "table.csv").open() as file:
        assert list(csv.reader(file)) == [found.columns, *found.rows]
    assert json.loads((tmp_path / "sweep.json").read_text())["summary"]["points"][0]["name"] == "2 workers"


UNKNOWN = {
    "offered_per_s": None,
    "throughput": Throughput(),
    "goodput": Goodput(0.0, 4.0, 0.0, None),
    "cache": Cache(None, None, None),
}
"""What a point does not know whose requests all come at once, or all fail."""


def test_figures_that_are_unknown_are_not_zero(tmp_path):
    points = [structs.replace(point("a", 0.1), **UNKNOWN)]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": ["ttft <= 1 s"]}, points, points, is_complete=True)
    cells = dict(zip(found.columns, found.rows[0], strict=True))
    assert [cells[name] for name in ("offered/s", "req/s", "tok/s", "hits", "goodput")] == ["n/a"] * 5
    assert sweep_report.CHARTS["interactivity"].y(points[0]) is None


def test_a_search_in_which_all_requests_come_at_once_has_a_table(tmp_path):
    best = structs.replace(point("a", 0.1), **UNKNOWN)
    rows = [Highest("a", {"router_mode": "kv"}, "rate_scale", 4, 8, best)]
    found = sweep_report.write(tmp_path, MANIFEST | {"sweep": {"find": "rate_scale"}}, rows, [best], is_complete=True)
    assert found.rows == [["kv", "4", "8", "n/a", "n/a", "n/a", "n/a"]]


def test_a_point_at_which_every_request_failed_is_not_the_best(tmp_path):
    points = [
        point("kv", None, router_mode="kv", workers=2), point("random", 0.2, router_mode="random", workers=2),
        point("kv 4", None, router_mode="kv", workers=4),
    ]  # fmt: skip
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict == "3 points, 0 of them with a queue that grew. Lowest mean E2E latency: random in 1."


def test_modes_are_counted_by_how_often_they_were_best(tmp_path):
    points = [
        point("kv 2", 0.1, router_mode="kv", workers=2), point("random 2", 0.2, router_mode="random", workers=2),
        point("kv 4", 0.3, router_mode="kv", workers=4), point("random 4", 0.1, router_mode="random", workers=4, is_stable=False),
    ]  # fmt: skip
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=False)
    assert found.verdict.startswith("4 points, 1 of them with a queue that grew. Lowest mean E2E latency: kv in 2.")
    assert found.verdict.endswith("The sweep was interrupted; run the same command again to go on.")


def test_with_limits_the_table_says_who_meets_them(tmp_path):
    points = [point("a", 0.1, missed=["ttft.p99 <= 50 ms"])]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": ["ttft.p99 <= 50 ms"]}, points, points, is_complete=True)
    assert found.columns[-2:] == ["goodput", "limits"]
    assert found.rows[0][-2:] == ["3.00", "missed"]


@pytest.mark.parametrize(
    ("met", "verdict"),
    [
        (2.0, "a meets the limits up to rate 4, the highest of 2. b meets them up to 2 (+100% between the two)."),
        (None, "a meets the limits up to rate 4, the highest of 2."),
    ],
)
def test_a_search_names_the_combination_that_meets_the_limits_farthest(tmp_path, met, verdict):
    best = point("a", 0.1)
    rows = [
        Highest("a", {"router_mode": "kv"}, "rate", 4.0, 8.0, best),
        Highest("b", {"router_mode": "random"}, "rate", met, None, None),
    ]
    found = sweep_report.write(tmp_path, MANIFEST | {"sweep": {"find": "rate"}}, rows, [best], is_complete=True)
    assert found.verdict == verdict
    assert found.rows[0] == ["kv", "4", "8", "4.00", "n/a", "n/a", "3.00"]
    assert found.rows[1] == ["random", "none" if met is None else "2", *["-"] * 5]


def test_a_point_is_kept_as_json():
    made = point("a", 0.1, workers=2)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Point) == made


def test_a_sweep_without_prefill_workers_has_no_split(tmp_path):
    points = [point("a", 0.1)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.split is None
    assert "Where does TTFT go?" not in (tmp_path / "report.html").read_text()


def apart(name, **changes):
    split = Split(4, 0.1, 0.01, 0.04, 0.02, 0.025, 0.005, apart=0.75)
    return structs.replace(
        point(name, 0.1, **changes), split=split, is_apart=True, ttst=Quantiles(0.11, 0.11, None, None)
    )


def test_a_sweep_says_where_ttft_goes_beside_workers_that_do_everything(tmp_path):
    points = [point("aggregated", 0.2, prefill_workers="aggregated"), apart("prefill_workers 1", prefill_workers=1)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    heads = [
        "queue",
        "prefill",
        "decode queue",
        "transfer",
        "first step",
        "TTFT from sent",
        "TTST mean",
        "prefilled by another",
    ]
    assert found.split.columns == heads
    assert found.split.rows == [
        ("aggregated", ["40.00", "60.00", "-", "-", "-", "200.0", "200.0", "0.0%"]),
        ("prefill_workers 1", ["10.00", "40.00", "20.00", "25.00", "5.00", "100.0", "110.0", "75.0%"]),
    ]
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["prefill_workers"], row["transfer"], row["TTST mean"]) for row in rows] == [
        ("aggregated", "-", "200.0"), ("1", "25.00", "110.0"),
    ]  # fmt: skip
    assert "Where does TTFT go?" in (tmp_path / "report.html").read_text()
    (_, kept) = json.loads((tmp_path / "sweep.json").read_text())["summary"]["points"]
    assert (kept["split"]["transfer"], kept["ttst"]["mean"]) == (0.025, 0.11)


def test_a_search_says_where_ttft_goes_at_the_highest_value_of_each(tmp_path):
    best = apart("b", router_mode="random")
    rows = [
        Highest("a", {"router_mode": "kv"}, "rate", None, 0.1, None),
        Highest("b", {"router_mode": "random"}, "rate", 2.0, 4.0, best),
    ]
    found = sweep_report.write(tmp_path, MANIFEST | {"sweep": {"find": "rate"}}, rows, [best], is_complete=True)
    assert dict(found.split.rows)["a"] == ["-"] * 8
    assert dict(found.split.rows)["b"][3] == "25.00"
