"""The table of a sweep, made of points small enough to check by hand."""

import csv
import json

import msgspec
import pytest
from msgspec import structs

from reports.charts import sweep
from reports.figures.insight import Imbalance
from reports.figures.metrics import Cache, Goodput, Throughput
from reports.figures.outcomes import Outcome
from reports.figures.split import Split
from reports.figures.stability import Stability
from reports.folder import ReportError
from reports.record.pools import DraftUse, Gain
from reports.sweep import report as sweep_report
from reports.sweep import table as sweep_table
from reports.sweep.points import Impossible, Point, Quantiles, SearchResult
from tests.support.power import PowerCut

MANIFEST = {"title": "t", "subtitle": "s", "command": "c", "limits": [], "sweep": {"find": None}, "experiment": {"router_mode": ["kv", "random"]}}  # fmt: skip


def point(name, mean, *, is_stable=True, outcomes=(), **changes):
    times = Quantiles(mean, mean, None, None)
    return Point(
        name, changes, 2, 8, 4.0, Stability(is_stable, 1.0, 1.0), list(outcomes), True, times, times,
        Split(4, 0.1, 0.04, 0.06), False, times, times, times, times,
        Throughput(4.0, 400.0), Goodput(3.0, 4.0, 0.75, 3.0), Cache(0.5, 0.5, 0.0), Imbalance(), 0, 1.0,
    )  # fmt: skip


def test_every_combination_has_a_line_and_the_best_is_named(tmp_path):
    points = [point("2 workers", 0.2, workers=2), point("4 workers", 0.1, workers=4)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict == "No queue grew in any of the 2 combinations. Lowest mean TTFT: 4 workers (100.0 ms)."
    assert found.columns[:4] == ["workers", "stable", "TTFT mean", "TTFT p99"]
    assert found.rows[1][:4] == ["4", "yes", "100.0", "n/a"]
    with (tmp_path / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["changes.workers"], line["ttft_sched.mean"], line["ttft_sched.p99"]) for line in lines] == [
        ("2", "0.2", ""), ("4", "0.1", ""),
    ]  # fmt: skip
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
    assert sweep.per_gpu(points[0]) is None


def found_at(arm, mode, find, met, missed_at, point, missed=None, sense="highest"):
    return SearchResult(arm, {"router_mode": mode}, find, sense, met, missed_at, missed_at is None, point, missed)


def searched(tmp_path, rows, limits=("ttft.p90 <= 1000 ms",)):
    tmp_path.mkdir(exist_ok=True)
    manifest = MANIFEST | {"sweep": {"find": rows[0].find}, "limits": list(limits)}
    return sweep_report.write(tmp_path, manifest, rows, [], is_complete=True)


def test_a_search_in_which_all_requests_come_at_once_has_a_table(tmp_path):
    best = structs.replace(point("a", 0.1), **UNKNOWN)
    rows = [found_at("a", "kv", "rate_scale", 4, 8, best)]
    found = searched(tmp_path, rows)
    assert found.rows == [["kv", "4", "8", "-", "n/a", "n/a", "n/a", "n/a", "n/a"]]


def test_of_layouts_of_other_sizes_the_fewest_workers_are_counted_in_gpus(tmp_path):
    def at(size, met):
        best = structs.replace(point(f"TP {size}", 0.1), gpus=size * met, workers=met)
        return found_at(f"TP {size}", "kv", "workers", met, met - 1, best, sense="lowest")

    found = searched(tmp_path / "a", [at(4, 5), at(8, 3)])
    assert found.verdict.startswith("TP 4 meets the limits from workers 5 on (20 GPUs), the fewest GPUs of 2.")
    assert "TP 8 meets them from 3 on (24 GPUs)." in found.verdict
    assert [row[found.columns.index("GPUs")] for row in found.rows] == ["20", "24"]
    equal = searched(tmp_path / "b", [at(4, 6), at(8, 3), at(2, 20)])
    assert (
        "TP 4 meets the limits from workers 6 on (24 GPUs), the fewest GPUs of 3. TP 8 needs as many, from 3 on."
        in (equal.verdict)
    )
    assert "GPUs" not in searched(tmp_path / "c", [at(4, 5), at(4, 3)]).columns


def test_a_point_at_which_every_request_failed_is_not_the_best(tmp_path):
    points = [
        point("kv", None, router_mode="kv", workers=2), point("random", 0.2, router_mode="random", workers=2),
        point("kv 4", None, router_mode="kv", workers=4),
    ]  # fmt: skip
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict == "No queue grew in any of the 3 combinations. Lowest mean E2E latency: random in 1 of 1."


def test_modes_are_counted_by_how_often_they_were_best(tmp_path):
    points = [
        point("kv 2", 0.1, router_mode="kv", workers=2), point("random 2", 0.2, router_mode="random", workers=2),
        point("kv 4", 0.3, router_mode="kv", workers=4), point("random 4", 0.1, router_mode="random", workers=4, is_stable=False),
    ]  # fmt: skip
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=False)
    assert found.verdict.startswith("The queue grew in 1 of 4 combinations. Lowest mean E2E latency: kv in 2 of 2.")
    assert found.verdict.endswith("The sweep was interrupted; run the same command again to resume it.")


def test_a_sweep_that_was_interrupted_before_a_point_was_known_says_so(tmp_path):
    found = sweep_report.write(tmp_path, MANIFEST, [], [], is_complete=False)
    assert found.verdict.startswith("No point is finished yet. The sweep was interrupted;")
    assert list(sweep_table.tables(found, 80, is_whole=False)) == []


def swept(folder, *points, limits=(), is_complete=True):
    """Write the folder of a sweep."""
    manifest = MANIFEST | {"limits": list(limits), "workload": {"name": "w", "requests": 60}, "step_times": None}
    (folder / "points").mkdir(parents=True)
    for one in points:
        (folder / "points" / f"{one.name}.json").write_bytes(msgspec.json.encode(one))
    sweep_report.write(folder, manifest, list(points), list(points), is_complete=is_complete)
    return folder


def test_several_sweeps_become_one_table_and_folder_that_survive_a_power_cut(tmp_path, monkeypatch):
    first = swept(tmp_path / "a", point("kv 2", 0.2, router_mode="kv", workers=2))
    second = swept(tmp_path / "b", point("random 2", 0.1, router_mode="random", workers=2))
    third = swept(tmp_path / "c", point("kv 2", 0.3, router_mode="kv", workers=2))
    disk = PowerCut(monkeypatch)
    manifest, found = sweep_report.combine([first, second], tmp_path / "both")
    kept = [tmp_path / "both" / name for name in ("sweep.json", "table.csv", "points/0.json", "points/1.json")]
    assert all(map(disk.is_kept, kept))
    assert found.columns[0] == "router_mode"
    assert [row[0] for row in found.rows] == ["kv", "random"]
    assert manifest["title"] == "w: 2 sweeps together"
    assert "<svg" in (tmp_path / "both" / "report.html").read_text()
    _, every = sweep_report.combine([tmp_path / "both", third], None)
    assert every.columns[:2] == ["router_mode", "sweep"]
    assert [row[:2] for row in every.rows] == [["kv", "both"], ["random", "both"], ["kv", "c"]]
    assert [one.name for one in every.points] == ["both/kv 2", "both/random 2", "c/kv 2"]


def test_sweeps_with_other_limits_or_none_are_refused(tmp_path):
    first = swept(tmp_path / "a", point("kv", 0.2, router_mode="kv"))
    other = swept(tmp_path / "b", point("kv", 0.2, router_mode="kv"), limits=[LIMIT])
    with pytest.raises(
        ReportError, match=r"b has limits itl.p99 <= 60 ms, .*a has none; sweeps in one table may differ"
    ):
        sweep_report.combine([first, other], None)
    with pytest.raises(ReportError, match="not the folder of a sweep"):
        sweep_report.combine([first, tmp_path], None)


LIMIT = "itl.p99 <= 60 ms"
MISSED = Outcome(LIMIT, "missed", value=0.06019, margin=-0.0031)
MET = Outcome(LIMIT, "met", value=0.045, margin=0.25)
UNTOLD = Outcome(LIMIT, "unknown", reason="200 samples; a p99 needs 368")


@pytest.mark.parametrize(
    ("outcome", "cells"),
    [
        (MISSED, ["missed by 0.31%: itl.p99", "60.19"]),
        (MET, ["met by 25%", "45.00"]),
        (UNTOLD, ["unknown: itl.p99", "n/a"]),
        (
            Outcome("steady queue", "missed", reason="2 requests were waiting at first, 90 at the end"),
            ["missed: steady queue", "n/a"],
        ),
    ],
)
def test_with_limits_the_table_shows_what_is_limited_and_the_margin(tmp_path, outcome, cells):
    points = [point("a", 0.1, outcomes=[outcome])]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": [LIMIT]}, points, points, is_complete=True)
    assert found.columns[:3] == ["router_mode", "limits", "ITL p99"]
    assert found.rows[0][1:3] == cells
    assert ("use more workers, or a lower rate (--rate-scale)." in found.verdict) is ("steady queue" in cells[0])
    with (tmp_path / "table.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert line[f"{outcome.limit}.state"] == outcome.state
    assert line[f"{outcome.limit}.margin"] == ("" if outcome.margin is None else str(outcome.margin))


def test_a_benchmark_of_a_growing_queue_advises_no_flag_that_bench_does_not_have(tmp_path):
    points = [point("rate=4", 0.1, outcomes=[Outcome("steady queue", "missed", reason="it grew")], rate=4)]
    manifest = MANIFEST | {"kind": "bench", "limits": [LIMIT], "sweep": {"find": None, "axis": "rate"}}
    found = sweep_report.write(tmp_path, manifest, points, points, is_complete=True)
    assert ("steady queue missed" in found.verdict, "--rate-scale" in found.verdict) == (True, False)


@pytest.mark.parametrize(
    ("outcomes", "answer"),
    [
        ([MISSED, MET], "1 of 2 combinations meet every limit; workers 2 needs the fewest GPUs (8). "),
        (
            [MISSED, UNTOLD],
            "No combination is known to meet every limit; workers 1 comes closest: itl.p99 <= 60 ms missed by 0.31% (60.19 ms). ",
        ),
    ],
)
def test_with_limits_the_verdict_answers_the_question_first_on_the_terminal_too(tmp_path, outcomes, answer):
    points = [point(f"workers {n}", 0.1, outcomes=[one], workers=n) for n, one in enumerate(outcomes, 1)]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": [LIMIT]}, points, points, is_complete=True)
    assert found.verdict.startswith(f"{answer}No queue grew in any of the 2 combinations.")


def test_what_is_impossible_is_marked_beside_what_is_not(tmp_path):
    points = [Impossible("tp 1", {"tp": 1}, "weights of 140 GB do not fit"), point("tp 4", 0.1, tp=4)]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": [LIMIT]}, points, points, is_complete=True)
    assert found.rows[0] == ["1", "impossible", *["-"] * (len(found.columns) - 2)]
    assert found.rows[1][0] == "4"
    assert found.verdict.endswith("tp 1 is impossible: weights of 140 GB do not fit.")


@pytest.mark.parametrize(
    ("met", "verdict"),
    [
        (
            2.0,
            "a meets the limits up to rate 4, the highest of 2. b meets them up to at least 2 (+100% between the two).",
        ),
        (None, "a meets the limits up to rate 4, the highest of 2."),
    ],
)
def test_a_search_names_the_combination_that_meets_the_limits_farthest(tmp_path, met, verdict):
    rows = [
        found_at("a", "kv", "rate", 4.0, 8.0, point("a", 0.1)),
        found_at("b", "random", "rate", met, None, None),
    ]
    found = searched(tmp_path, rows)
    assert found.verdict == verdict
    assert found.rows[0] == ["kv", "4", "8", "-", "n/a", "4.00", "n/a", "n/a", "3.00"]
    assert found.rows[1] == ["random", "none" if met is None else "at least 2", *["-"] * 7]


def test_a_search_says_what_stands_in_the_way_and_by_how_much(tmp_path):
    over = point("kv", 0.1, outcomes=[MISSED])
    none = searched(tmp_path / "1", [found_at("kv", "kv", "rate_scale", None, 0.1, None, over)])
    assert none.verdict == (
        "Nothing meets the limits. kv at rate_scale 0.1: itl.p99 <= 60 ms missed by 0.31% (60.19 ms)."
    )
    met = point("kv", 0.1, outcomes=[MET])
    fewest = searched(tmp_path / "2", [found_at("kv", "kv", "workers", 3, 2, met, over, "lowest")], [LIMIT])
    assert fewest.title == "Lowest workers that meets the limits"
    assert fewest.verdict == (
        "kv meets the limits from workers 3 on. At 2: itl.p99 <= 60 ms missed by 0.31% (60.19 ms)."
    )
    assert fewest.rows == [["kv", "3", "2", "missed by 0.31%: itl.p99", "45.00", "4.00", "n/a", "n/a", "3.00"]]


def test_combinations_that_meet_the_limits_alike_are_named_together(tmp_path):
    rows = [found_at(name, name, "workers", 2, 1, point(name, 0.1), None, "lowest") for name in ("kv", "random")]
    assert searched(tmp_path, rows).verdict == "All 2 meet the limits from workers 2 on."


def test_a_search_in_which_all_points_are_too_short_to_tell_found_no_miss(tmp_path):
    short = point("kv", 0.1, outcomes=[UNTOLD])
    found = searched(tmp_path, [found_at("kv", "kv", "workers", None, 64, None, short, "lowest")], [LIMIT])
    said = "kv at workers 64: itl.p99 <= 60 ms not known: 200 samples; a p99 needs 368."
    assert found.verdict == f"It is not known whether the limits are met. {said}"


def test_a_search_says_why_one_of_several_combinations_is_impossible(tmp_path):
    none = Impossible("num_gpu_blocks 20", {"router_mode": "kv", "rate": 0.1}, "request 0 does not fit")
    rows = [
        found_at("num_gpu_blocks 20", "kv", "rate", None, 0.1, None, none),
        found_at("num_gpu_blocks 2000", "kv", "rate", 4.0, None, point("num_gpu_blocks 2000", 0.1, outcomes=[MET])),
    ]
    found = searched(tmp_path, rows)
    assert found.rows[0][1:4] == ["none", "0.1", "impossible"]
    assert found.verdict.endswith("num_gpu_blocks 20 is impossible: request 0 does not fit.")


def test_many_impossible_points_are_named_by_their_reasons(tmp_path):
    points = [Impossible(f"tp {n}", {"tp": n}, "no room" if n < 7 else "not whole") for n in range(1, 8)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict == "tp 1; tp 2; tp 3; tp 4 and 2 more are impossible: no room. tp 7 is impossible: not whole."


def test_the_end_of_a_search_is_no_answer(tmp_path):
    best = point("kv", 0.1, outcomes=[MET])
    assert searched(tmp_path / "1", [found_at("kv", "kv", "rate", 64.0, None, best)]).rows[0][1] == "at least 64"
    lowest = searched(tmp_path / "2", [found_at("kv", "kv", "workers", 4, None, best, sense="lowest")])
    assert lowest.rows[0][1] == "at most 4"


ALONE = [Outcome(LIMIT, "met", value=value, margin=1 - value / 0.06) for value in (0.0585, 0.0595, 0.0605)]


def test_what_is_limited_has_an_interval_over_repeats(tmp_path):
    whole = Outcome(LIMIT, "met", value=0.0597, margin=0.005).over_repeats(ALONE)
    assert whole.interval == pytest.approx((0.0597 - 0.002484, 0.0597 + 0.002484), abs=1e-6)  # 4.303 * 1 ms / sqrt(3)
    assert whole.is_open
    assert str(whole) == "met by 0.5% (59.7 ms [57.22, 62.18], which includes the limit)"
    points = [point("a", 0.1, outcomes=[whole])]
    found = sweep_report.write(tmp_path, MANIFEST | {"limits": [LIMIT]}, points, points, is_complete=True)
    assert found.rows[0][1:3] == ["met by 0.5%~", "59.70 [57.22, 62.18]"]
    assert found.verdict.endswith("~: the 95% interval includes the limit, so more repeats could change the result.")
    with (tmp_path / "table.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert [line[f"{LIMIT}.interval.{end}"][:7] for end in ("low", "high")] == ["0.05721", "0.06218"]
    (kept,) = json.loads((tmp_path / "sweep.json").read_text())["summary"]["points"]
    assert kept["outcomes"][0]["interval"] == list(whole.interval)


def test_repeats_that_are_alike_or_too_few_or_unknown_give_no_doubt():
    one = Outcome(LIMIT, "met", value=0.0597, margin=0.005)
    assert one.over_repeats([one]) == one
    assert one.over_repeats([one, Outcome(LIMIT, "unknown", reason="too few")]) == one
    alike = one.over_repeats([one, one])
    assert (alike.interval, alike.is_open) == ((0.0597, 0.0597), False)
    none = Outcome("a", "missed", value=0.0, margin=-1.0, is_share=True)
    assert not none.over_repeats([none, none]).is_open


def test_a_search_has_an_interval_over_repeats(tmp_path):
    row = found_at("kv", "kv", "rate", 25.1, 25.8, point("kv", 0.1, outcomes=[MET]))
    found = searched(tmp_path, [structs.replace(row, interval=(23.9, 26.2))])
    assert found.rows[0][1:3] == ["25.1 [23.9, 26.2]", "25.8"]
    assert (
        found.verdict
        == "kv meets the limits up to rate 25.1 [23.9, 26.2]. The brackets show the 95% interval over the repeats."
    )
    with (tmp_path / "table.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["met"], line["interval.low"], line["interval.high"]) == ("25.1", "23.9", "26.2")


def test_a_search_that_was_interrupted_says_how_far_it_came(tmp_path):
    manifest = MANIFEST | {"sweep": {"find": "rate"}, "limits": [LIMIT]}
    some = structs.replace(found_at("kv", "kv", "rate", 4.0, 8.0, point("kv", 0.1)), is_at_end=True, is_over=False)
    none = structs.replace(found_at("b", "random", "rate", None, None, None), is_over=False)
    found = sweep_report.write(tmp_path, manifest, [some, none], [], is_complete=False)
    assert [row[1] for row in found.rows] == ["at least 4", "not known"]
    assert found.verdict.startswith("kv meets the limits up to rate at least 4. The sweep was interrupted;")
    nothing = sweep_report.write(tmp_path, manifest, [none], [], is_complete=False)
    assert (
        nothing.verdict
        == "No point is finished yet. The sweep was interrupted; run the same command again to resume it."
    )


def test_a_sweep_that_was_interrupted_is_compared_by_what_is_known(tmp_path):
    first = swept(tmp_path / "a", point("kv 2", 0.2, router_mode="kv", workers=2))
    second = swept(tmp_path / "b", point("random 2", 0.1, router_mode="random", workers=2), is_complete=False)
    third = swept(tmp_path / "c", is_complete=False)
    _, found = sweep_report.combine([first, second, third], tmp_path / "every")
    assert not found.is_complete
    assert [row[0] for row in found.rows] == ["kv", "random"]
    assert found.verdict.endswith(f" {second}, {third}: interrupted, so incomplete.")
    assert json.loads((tmp_path / "every" / "sweep.json").read_text())["summary"]["is_complete"] is False


def test_a_point_is_kept_as_json():
    made = point("a", 0.1, workers=2)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Point | Impossible) == made


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
    assert [(row["changes.prefill_workers"], row["split.transfer"], row["ttst.mean"]) for row in rows] == [
        ("aggregated", "", "0.2"), ("1", "0.025", "0.11"),
    ]  # fmt: skip
    assert "Where does TTFT go?" in (tmp_path / "report.html").read_text()
    (_, kept) = json.loads((tmp_path / "sweep.json").read_text())["summary"]["points"]
    assert (kept["split"]["transfer"], kept["ttst"]["mean"]) == (0.025, 0.11)


def test_a_search_says_where_ttft_goes_at_the_highest_value_of_each(tmp_path):
    best = apart("b", router_mode="random")
    rows = [
        found_at("a", "kv", "rate", None, 0.1, None),
        found_at("b", "random", "rate", 2.0, 4.0, best),
    ]
    found = searched(tmp_path, rows)
    assert dict(found.split.rows)["a"] == ["-"] * 8
    assert dict(found.split.rows)["b"][3] == "25.00"


def test_a_search_shows_its_settings_in_the_order_in_which_they_were_given():
    names = [f"setting_{letter}" for letter in "qwertyuiop"]
    changes = dict.fromkeys(names, 1) | {"router_mode": "kv"}
    row = SearchResult("kv", changes, "rate_scale", "highest", None, None, False, None, None)
    manifest = MANIFEST | {"sweep": {"find": "rate_scale"}}
    assert sweep_table.lay_out([row], manifest, is_complete=True).columns[:11] == ["router_mode", *names]


def test_a_sweep_says_what_came_of_drafts_and_where_they_pay_once_for_all_loads(tmp_path):
    use = DraftUse("workers", 100, 200, (80, 40), 1.0, (Gain(1, 2.0), Gain(64, 0.9)))
    points = [
        structs.replace(
            point(
                f"num_speculative_tokens {count}, concurrency {load}",
                0.1,
                num_speculative_tokens=count,
                concurrency=load,
                **({"acceptance_length": 2.2} if count else {}),
            ),
            drafts=[structs.replace(use, sequences=float(load))] if count else [],
            throughput=Throughput(4.0, 100.0 * load * (1.5 if count and load == 1 else 1)),
        )
        for count in (0, 2)
        for load in (1, 64)
    ]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.drafts.rows == [
        ("num_speculative_tokens 2, concurrency 1", ["1.50x", "1.0", "200", "60%", "2.20", "80 40%"]),
        ("num_speculative_tokens 2, concurrency 64", ["1.00x", "64.0", "200", "60%", "2.20", "80 40%"]),
    ]
    assert found.gains.columns == ["1", "64"]
    assert found.gains.rows == [("num_speculative_tokens 2", ["2.00x", "0.90x"])]
    text = (tmp_path / "report.html").read_text()
    assert "What came of drafts?" in text
    assert "Where does speculation pay?" in text
    with (tmp_path / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["drafts.workers.accepted.2"] for line in lines] == ["", "", "40", "40"]


def at_load(count, load, mean):
    name = f"num_speculative_tokens {count}, concurrency {load}"
    return point(name, mean, num_speculative_tokens=count, concurrency=load)


def test_latencies_are_compared_at_the_same_load_only(tmp_path):
    points = [at_load(0, 1, 0.1), at_load(3, 1, 0.05), at_load(0, 64, 1.0), at_load(3, 64, 2.0), at_load(5, 64, 3.0)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict.endswith(
        " Lowest mean E2E latency at the same load: num_speculative_tokens 3 at 1 of 2 loads, num_speculative_tokens 0 at 1."
    )


def test_of_points_at_different_loads_the_throughput_is_compared(tmp_path):
    points = [point(f"concurrency {load}", load / 10, concurrency=load) for load in (1, 64)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict.startswith("Throughput is highest at 1 stream (400 tokens/s, median TTFT 100.0 ms)")
    points = [point(f"start_s {start}", start / 10, start_s=start) for start in (1, 64)]
    found = sweep_report.write(tmp_path, MANIFEST, points, points, is_complete=True)
    assert found.verdict.endswith(" They differ in what is sent, so their latencies are not compared.")
