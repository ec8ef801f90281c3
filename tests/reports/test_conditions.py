"""Conditions: one form, and what limits, gates and thresholds take of it."""

import random

import pytest

from reports import fidelity, gate
from reports.figures import slo
from reports.figures.conditions import Condition, read_condition
from reports.summarize import summarize
from tests.reports.runs import run


def failures(summary, gates):
    return [result.text for result in gate.of_summary(summary, gates) if result.state == "failed"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ttft.p99 <= 2s", Condition("ttft.p99 <= 2s", "ttft", "p99", "<=", 2.0, "s")),
        ("  tpot<100ms ", Condition("tpot<100ms", "tpot", None, "<", 100.0, "ms")),
        ("ttft.p90 > +5%", Condition("ttft.p90 > +5%", "ttft", "p90", ">", 5.0, "%", is_signed=True)),
        ("throughput < -3 %", Condition("throughput < -3 %", "throughput", None, "<", -3.0, "%", is_signed=True)),
        ("failed > 0", Condition("failed > 0", "failed", None, ">", 0.0)),
        ("imbalance > .5", Condition("imbalance > .5", "imbalance", None, ">", 0.5)),
    ],
)
def test_a_condition_is_a_metric_a_sign_and_a_number(text, found):
    assert read_condition(text) == found


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft.p42 > 5%", "ttft = 5s", "ttft > 1.2.3s", "ttft > s", "ttft > 5 h", f"ttft > {'9' * 400}s"],
)
def test_another_form_is_no_condition(text):
    assert read_condition(text) is None


def test_values_are_seconds_shares_or_as_they_are():
    assert [read_condition(text).value for text in ("a > 250ms", "a > 2s", "a > 5%", "a > 7")] == [0.25, 2.0, 0.05, 7.0]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ttft.p99 <= 2s", "ttft.p99 <= 2000 ms"),
        ("tpot<.1s", "tpot <= 100 ms"),
        ("e2e.p99 <= 1200s", "e2e.p99 <= 1200000 ms"),
        ("ttft.p50 <= 12345.678ms", "ttft.p50 <= 12345.678 ms"),
    ],
)
def test_a_limit_is_shown_in_milliseconds_and_read_back_as_it_was(text, shown):
    limit = slo.parse_slo(text)
    assert str(limit) == shown
    assert slo.parse_slo(shown) == limit


@pytest.mark.parametrize(
    "text", ["ttft > 2s", "ttft <= 5%", "ttft <= -5s", "ttft_sent <= 2s", "failed <= 0", "ttft <= 5"]
)
def test_what_is_no_limit_is_refused_with_the_flag_and_the_text(text):
    with pytest.raises(ValueError, match=f"slo '{text}' is not understood; expected something like 'ttft.p99 <= "):
        slo.parse_slo(text)


@pytest.mark.parametrize("text", ["ttft.p90 <= 5%", "ttft.p90 5%", "throughput"])
def test_what_is_no_gate_is_refused_with_the_flag_and_the_text(text):
    with pytest.raises(ValueError, match=f"fail_if '{text}' is not understood; expected something like"):
        gate.parse_gate(text)


@pytest.mark.parametrize("text", ["ttft.p95 > 5%", "ttft.max > 5%", "ttft > -5%", "hit_share.mean > 1%", "ttft <= 5%"])
def test_what_is_no_threshold_is_refused_with_the_flag_and_the_text(text):
    with pytest.raises(ValueError, match=f"fail_if '{text}' is not understood; expected METRIC > N%"):
        fidelity.parse(text)


def test_gates_on_values_know_their_unit():
    summary = summarize([run("a"), run("b", ttft=[2.0, 3.0])])
    assert failures(summary, [gate.parse_gate("ttft.mean > 2000ms")]) == ["ttft.mean > 2000ms: b is at 2.5 s"]
    assert failures(summary, [gate.parse_gate("ttft.mean > 3s")]) == []
    assert failures(summary, [gate.parse_gate("throughput < 0.16")]) == ["throughput < 0.16: b is at 0.1538"]
    assert failures(summary, [gate.parse_gate("hit_share > +10%")]) == []


def test_a_gate_whose_limit_lies_within_the_interval_is_undecided_and_fails_nothing():
    rng = random.Random(1)
    before = [1.0 + rng.random() for _ in range(200)]
    after = [1.0 + rng.random() for _ in range(200)]
    summary = summarize([run("a", ttft=before), run("b", ttft=after)])
    low, high = summary.difference("b", "ttft_sched", "mean").shares()
    assert low < 0 < high
    words = {
        limit: gate.of_summary(summary, [gate.parse_gate(f"ttft.mean > {limit:+.2f}%")])[0].state
        for limit in (low * 100 + 0.1, high * 100 - 0.1, high * 100 + 0.1)
    }
    assert list(words.values()) == ["undecided", "undecided", "passed"]
    assert failures(summary, [gate.parse_gate(f"ttft.mean > {low * 100 + 0.1:+.2f}%")]) == []


def test_a_value_that_is_not_known_fails():
    summary = summarize([run("a"), run("b", cached_tokens=[None, None])])
    assert failures(summary, [gate.parse_gate("hit_share < 10%")]) == [
        "hit_share < 10%: b has no such value (too few requests?)"
    ]
    assert failures(summary, [gate.parse_gate("goodput < 1")]) == [
        "goodput < 1: not judged, because it needs runs with limits; set them with --slo or --slo-preset"
    ]
