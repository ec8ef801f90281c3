"""The charts of sweeps and searches: what each shows, in which order and colours."""

import pytest
from msgspec import structs

from reports.charts import sweep, tiers
from reports.figures.metrics import Throughput
from reports.figures.outcomes import Outcome
from reports.figures.slo import parse_slo
from reports.sweep.points import SearchResult
from tests.reports.test_sweep_report import point
from tests.reports.test_tier_report import sized

LIMIT = "ttft.p99 <= 2000 ms"
LIMITS = [parse_slo(LIMIT)]


def tried(mode, workers, ttft_s):
    outcome = Outcome(LIMIT, "met" if ttft_s <= 2 else "missed", ttft_s, 1 - ttft_s / 2)
    one = point(f"{mode} {workers}", ttft_s / 2, outcomes=[outcome], router_mode=mode, workers=workers)
    return structs.replace(one, workers=workers, gpus=workers)


def drawn(points):
    return sweep.charts(sweep.swept(points, LIMITS), [])


def test_the_chart_of_a_setting_that_counts_asks_for_its_number():
    points = [point(f"{count}", 1.0 + count, num_speculative_tokens=count) for count in (1, 3)]
    chart = sweep.charts(sweep.swept(points, []), [])["limits"]
    assert chart.title == "What does the number of speculative tokens change?"


def test_a_limit_is_drawn_and_the_fewest_workers_within_it_have_a_ring():
    chart = drawn([tried("kv", workers, 6.0 / workers) for workers in (1, 2, 3, 4)])["limits"]
    assert chart.title == "How many workers meet the limits?"
    assert "limit 2 s" in [text.text for text in chart.canvas.texts]
    axes = chart.panels[0].axes
    assert [rule.value for rule in axes.rules] == [2000]
    (ring,) = (line for line in axes.lines if line.size == 13)
    assert (ring.x.tolist(), ring.y.tolist()) == ([3], [2000])
    assert chart.description.endswith("Ring: the lowest number of workers that meets all limits (kv: 3).")


def test_limits_of_each_request_are_one_share_with_its_limit():
    def within(workers):
        share = 1 - 0.1 / workers**3
        outcome = Outcome("ttft <= 300 ms in 99%", "met" if share >= 0.99 else "missed", share, share / 0.99 - 1)
        return structs.replace(tried("kv", workers, 1.0), outcomes=[structs.replace(outcome, is_share=True)])

    points = [within(workers) for workers in (1, 2, 3)]
    chart = sweep.charts(sweep.swept(points, [parse_slo("ttft <= 300ms")]), [])["limits"]
    assert "requests within their limits" in [text.text for text in chart.canvas.texts]
    assert "limit 99%" in [text.text for text in chart.canvas.texts]
    assert chart.description.endswith("(kv: 3).")


def test_a_constant_is_not_put_under_a_magnifying_glass():
    """Any number of workers puts out what comes in: 71.2 to 71.4 tokens/s."""
    points = [
        structs.replace(tried("kv", workers, 6.0 / workers), throughput=Throughput(4.0, 71.2 + workers / 20))
        for workers in (1, 2, 3, 4)
    ]
    assert "throughput" not in drawn(points)


def test_figures_that_differ_little_have_whole_numbers_at_their_axes():
    points = [
        structs.replace(tried("kv", workers, 6.0 / workers), throughput=Throughput(4.0, 1160.0 + workers * 25))
        for workers in (1, 2, 3, 4)
    ]
    axes = drawn(points)["throughput"].panels[0].axes
    assert not [label for label in (*axes.x.labels, *axes.y.labels) if "e" in label or "+" in label]
    assert all(1150 < float(label.replace(",", "")) < 1290 for label in axes.y.labels)


def test_what_all_points_have_alike_has_no_chart():
    points = [structs.replace(tried("kv", workers, 1.0), throughput=Throughput(4.0, 400.0)) for workers in (1, 2)]
    assert drawn(points) == {}


def test_lines_have_the_order_of_the_table():
    points = [tried(mode, workers, 6.0 / workers) for mode in ("random", "kv") for workers in (2, 1)]
    assert list(sweep.swept(points, LIMITS).lines) == ["random", "kv"]


def test_a_search_has_one_key_for_all_its_charts_in_the_order_of_its_table():
    points = [tried("kv", 2, 3.0), tried("kv", 3, 2.0), tried("random", 4, 1.5), tried("random", 3, 2.5)]
    rows = [
        SearchResult("random", {"router_mode": "random"}, "workers", "lowest", 4, 3, False, points[2], points[3]),
        SearchResult("session", {"router_mode": "session"}, "workers", "lowest", None, None, False, None, None),
        SearchResult("kv", {"router_mode": "kv"}, "workers", "lowest", 3, 2, False, points[1], points[0]),
    ]
    found = sweep.of_search(rows, points, LIMITS)
    assert {arm: entry.place for arm, entry in found.key.items()} == {"random": 0, "session": 1, "kv": 2}
    charts = sweep.charts(found, rows)
    for name in ("found", "limits"):
        arms = {series.label.split()[0]: series.arm for panel in charts[name].panels for series in panel.series}
        assert arms == {"random": 0, "kv": 2}, name


def test_hits_by_tier_have_a_panel_for_each_line_and_a_bar_for_each_size():
    swept = sweep.swept([sized(mode, size, 90.0) for mode in ("kv", "random") for size in (64, 0)], [])
    chart = tiers.charts(swept)["hits_by_tier"]
    assert len(chart.panels) == 2
    shown = [(bar.x + 0.31, round(bar.y), round(bar.height)) for bar in chart.panels[0].axes.patches]
    assert shown == [(0, 0, 30), (0, 30, 70), (1, 0, 30), (1, 30, 20), (1, 50, 50)]


def test_hits_by_tier_have_a_row_for_each_combination_where_no_number_is_varied():
    swept = sweep.swept([sized(mode, 16, 90.0) for mode in ("kv", "random")], [])
    (panel,) = tiers.charts(swept)["hits_by_tier"].panels
    assert len(panel.axes.y.ticks) == 2
    assert "tier_savings" not in tiers.charts(swept)


def test_what_tiers_save_is_a_curve_from_nothing_at_the_smallest_size():
    points = [sized("kv", 64, 80.0, 0.3), sized("kv", 0, 100.0, 0.5), sized("kv", 16, 105.0, 0.45, is_stable=False)]
    chart = tiers.charts(sweep.swept(points, []))["tier_savings"]
    of_ttft, of_prefill, of_gpus = chart.panels
    assert of_prefill.series[0].y == pytest.approx([0, 2, 2])
    assert of_ttft.series[0].y == pytest.approx([0, 50, 200])
    assert (of_gpus.series[0].x, of_gpus.series[0].y) == ([0, 16, 64], [0, -5, 20])
    (hollow,) = [line for line in of_gpus.axes.lines if line.face == "none"]
    assert hollow.x.tolist() == [16]
    assert chart.description.startswith("Against kv offloading size 0; higher is better.")
    assert "The values are from one run of 60 requests each." in chart.description


def test_savings_have_intervals_over_repeats():
    points = [sized("kv", size, 100.0 - size) for size in (0, 16)]
    points = [
        structs.replace(
            one, spent=[*one.spent, structs.replace(one.spent[0], gpu_s=110.0 - one.changes["kv_offloading_size"] / 2)]
        )
        for one in points
    ]
    chart = tiers.charts(sweep.swept(points, []))["tier_savings"]
    pale = [line for line in chart.panels[-1].axes.lines if line.alpha == 0.35 and len(line.x)]
    assert pale[-1].y.tolist() == pytest.approx([12 - 12.706 * 4, 12 + 12.706 * 4], rel=1e-3)  # of 16 and 8
    assert chart.description.endswith("Pale: 95% intervals over the repeats.")


def test_a_sweep_of_something_else_does_not_say_what_tiers_save():
    points = [structs.replace(sized("kv", 16, 90.0), changes={"router_mode": "kv", "workers": n}) for n in (1, 2)]
    assert list(tiers.charts(sweep.swept(points, []))) == ["hits_by_tier"]
