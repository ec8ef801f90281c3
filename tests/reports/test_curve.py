"""Load curves: where throughput stops growing, and what holds the limits."""

import pytest
from msgspec import structs

from reports.charts import sweep as charts
from reports.figures.metrics import Throughput
from reports.figures.outcomes import Outcome
from reports.figures.slo import parse_slo
from reports.sweep import curve
from reports.sweep.points import FoundLoad, Quantiles
from tests.reports.test_sweep_report import point

NOTHING = Quantiles(None, None, None, None)
LIMIT = "ttft.p95 <= 500 ms"


def at(load, rate, ttft=0.1, *, state=None, axis="concurrency", **changes):
    outcomes = [Outcome(LIMIT, state, ttft, 1 - ttft / 0.5)] if state else []
    one = point(f"{axis} {load}", ttft, outcomes=outcomes, **{axis: load}, **changes)
    rates = structs.replace(one.throughput, window_output_tokens_per_s=float(rate), window_requests_per_s=rate / 10)
    return structs.replace(one, throughput=rates)


GROWING = [at(1, 100, 0.05), at(4, 390, 0.06), at(16, 1000, 0.1), at(64, 1040, 0.9)]


def test_the_knee_is_the_lowest_load_with_nearly_the_highest_throughput():
    assert curve.knee([100, 390, 1000, 1040]) == 2
    assert curve.knee([0, 0]) is None
    (found,) = curve.curves(GROWING[::-1])
    assert (found.name, found.axis, [found.at(one) for one in found.points]) == ("", "concurrency", [1, 4, 16, 64])
    assert curve.verdict([found], has_limits=False) == (
        "16 streams give 96% of the highest throughput (1,000 tokens/s of 1,040) at 11% of the TTFT of 64 streams (median 100.0 ms "
        "instead of 900.0 ms)."
    )


def sampled(load, state, ttft, interval):
    """Make a load whose p95 has an interval."""
    return structs.replace(at(load, 10 * load), outcomes=[Outcome(LIMIT, state, ttft).within(interval, 0.5)])


LIMITED = [
    sampled(1, "met", 0.1, (0.1, 0.2)),
    structs.replace(at(2, 20), outcomes=[Outcome(LIMIT, "unknown", reason="few")]),
    sampled(4, "met", 0.3, (0.2, 0.4)),
    sampled(8, "met", 0.45, (0.3, 0.6)),
    sampled(12, "missed", 0.55, (0.4, 0.7)),
    sampled(16, "missed", 0.9, (0.7, 1.1)),
]


def test_the_interval_of_the_highest_load_within_the_limits_ends_where_each_load_is_certain():
    (found,) = curve.curves(LIMITED)
    assert found.found == FoundLoad("", "concurrency", 8, 12, (4, 16))
    assert curve.verdict([found], has_limits=True).startswith(
        "The limits hold up to 8 streams (80 tokens/s; 95% interval 4 to 16); at 12 streams: "
    )


@pytest.mark.parametrize(
    ("points", "interval", "said"),
    [
        (LIMITED[3:], (None, 16), "; less than 16 for certain"),
        (LIMITED[:5], (4, None), "; at least 4 for certain"),
        (LIMITED[3:5], (None, None), ""),
    ],
)
def test_an_end_of_the_interval_that_no_load_shows_is_not_known(points, interval, said):
    (found,) = curve.curves(points)
    assert found.found.interval == interval
    assert f"(80 tokens/s{said}); at 12 streams" in curve.verdict([found], has_limits=True)


def test_a_load_whose_figure_has_no_interval_makes_nothing_certain():
    (found,) = curve.curves([at(1, 10, 0.1, state="met"), at(4, 40, 0.9, state="missed")])
    assert found.found == FoundLoad("", "concurrency", 1, 4, (None, None))
    failed = structs.replace(at(4, 40), outcomes=[Outcome(LIMIT, "missed", reason="too many requests failed")])
    (found,) = curve.curves([at(1, 10, 0.1, state="met"), failed])
    assert found.found.interval == (None, 4)


def test_of_a_rate_it_is_said_up_to_where_it_is_answered_as_fast_as_it_is_sent():
    points = [at(8, 80, axis="rate"), at(16, 100, axis="rate")]  # 10 of 16 a second
    points = [structs.replace(one, offered_per_s=float(one.changes["rate"])) for one in points]
    (found,) = curve.curves(points)
    assert curve.verdict([found], has_limits=False) == (
        "Requests are answered as fast as they are sent up to 8 requests/s (80 tokens/s); of 16 requests/s, 10 are answered."
    )
    (found,) = curve.curves(points[1:], axis="rate")
    assert curve.verdict([found], has_limits=False) == (
        "No rate tried is answered as fast as it is sent: of 16 requests/s, 10 are answered."
    )


def test_a_single_load_is_said_as_it_is():
    (found,) = curve.curves(GROWING[:1], axis="concurrency")
    assert curve.verdict([found], has_limits=False) == "1 stream: 100 tokens/s, median TTFT 50.00 ms."


def test_throughput_that_still_grows_has_no_highest():
    (found,) = curve.curves(GROWING[:2])
    assert curve.verdict([found], has_limits=False) == (
        "Throughput still grew at 4 streams, the highest load tried (390 tokens/s), so its highest is not known."
    )


def test_what_is_not_known_below_a_miss_is_said():
    unknown = [
        structs.replace(at(load, 10 * load), outcomes=[Outcome(LIMIT, "unknown", reason="8 samples; a p95 needs 72")])
        for load in (1, 2)
    ]
    missed = at(8, 80, 0.7, state="missed")
    (found,) = curve.curves([*unknown, missed])
    assert curve.verdict([found], has_limits=True).startswith(
        "No load tried is known to hold the limits; at 8 streams: ttft.p95 <= 500 ms missed by 40% (700 ms). "
        "It is not known whether they hold at 1 and 2 streams (8 samples; a p95 needs 72)."
    )
    (found,) = curve.curves([unknown[0], at(4, 40, state="met"), missed])
    assert curve.verdict([found], has_limits=True).startswith(
        "The limits hold up to 4 streams (40 tokens/s); at 8 streams: ttft.p95 <= 500 ms missed by 40% (700 ms). "
        "It is not known whether they hold at 1 stream"
    )


def failing(load, **changes):
    return structs.replace(
        at(load, 9000, **changes), notes=["most failed"], outcomes=[Outcome(curve.FAILED, "missed", reason="9 of 10")]
    )


def test_loads_that_are_not_valid_end_a_curve_and_are_said():
    points = [at(1, 100, state="met"), at(4, 400, state="met"), failing(16)]
    (found,) = curve.curves(points)
    assert found.highest is points[1]
    assert curve.verdict([found], has_limits=False) == (
        "Throughput still grew at 4 streams, the highest valid load below 16 streams (400 tokens/s), so its highest is not known."
    )
    assert curve.verdict([found], has_limits=True).startswith(
        "The limits hold up to 4 streams (400 tokens/s; less than 16 for certain); at 16 streams: failed requests missed: 9 of 10."
    )
    assert (found.found.load, found.found.missed_at) == (4, 16)


def test_throughputs_are_compared_at_a_load_of_all_if_one_endpoint_was_gone_beyond_it():
    whole = [at(load, rate, endpoint="a") for load, rate in ((1, 100), (4, 400), (16, 500), (32, 501))]
    found = curve.curves([*whole, at(1, 90, endpoint="b"), failing(4, endpoint="b")], axis="concurrency")
    assert curve.verdict(found, has_limits=False).endswith(
        "Throughput at 1 stream, the highest load that is valid for all: a 100 tokens/s, b 90 (-10%)."
    )


WHOLE = [
    structs.replace(
        one, ttft_sched=NOTHING, itl=NOTHING, e2e_sched=Quantiles(one.ttft_sched.mean, *[one.ttft_sched.mean] * 3)
    )
    for one in GROWING
]


def test_of_answers_that_come_whole_the_e2e_latency_is_said():
    (found,) = curve.curves(WHOLE)
    assert curve.verdict([found], has_limits=False).endswith(
        "at 11% of the E2E latency of 64 streams (median 100.0 ms instead of 900.0 ms)."
    )


def test_the_highest_load_within_the_limits_is_below_the_first_that_misses_one():
    points = [
        at(1, 100, state="met"),
        at(4, 390, state="met"),
        at(8, 500, 0.7, state="missed"),
        at(16, 1000, state="met"),
    ]
    (found,) = curve.curves(points)
    assert (found.held, found.missed) == (points[1], points[2])
    assert curve.verdict([found], has_limits=True).startswith(
        "The limits hold up to 4 streams (390 tokens/s); at 8 streams: ttft.p95 <= 500 ms missed by 40% (700 ms)."
    )
    (found,) = curve.curves(points[:2])
    assert curve.verdict([found], has_limits=True).startswith("The limits hold at every load tried, up to 4 streams")
    (found,) = curve.curves([at(4, 390, 0.7, state="missed"), at(8, 390, 0.8, state="missed")])
    assert curve.verdict([found], has_limits=True).startswith("No load tried holds the limits; at 4 streams:")


def test_endpoints_have_a_curve_each():
    points = [at(load, rate, endpoint=name) for name, rate in (("a", 100), ("b", 80)) for load in (1, 4)]
    found = curve.curves(points)
    assert [one.name for one in found] == ["a", "b"]
    assert curve.verdict(found, has_limits=False).endswith("Highest throughput: a 100 tokens/s, b 80 (-20%).")


@pytest.mark.parametrize("changes", [{"max_num_seqs": 8}, {"arrival": "gamma"}])
def test_points_that_differ_in_other_settings_are_no_curve(changes):
    assert curve.curves([at(1, 100), at(4, 390, **changes)]) == []
    assert curve.curves([point("a", 0.1, workers=2), point("b", 0.1, workers=4)]) == []


def test_loads_are_said_with_their_unit():
    assert [curve.load_in_words("concurrency", load) for load in (1, 2048)] == ["1 stream", "2,048 streams"]
    assert [curve.load_in_words("rate", load) for load in (1, 2.5)] == ["1 request/s", "2.5 requests/s"]


def test_the_first_chart_shows_latency_against_throughput_with_knee_and_limits():
    times = Quantiles(0.1, 0.1, 0.2, None, 0.3)
    points = [structs.replace(one, ttft_sched=times, itl=times) for one in GROWING]
    drawn = charts.charts(charts.swept(points, [parse_slo(LIMIT)]), [])
    assert next(iter(drawn)) == "curve"
    ttft, itl = drawn["curve"].panels
    assert [series.label for series in ttft.series] == ["all p50", "all p95"]
    assert ttft.series[1].y == [300.0] * 4
    assert ttft.series[0].x == [100.0, 390.0, 1000.0, 1040.0]
    text = drawn["curve"].canvas.svg("c", lambda colour: colour)
    assert "limit on p95: 500 ms" in text
    assert len(ttft.axes.rules) == 1
    assert len(itl.axes.rules) == 0


def test_answers_without_tokens_have_a_curve_of_answers():
    points = [
        structs.replace(one, throughput=Throughput(4.0, None, 10.0 * one.changes["concurrency"], None))
        for one in GROWING[:2]
    ]
    points = [
        structs.replace(one, ttft_sched=NOTHING, itl=NOTHING, e2e_sched=Quantiles(0.1, 0.1, 0.2, None))
        for one in points
    ]
    (found,) = curve.curves(points)
    assert curve.verdict([found], has_limits=False).startswith(
        "Throughput still grew at 4 streams, the highest load tried (40 requests/s)"
    )
    drawn = charts.charts(charts.swept(points, []), [])
    assert [panel.x_unit for panel in drawn["curve"].panels] == ["requests/s"]


def test_the_edge_of_the_limits_is_below_the_first_that_is_missed():
    assert curve.edge_of_limits([True, None, False, True]) == (0, 2)
    assert curve.edge_of_limits([None, True]) == (1, None)
    assert curve.edge_of_limits([False]) == (None, 0)
