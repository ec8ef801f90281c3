import re

import numpy as np
import pytest

from reports.figures import metrics
from reports.figures.statistics import paired_difference
from reports.summarize import summarize
from reports.summary import NOISE_FLOOR
from tests.reports.runs import run


def test_each_metric_is_its_formula():
    values = metrics.per_request(run().requests)
    assert values["ttft_sched"].tolist() == [1.0, 2.0]
    assert values["ttft"].tolist() == [0.75, 1.75]
    assert values["tpot"].tolist() == [1.0, 1.0]
    assert values["e2e_sched"].tolist() == [10.0, 11.0]
    assert metrics.cache(run()) == metrics.Cache(0.25, 0.25, 0.0)


def test_goodput_is_per_second_of_the_whole_run_so_it_is_never_above_throughput():
    at_once = run(ttft=[1.0] * 4, intended_s=[2.0, 2.0, 2.0, 2.5])
    assert metrics.throughput(at_once).requests_per_s == pytest.approx(4 / 11)
    assert metrics.goodput(at_once, np.array([True, True, True, False])).goodput_per_s == pytest.approx(3 / 11)


def test_failures_are_not_averaged_but_count_as_infinite():
    failed = run(ttft=[1.0] * 400, error=np.array(["timeout"] * 8 + [""] * 392, dtype=object))
    figures = summarize([failed]).arms["a"]
    assert figures.failed == 8
    assert figures.ttft_sched.count == 392
    assert figures.ttft_sched.adjusted_p90 == 1.0
    assert figures.ttft_sched.adjusted_p99 is None  # 2% failed: the 99th percentile is infinite


def test_percentiles_that_the_sample_cannot_carry_are_missing():
    figures = metrics.describe(np.arange(50.0))
    assert figures.p90 == pytest.approx(44.1)
    assert figures.p95 is None
    assert figures.p99 is None


def test_gap_quantiles_equal_those_of_the_expanded_gaps():
    rng = np.random.default_rng(3)
    rows = np.column_stack(
        [
            rng.uniform(0.005, 0.03, 60),
            rng.uniform(0, 1e-5, 60),
            -rng.uniform(0, 1e-9, 60),
            rng.integers(1, 400, 60),
            rng.integers(1, 9, 60),
        ]
    )
    gaps = metrics.TokenGaps(rows)
    values = np.concatenate([np.repeat(a + np.arange(n) * (b + np.arange(n) * c), int(w)) for a, b, c, n, w in rows])
    assert gaps.count == len(values)
    assert gaps.mean() == pytest.approx(values.mean())
    assert gaps.max() == pytest.approx(values.max())
    shares = [0.0, 0.01, 0.5, 0.9, 0.99, 1.0]
    expected = np.quantile(values, shares, method="higher")
    assert gaps.quantiles(shares) == pytest.approx(expected, abs=2e-6)


def test_live_gaps_are_weighted_by_tokens():
    gaps = metrics.TokenGaps(np.array([[0.1, 0, 0, 1, 3], [0.5, 0, 0, 1, 1]]))
    assert gaps.mean() == pytest.approx(0.2)
    assert gaps.quantiles([0.0, 0.5, 1.0]).tolist() == [0.1, 0.1, 0.5]


def test_a_paired_difference_sees_through_the_spread_between_requests():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 2, 2000)
    blocks = np.arange(2000) // 50
    pair = paired_difference(base, base - 0.01, blocks)
    assert pair.mean == pytest.approx(-0.01)
    assert not pair.is_noise
    noise = paired_difference(base, base + rng.normal(0, 1, 2000), blocks)
    assert noise.low < noise.mean < noise.high
    assert noise.is_noise


def test_the_verdict_names_the_winner_or_says_noise():
    slow, fast = run("round-robin", ttft=[2.0] * 100), run("kv", ttft=[1.0] * 100)
    verdict = summarize([slow, fast]).verdict
    assert "kv has the lower mean TTFT, by 1,000 ms (50.0%) against round-robin" in verdict
    assert "more than noise" in verdict
    same = summarize([run("a", ttft=[1.0] * 100), run("b", ttft=[1.0] * 100)])
    assert "a and b have exactly the same mean TTFT: every request took the same time in both." in same.verdict
    assert same.power == ""
    rng = np.random.default_rng(0)
    noisy = [run(name, ttft=rng.lognormal(0, 1, 100)) for name in "ab"]
    assert "do not differ in mean TTFT by more than noise" in summarize(noisy).verdict


def test_a_difference_that_is_certain_and_tiny_is_called_equal():
    base = np.random.default_rng(0).lognormal(0, 1, 400)
    runs = [run("a", ttft=base), run("b", ttft=base * 1.0001)]
    found = summarize(runs)
    assert found.difference("b", "ttft_sched", "mean").verdict == "equal"
    assert "a and b have practically the same mean TTFT: they differ by" in found.verdict
    assert summarize(runs, smallest=0.00001).difference("b", "ttft_sched", "mean").verdict == "worse"


def test_what_lies_within_what_is_worth_telling_is_equal_though_it_may_be_noise():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 0.1, 4000)
    runs = [run("a", ttft=base), run("b", ttft=base * (1 + rng.normal(0, 0.01, 4000)))]
    assert summarize(runs).difference("b", "ttft_sched", "mean").verdict == "equal"
    assert summarize(runs, smallest=1e-5).difference("b", "ttft_sched", "mean").verdict == "inconclusive"


def test_how_small_a_difference_a_run_finds_is_said_where_it_makes_sense():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 1, 2000)
    power = {
        spread: summarize([run("a", ttft=base), run("b", ttft=base * rng.lognormal(0, spread, 2000))]).power
        for spread in (0.01, 0.9)
    }
    assert re.fullmatch(r"A run like this finds differences in mean TTFT of about 0\.\d% or more\.", power[0.01])
    wanted = re.fullmatch(r"A run .* of about \d+\.\d% or more; finding 3% needs about ([\d,]+) requests\.", power[0.9])
    assert int(wanted[1].replace(",", "")) > 2000


def test_two_runs_that_draw_nothing_have_no_noise_and_it_is_said():
    first, again = run("a", ttft=[1.0] * 100), run("a" + NOISE_FLOOR, ttft=[1.0] * 100)
    verdict = summarize([first, run("b", ttft=[2.0] * 100), again]).verdict
    assert "Two runs of a are exactly equal: nothing in them is random, so there is no noise." in verdict


def test_an_arm_that_was_cut_short_is_paired_as_far_as_it_came():
    whole, cut = run("a", ttft=[2.0] * 100), run("b", ttft=[1.0] * 60, is_complete=False)
    summary = summarize([whole, cut])
    assert summary.difference("b", "ttft_sched", "mean").count == 60
    assert "interrupted" in summary.verdict


def test_a_server_that_counts_no_prompt_token_leaves_the_hits_unknown():
    nothing, some = metrics.cache(run(isl=[0, 0])), metrics.cache(run(isl=[0, 100], cached_tokens=[0, 50]))
    assert (nothing.hit_share, nothing.mean_request_hit_share, nothing.predicted_share) == (None, None, None)
    assert (some.hit_share, some.mean_request_hit_share) == (0.5, 0.5)
