"""Gates: limits hold for every arm, comparisons against the baseline, and what cannot be judged fails by name."""

import dataclasses
from xml.etree import ElementTree

import numpy as np
import pytest
from msgspec import structs

from reports import gate, junit
from reports.figures import slo
from reports.gate import PLANS, POINTS, Basis, parse_gate
from reports.summarize import summarize
from reports.sweep import table as sweep_table
from reports.sweep.best_point import series
from reports.sweep.points import Impossible, Quantiles
from reports.verdicts.gates import GateResult
from tests.reports.runs import run
from tests.reports.test_ranking import arm
from tests.reports.test_sweep_report import MANIFEST, found_at, point


def judged(summary, *texts, left_out=()):
    return [result.text for result in gate.of_summary(summary, [parse_gate(text) for text in texts], left_out)]


def test_a_limit_is_for_every_arm_and_a_comparison_for_all_but_the_baseline():
    summary = summarize([run("a"), run("b")])
    assert judged(summary, "ttft.mean > 1s") == ["ttft.mean > 1s: a is at 1.5 s", "ttft.mean > 1s: b is at 1.5 s"]
    assert [text[:22] for text in judged(summary, "ttft.mean > +5%")] == ["ttft.mean > +5%: b is "]


@pytest.mark.parametrize(
    ("text", "compares"),
    [
        ("attainment < 95%", False),
        ("hit_share < 40%", False),
        ("failed > 1%", False),
        ("hit_share < -5%", True),
        ("ttft.p90 > 5%", True),
        ("throughput < -3%", True),
        ("ttft.p90 > +50ms", True),
        ("ttft.p90 > 50ms", False),
        ("failed > +0", True),
    ],
)
def test_a_sign_makes_a_comparison_and_so_does_a_share_of_what_is_none(text, compares):
    assert gate.is_comparison(parse_gate(text)) is compares


def test_shares_are_limited_as_they_are():
    summary = summarize([run("a", ttft=[1.0, 3.0])], [slo.parse_slo("ttft <= 2s")])
    assert judged(summary, "attainment < 95%", "hit_share < 20%") == [
        "attainment < 95%: a is at 50%",
        "hit_share < 20%: a is at 25%",
    ]


def test_a_change_in_seconds_is_held_against_the_baseline():
    summary = summarize([run("a"), run("b", ttft=[1.75, 2.75])])
    assert judged(summary, "ttft.mean > +500ms") == [
        "ttft.mean > +500ms: b is at +750 ms, 95% interval +750 to +750 ms"
    ]


def test_failed_requests_count_as_infinite_in_a_limit():
    times = {"done_s": [None] * 20 + [100.0] * 60, "error": ["x"] * 20 + [""] * 60}
    summary = summarize([run("a", ttft=[1.0] * 80, **times)])
    (result,) = gate.of_summary(summary, [parse_gate("ttft.p90 > 2s")])
    assert (result.state, result.text) == ("failed", "ttft.p90 > 2s: a is at infinity, because requests failed")
    assert judged(summary, "failed > 1%") == ["failed > 1%: a is at 25%"]


def test_an_arm_that_is_quick_because_it_refuses_does_not_pass():
    count, slow = 400, np.where(np.arange(400) % 2, 0.1, 2.0)
    errors = ["" if number % 2 else "too long" for number in range(count)]
    base = arm("a", slow)
    quick = arm("b", np.where(np.arange(count) % 2, 0.15, np.nan), error=errors)
    (text,) = judged(summarize([base, quick]), "ttft.mean > +5%")
    assert text == (
        "ttft.mean > +5%: b cannot be compared: 200 of 400 requests failed in b, so its times are those of the rest"
    )


def test_an_arm_whose_queue_grew_is_not_judged_beside_others():
    ttft = np.linspace(0.1, 300, 400)
    growing = arm("b", ttft, admitted_s=np.arange(400) + ttft)
    (text,) = judged(summarize([arm("a", np.full(400, 500.0)), growing]), "ttft.mean > +5%")
    assert "cannot be compared: b could not keep up" in text
    (text,) = judged(summarize([growing, arm("c", np.full(400, 1.0))]), "ttft.p90 > +5%")
    assert "c cannot be compared: b could not keep up" in text


def test_a_change_is_that_of_the_requests_that_both_answered():
    errors = [""] * 399 + ["lost"]
    base = arm("a", np.append(np.full(399, 1.0), 400.0))
    (text,) = judged(summarize([base, arm("b", np.append(np.full(399, 1.1), np.nan), error=errors)]), "ttft.mean > +5%")
    assert text.startswith("ttft.mean > +5%: b is at +10.0%, ")


def test_what_cannot_be_judged_fails_by_name():
    one = summarize([run("a")])
    assert gate.of_summary(one, [parse_gate("ttft.mean > +5%")]) == [
        GateResult(
            "",
            "ttft.mean > +5%",
            "failed",
            "ttft.mean > +5%: not judged, because it compares with the first, but there is only one; limit its value "
            "instead",
        )
    ]
    summary = summarize([run("a", cached_tokens=[None, None]), run("b")])
    assert judged(summary, "hit_share < -5%") == [
        "hit_share < -5%: b cannot be compared: a has no such value (too few requests?)"
    ]
    assert judged(summary, "failed > +5%") == ["failed > +5%: b cannot be compared in %: a is at 0"]
    assert judged(one, "failed > 0", left_out=["TP 1 (too large)"])[1] == "failed > 0: left out: TP 1 (too large)"


def test_an_interrupted_run_does_not_pass():
    summary = summarize([run("a", is_complete=False), run("b")])
    assert [(result.state, result.text) for result in gate.of_summary(summary, [parse_gate("failed > 0")])] == [
        ("failed", "failed > 0: not judged, because it was interrupted")
    ]


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("throughput < 3s", gate.RUNS, "throughput is not a time; expected a number or %"),
        ("gpus > 3", gate.RUNS, "'gpus' is not a metric"),
        ("ttft.p95 > 2s", POINTS, "p95 is not kept; expected one of mean, p50, p90, p99"),
        (
            "ttft.p99 > 2s",
            PLANS,
            "fail_if 'ttft.p99 > 2s': a plan is only made of layouts within the limits on latencies",
        ),
        ("ttft > 2s", PLANS, "set them with --slo"),
        ("throughput < 2", PLANS, "'throughput' is not a metric; expected one of gpus, cost"),
        ("gpus > +10%", PLANS, "there is no baseline to compare with; expected a limit without a sign or %"),
        ("gpus", PLANS, "is not understood; expected something like 'gpus > 16' or 'cost > 40'"),
    ],
)
def test_what_a_command_cannot_judge_is_refused(text, kind, problem):
    with pytest.raises(ValueError) as refused:
        parse_gate(text, kind)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ttft.p90 > +5%", "compares with the first, but there is only one"),
        ("attainment < 95%", "needs runs with limits; set them with --slo"),
        ("found < 2", "is about what --find finds, or a benchmark with --slo; use one of them"),
    ],
)
def test_a_gate_that_could_never_be_judged_is_refused_before_the_run(text, problem):
    with pytest.raises(ValueError, match=problem):
        gate.refuse_idle([parse_gate(text, POINTS)], Basis(num_arms=1, has_limits=False))
    gate.refuse_idle([parse_gate(text, POINTS)], Basis(num_arms=2, has_limits=True, finds=True))


def changed(mean, low, high, *, verdict="worse", floor_s=None):
    """A comparison whose second arm differs from the first by so many % in mean TTFT, with that interval."""
    summary = summarize([run("a", ttft=[1.0, 1.0]), run("b", ttft=[1 + mean / 100] * 2)])
    known = summary.difference("b", "ttft_sched", "mean")
    assert known is not None
    difference = dataclasses.replace(known, low=low / 100, high=high / 100, verdict=verdict)
    floor = {} if floor_s is None else {"ttft_sched": {"mean": floor_s}}
    return structs.replace(summary, differences={"b": {"ttft_sched": {"mean": difference}}}, noise_floor=floor)


@pytest.mark.parametrize(
    ("limit", "change", "state"),
    [
        ("+0.5%", changed(0.8, -0.1, 0.9, verdict="equal"), "undecided"),
        ("+5%", changed(8, -3, 19, verdict="unstable"), "undecided"),
        ("+5%", changed(6, 4, 8), "failed"),  # more than noise, even though its interval includes the limit
        ("+5%", changed(6, 4, 8, verdict="unstable"), "failed"),
        ("+5%", changed(4, 2, 6), "undecided"),
        ("+5%", changed(4, -4, 6), "undecided"),
        ("+5%", changed(4, 3.5, 4.5), "passed"),
        ("+1%", changed(2, 1.5, 2.5, floor_s=0.03), "undecided"),  # two equal runs differ by 3%
        ("+1%", changed(2, 1.5, 2.5, floor_s=0.001), "failed"),
        ("+0%", changed(0, 0, 0), "passed"),
        ("-5%", changed(0, 0, 0), "failed"),  # it is not better by 5%, which noise does not excuse
        ("-5%", changed(0.5, -1, 2), "failed"),
        ("-5%", changed(-4, -9, 1), "undecided"),
        ("-5%", changed(-4.9, -5.1, -4.7), "failed"),
    ],
)
def test_a_change_over_the_limit_fails_unless_it_may_be_noise(limit, change, state):
    (result,) = gate.of_summary(change, [parse_gate(f"ttft.mean > {limit}")])
    assert result.state == state
    assert result.text.endswith(", which may be noise") is (
        state == "undecided" and change_of(result) > float(limit[:-1])
    )


def change_of(result):
    return float(result.text.partition(" is at ")[2].partition("%")[0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attainment < 95%", "needs runs with limits; set them with --slo or --slo-preset"),
        ("found < 2", "is about what --find finds, or a benchmark with --slo; use one of them"),
        ("ttft.mean > +5%", "compares with the first, but there is only one; limit its value instead"),
    ],
)
def test_what_is_missing_from_results_to_judge_is_said_by_name(text, why):
    said = f"{text}: not judged, because it {why}"
    assert of_sweep([point("2", 0.2, workers=2)], text) == [("failed", said)]
    if "found" not in text:
        (result,) = gate.of_summary(summarize([run("a")]), [parse_gate(text)])
        assert (result.state, result.text) == ("failed", said)


def of_sweep(rows, *texts, find=None, is_complete=True, left_out=()):
    sweep = sweep_table.lay_out(rows, MANIFEST | {"sweep": {"find": find}}, is_complete=is_complete)
    return [
        (one.state, one.text) for one in gate.of_sweep(sweep, [parse_gate(text, POINTS) for text in texts], left_out)
    ]


def test_every_point_of_a_sweep_is_judged_and_compared_with_the_first():
    rows = [point("2", 0.2, workers=2), point("4", 0.1, workers=4), Impossible("8", {"workers": 8}, "too many")]
    assert of_sweep(rows, "ttft.p50 > 150ms", "ttft.p50 > -40%") == [
        ("failed", "ttft.p50 > 150ms: 2 is at 0.2 s"),
        ("passed", "ttft.p50 > 150ms: 4 is at 0.1 s"),
        ("failed", "ttft.p50 > 150ms: 8 has no such value (impossible: too many)"),
        ("passed", "ttft.p50 > -40%: 4 is at -50.0%"),
        ("failed", "ttft.p50 > -40%: 8 has no such value (impossible: too many)"),
    ]
    assert of_sweep(rows[:1], "ttft.p99 > 1s", "failed > 0")[0][1].endswith("has no such value (too few requests?)")
    assert (
        of_sweep(rows[:1], "failed > 0", is_complete=False)[0][1]
        == "failed > 0: not judged, because it was interrupted"
    )


def test_failed_requests_of_a_point_count_as_infinite_in_a_limit():
    worst = Quantiles(None, 0.1, None, None)
    known = structs.replace(point("a", 0.1), ttft_sched=Quantiles(0.1, 0.1, 0.1, None), requests=100, failed=20)
    rows = [structs.replace(known, with_failures={"ttft_sched": worst})]
    assert of_sweep(rows, "ttft.mean > 1s", "ttft.p90 > 1s", "ttft.p50 > 1s", "failed > 1%") == [
        ("failed", "ttft.mean > 1s: a is at infinity, because requests failed"),
        ("failed", "ttft.p90 > 1s: a is at infinity, because requests failed"),
        ("passed", "ttft.p50 > 1s: a is at 0.1 s"),
        ("failed", "failed > 1%: a is at 20%"),
    ]


def test_what_a_search_found_is_judged_by_its_value_and_its_point():
    rows = [
        found_at("kv", "kv", "rate_scale", 2.0, 2.1, point("kv", 0.1)),
        found_at("random", "random", "rate_scale", 1.5, 1.6, point("random", 0.2)),
        found_at("lost", "lost", "rate_scale", None, 0.1, None),
    ]
    assert of_sweep(rows, "found < 1.8", "found < -20%", "e2e.mean > 150ms", find="rate_scale") == [
        ("passed", "found < 1.8: kv is at 2"),
        ("failed", "found < 1.8: random is at 1.5"),
        ("failed", "found < 1.8: lost has no such value (no value meets the limits)"),
        ("failed", "found < -20%: random is at -25.0%"),
        ("failed", "found < -20%: lost has no such value (no value meets the limits)"),
        ("passed", "e2e.mean > 150ms: kv is at 0.1 s"),
        ("failed", "e2e.mean > 150ms: random is at 0.2 s"),
        ("failed", "e2e.mean > 150ms: lost has no such value (no value meets the limits)"),
    ]


def of_two(*places):
    return [point(f"{sweep}/{workers}", mean, workers=workers, sweep=sweep) for sweep, workers, mean in places]


def test_points_of_several_sweeps_are_compared_with_the_same_settings_in_the_first():
    rows = of_two(("a", 2, 0.2), ("a", 4, 0.1), ("b", 2, 0.1), ("b", 4, 0.2))
    assert of_sweep(rows, "ttft.mean > +5%") == [
        ("passed", "ttft.mean > +5%: b/2 is at -50.0%"),
        ("failed", "ttft.mean > +5%: b/4 is at +100.0%"),
    ]


def test_a_point_that_only_one_of_two_sweeps_has_fails_a_comparison_but_no_limit():
    rows = of_two(("a", 2, 0.2), ("a", 4, 0.1), ("b", 2, 0.1), ("b", 8, 0.1))
    assert of_sweep(rows, "ttft.mean > +5%") == [
        ("passed", "ttft.mean > +5%: b/2 is at -50.0%"),
        ("failed", "ttft.mean > +5%: b/8 has no counterpart in a"),
        ("failed", "ttft.mean > +5%: a/4 has no counterpart in b"),
    ]
    assert {state for state, _ in of_sweep(rows, "ttft.mean > 1s")} == {"passed"}


def test_what_a_sweep_left_out_fails_by_name():
    assert of_sweep([point("2", 0.2)], "ttft.mean > 1s", left_out=["TP 3 (no)"])[1:] == [
        ("failed", "ttft.mean > 1s: left out: TP 3 (no)")
    ]


def sampled(sweep, times):
    table = dict.fromkeys(("ttft_sched", "tpot", "e2e_sched"), times)
    figures = Quantiles(float(times.mean()), *map(float, np.quantile(times, (0.5, 0.9, 0.99))))
    return structs.replace(point(sweep, 0.1, sweep=sweep), ttft_sched=figures, series=series(table, 20))


def test_noise_between_points_of_sweeps_fails_no_gate():
    rng = np.random.default_rng(0)
    common = rng.lognormal(0, 0.5, 1000)
    base, noisy = (common * rng.lognormal(0, 0.5, 1000) for _ in range(2))
    base *= noisy.mean() / base.mean() / 1.02
    for gates in ("ttft.mean > +1%", "ttft.p90 > +1%"):
        ((state, text),) = of_sweep([sampled("a", base), sampled("b", noisy)], gates)
        assert (state, "95% interval" in text) == ("undecided", True), text
    worse = of_sweep([sampled("a", base), sampled("b", base * 2)], "ttft.mean > +5%", "ttft.p90 > +5%")
    assert [state for state, _ in worse] == ["failed", "failed"]


SUITE = [
    GateResult("a, <b>", "the run is valid", "passed", "valid"),
    GateResult("a, <b>", "ttft.p90 > 2s", "failed", "it is at\x1b[31m 3 s"),
    GateResult("c", "ttft.p90 > +5%", "undecided", "which may be noise"),
]


def test_junit_xml_counts_what_it_holds():
    root = ElementTree.fromstring(
        junit.document("dynabench", SUITE, created="2026-11-26T00:02:39.123", wall_s={"a, <b>": 1.25})
    )
    (suite,) = root
    assert (root.tag, suite.tag, {case.tag for case in suite}) == ("testsuites", "testsuite", {"testcase"})
    for each in (root, suite):
        assert (each.get("tests"), each.get("failures"), each.get("errors")) == ("3", "1", "0")
    assert suite.get("skipped") == str(len(suite.findall("testcase/skipped"))) == "1"
    assert suite.get("timestamp") == "2026-11-26T00:02:39"
    assert [case.get("time") for case in suite] == ["1.250", "0.000", "0.000"]
    assert suite.get("time") == "1.250"
    assert [(case.get("classname"), case.get("name")) for case in suite] == [each[:2] for each in SUITE]
    (failure,) = suite.findall("testcase/failure")
    assert failure.get("message") == failure.text == "it is at\\x1b[31m 3 s"
    assert suite.find("testcase/skipped").get("message") == "which may be noise"
    assert suite.find("testcase/system-out").text == "valid"
