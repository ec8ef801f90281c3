"""Gates: limits hold for every arm, comparisons against the baseline, and what cannot be judged fails by name."""

from xml.etree import ElementTree

import pytest
from msgspec import structs

from reports import gate, junit, slo, sweep_table
from reports.gate import PLANS, POINTS, Result, parse
from reports.points import Impossible, Quantiles
from reports.summarize import summarize
from tests.reports.runs import run
from tests.reports.test_sweep_report import MANIFEST, found_at, point


def judged(summary, *texts, left_out=()):
    return [result.text for result in gate.of_summary(summary, [parse(text) for text in texts], left_out)]


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
    assert gate.is_comparison(parse(text)) is compares


def test_shares_are_limited_as_they_are():
    summary = summarize([run("a", ttft=[1.0, 3.0])], [slo.parse("ttft <= 2s")])
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
    (result,) = gate.of_summary(summary, [parse("ttft.p90 > 2s")])
    assert (result.state, result.text) == ("failed", "ttft.p90 > 2s: a is at infinity, because requests failed")
    assert judged(summary, "failed > 1%") == ["failed > 1%: a is at 25%"]


def test_what_cannot_be_judged_fails_by_name():
    one = summarize([run("a")])
    assert gate.of_summary(one, [parse("ttft.mean > +5%")]) == [
        Result(
            "a",
            "ttft.mean > +5%",
            "failed",
            "ttft.mean > +5%: a is the only arm, so there is nothing to compare it with",
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
    assert [(result.state, result.text) for result in gate.of_summary(summary, [parse("failed > 0")])] == [
        ("failed", "failed > 0: not judged, because it was interrupted")
    ]


@pytest.mark.parametrize(
    ("text", "kind", "problem"),
    [
        ("throughput < 3s", gate.RUNS, "throughput is not a time; expected a number or %"),
        ("gpus > 3", gate.RUNS, "'gpus' is not a metric"),
        ("ttft.p95 > 2s", POINTS, "p95 is not kept; expected one of mean, p50, p90, p99"),
        ("ttft.p99 > 2s", PLANS, "'ttft' is not a metric; expected one of gpus, cost"),
        ("gpus > +10%", PLANS, "there is no baseline to compare with; expected a limit without a sign or %"),
        ("gpus", PLANS, "is not understood; expected something like 'gpus > 16' or 'cost > 40'"),
    ],
)
def test_what_a_command_cannot_judge_is_refused(text, kind, problem):
    with pytest.raises(ValueError) as refused:
        parse(text, kind)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ttft.p90 > +5%", "compares arms with the first, but there is only one"),
        ("attainment < 95%", "needs limits; set them with --slo"),
        ("found < 2", "is about what --find finds; use --find"),
    ],
)
def test_a_gate_that_could_never_be_judged_is_refused_before_the_run(text, problem):
    with pytest.raises(ValueError, match=problem):
        gate.refuse_idle([parse(text, POINTS)], num_arms=1, has_limits=False)
    gate.refuse_idle([parse(text, POINTS)], num_arms=2, has_limits=True, finds=True)


def of_sweep(rows, *texts, find=None, is_complete=True):
    sweep = sweep_table.lay_out(rows, MANIFEST | {"sweep": {"find": find}}, is_complete=is_complete)
    return [(one.state, one.text) for one in gate.of_sweep(sweep, [parse(text, POINTS) for text in texts])]


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


def test_points_of_several_sweeps_are_compared_with_the_same_settings_in_the_first():
    rows = [
        point(f"{sweep}/{workers}", mean, workers=workers, sweep=sweep)
        for sweep, workers, mean in (("a", 2, 0.2), ("a", 4, 0.1), ("b", 2, 0.1), ("b", 4, 0.2), ("b", 8, 0.1))
    ]
    assert of_sweep(rows, "ttft.mean > +5%") == [
        ("passed", "ttft.mean > +5%: b/2 is at -50.0%"),
        ("failed", "ttft.mean > +5%: b/4 is at +100.0%"),
        ("failed", "ttft.mean > +5%: b/8 has no counterpart in the first sweep"),
    ]


SUITE = [
    Result("a, <b>", "the run is valid", "passed", "valid"),
    Result("a, <b>", "ttft.p90 > 2s", "failed", "it is at\x1b[31m 3 s"),
    Result("c", "ttft.p90 > +5%", "undecided", "which may be noise"),
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
