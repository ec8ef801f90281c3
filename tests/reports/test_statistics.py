import numpy as np
import pytest
from msgspec import UNSET

from reports import gate
from reports.figures import slo
from reports.figures.stability import in_system, stability, waiting
from reports.figures.statistics import (
    blocks_of,
    gaps_interval,
    mean_interval,
    paired_difference,
    quantile_interval,
    student_t,
)
from reports.summarize import summarize
from reports.summary import NOISE_FLOOR
from tests.reports.runs import apart, run


def failures(summary, gates):
    return [result.text for result in gate.of_summary(summary, gates) if result.state == "failed"]


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.3027), (4, 2.7764), (5, 2.5706), (10, 2.2281), (39, 2.0227)]
)
def test_students_t_is_that_of_the_tables(freedom, value):
    assert student_t(freedom) == pytest.approx(value, rel=2e-3)


def test_a_block_spans_ten_lifetimes():
    arrivals = np.arange(1000) * 1.0
    assert len(set(blocks_of(arrivals, np.full(1000, 5.0)))) == 19  # 999 s / (10 x 5 s)
    assert len(set(blocks_of(arrivals, np.full(1000, 0.01)))) == 40
    assert len(set(blocks_of(arrivals, np.full(1000, 500.0)))) == 5
    assert len(set(blocks_of(np.array([0.0, 1.0]), np.array([np.nan, 1.0])))) == 2
    shuffled = np.random.default_rng(0).permutation(1000)
    assert (np.argsort(blocks_of(arrivals[shuffled], np.ones(1000)), kind="stable") >= 0).all()


def autocorrelated(rng, count, length):
    """Noise whose neighbours within `length` are alike, and far more noise between neighbours."""
    slow = np.repeat(rng.normal(0, 0.3, count // length + 1), length)[:count]
    return slow + rng.normal(0, 1, count)


def test_intervals_hold_the_truth_as_often_as_they_say_though_requests_are_alike():
    rng = np.random.default_rng(2)
    arrivals = np.arange(2000.0)
    missed = 0
    for _ in range(300):
        base = rng.lognormal(0, 1, 2000)
        other = base + autocorrelated(rng, 2000, 40)
        missed += paired_difference(base, other, blocks_of(arrivals, np.full(2000, 10.0))).is_noise is False
    assert 5 <= missed <= 27  # 15 of 300 expected; short blocks would miss some 60


def test_a_difference_of_quantiles_is_found():
    rng = np.random.default_rng(1)
    base = rng.lognormal(0, 0.5, 4000)
    blocks = np.arange(4000) // 200
    pair = paired_difference(base, base * np.where(base > 2, 1.5, 1.0), blocks, share=0.99)
    assert pair.low > 0
    assert pair.mean == pytest.approx(0.5 * np.quantile(base, 0.99), rel=0.01)
    assert paired_difference(base, base * np.where(base > 2, 1.5, 1.0), blocks, share=0.5).mean == 0


def test_intervals_of_one_arm_hold_its_figures():
    values = np.random.default_rng(0).lognormal(0, 1, 2000)
    blocks = np.arange(2000) // 50
    low, high = quantile_interval(values, blocks, 0.9)
    assert low < np.quantile(values, 0.9) < high
    low, high = mean_interval(values, blocks)
    assert low < values.mean() < high
    assert quantile_interval(values, np.zeros(2000, int), 0.9) is None


def test_a_failure_is_an_infinite_time_in_an_interval():
    values, blocks = np.random.default_rng(0).lognormal(0, 1, 2000), np.arange(2000) // 50
    few, many = (np.where(np.arange(2000) % 200 < count, np.inf, values) for count in (2, 18))
    low, high = quantile_interval(few, blocks, 0.9)
    assert quantile_interval(values, blocks, 0.9)[0] < low < high < np.inf
    assert quantile_interval(many, blocks, 0.9)[1] == np.inf, "9% fail in bursts, so that 10% do in some such samples"
    assert quantile_interval(np.where(np.arange(2000) % 5 == 0, np.inf, values), blocks, 0.9) is None


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, None])
def test_gaps_between_tokens_have_the_intervals_of_as_many_times(share):
    """Rows of one gap each; 99 of 100 are short, and the long ones come in some blocks only."""
    rng = np.random.default_rng(0)
    values, blocks = rng.lognormal(-4, 0.3, 4000), np.arange(4000) // 100
    values[blocks % 4 == 0] *= 1.5
    rows = np.column_stack([values, np.zeros((4000, 2)), np.ones((4000, 2))])
    found = gaps_interval(rows, blocks, share)
    expected = mean_interval(values, blocks) if share is None else quantile_interval(values, blocks, share)
    assert found == pytest.approx(expected, rel=0.02)
    assert gaps_interval(rows, np.zeros(4000, int), share) is None


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("stall", [1, 50, 10_000])
def test_a_block_that_stalled_hides_no_uncertainty_of_the_others(share, stall):
    """37 blocks of 10 to 30 ms, in one of which every gap is as many times as long."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        blocks = np.arange(3700) // 100
        values = rng.uniform(0.01, 0.02, 3700) * rng.uniform(1, 1.5, 37)[blocks] * np.where(blocks == 7, stall, 1)
        rows = np.column_stack([values, np.zeros((3700, 2)), np.ones((3700, 2))])
        found, expected = gaps_interval(rows, blocks, share), quantile_interval(values, blocks, share)
        assert np.ptp(found) == pytest.approx(np.ptp(expected), rel=0.06), seed


def test_gaps_that_are_all_alike_have_an_interval_without_width():
    rows = np.column_stack([np.full(400, 0.02), np.zeros((400, 2)), np.ones((400, 2))])
    assert gaps_interval(rows, np.arange(400) // 10, 0.9) == (0.02, 0.02)


def test_a_row_of_many_gaps_counts_as_many_times():
    """Ten blocks, in each a ramp of 100 steps for two tokens from 10 to 20 ms, but in the last from 30 to 40 ms."""
    rows = np.array([[0.03 if block == 9 else 0.01, 0.0001, 0.0, 100, 2] for block in range(10)])
    low, high = gaps_interval(rows, np.arange(10), 0.5)
    one_by_one = np.repeat([row[0] + row[1] * step for row in rows for step in range(100)], 2)
    assert low < np.median(one_by_one) < high
    assert (low, high) == pytest.approx(quantile_interval(one_by_one, np.repeat(np.arange(10), 200), 0.5), rel=0.05)


def test_an_interval_of_a_time_does_not_begin_below_zero():
    """One block of five holds all the waiting: value - t x error is negative."""
    times, blocks = np.array([0.1] * 40 + [9.0] * 10), np.repeat(np.arange(5), 10)
    for low, high in (mean_interval(times, blocks), quantile_interval(times, blocks, 0.9)):
        assert low == 0
        assert high > times.mean()


def test_an_arm_whose_queue_grew_has_no_intervals():
    """Its times depend on when one looks: there is no mean that a longer run would come closer to."""
    ttft = np.linspace(0.1, 300, 600)
    growing = run("growing", ttft=ttft, admitted_s=np.arange(600) + ttft, done_s=np.arange(600) + ttft + 9)
    found = summarize([run("settled", ttft=[0.1] * 600), growing]).arms
    assert [arm.stability.is_stable for arm in found.values()] == [True, False]
    assert found["settled"].ttft_sched.intervals.mean == pytest.approx((0.1, 0.1))
    assert found["growing"].ttft_sched.intervals is UNSET


def test_the_recommended_sample_grows_with_the_square_of_what_is_sought():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 0.3, 2000)
    pair = paired_difference(base, base * rng.lognormal(0, 0.2, 2000), np.arange(2000) // 100)
    assert pair.count_to_find(pair.detectable) == pytest.approx(2000, abs=1)
    assert pair.count_to_find(pair.detectable / 2) == pytest.approx(8000, abs=2)


def test_a_difference_within_the_noise_floor_is_inconclusive():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 0.1, 600)
    arms = {"a": base, "b": base - 0.02, "a" + NOISE_FLOOR: base + 0.03}
    runs = [run(name, ttft=values) for name, values in arms.items()]
    summary = summarize(runs)
    assert summary.noise_floor["ttft_sched"]["mean"] == pytest.approx(0.03)
    found = summary.difference("b", "ttft_sched", "mean")
    assert found.high < 0
    assert found.verdict == "inconclusive"
    assert "two runs of the same arm differ by as much" in summary.verdict
    alone = summarize(runs[:2])
    assert alone.difference("b", "ttft_sched", "mean").verdict == "better"


def lived(arrivals, lifetimes, arm="a", admitted_s=None):
    ends = arrivals + lifetimes
    return run(
        arm, np.full(len(arrivals), 0.1), intended_s=arrivals, sent_s=arrivals, first_token_s=arrivals + 0.1,
        admitted_s=[None] * len(arrivals) if admitted_s is None else admitted_s, last_token_s=ends, done_s=ends,
    )  # fmt: skip


def test_the_number_in_the_system_is_exact():
    made = lived(np.array([0.0, 1.0]), np.array([2.0, 4.0]))
    assert in_system(made.requests, np.array([0.0, 1.0, 2.0, 5.0, 6.0])).tolist() == [1.0, 2.0, 1.0, 0.0]


def test_a_growing_queue_is_told_from_a_busy_one():
    rng = np.random.default_rng(0)
    arrivals = np.sort(rng.uniform(0, 600, 3000))
    steady = lived(arrivals, rng.exponential(4.0, 3000))
    growing = lived(arrivals, 1.0 + arrivals * 0.3, "b")
    assert stability(steady).is_stable
    assert not stability(growing).is_stable
    summary = summarize([steady, growing])
    assert summary.difference("b", "ttft_sched", "mean").verdict == "unstable"
    assert "b could not keep up" in summary.verdict


def test_what_fills_is_no_queue_as_long_as_nobody_waits():
    arrivals = np.linspace(0, 60, 600)
    lifetimes = 1.0 + arrivals * 0.3
    assert not stability(lived(arrivals, lifetimes)).is_stable
    assert stability(lived(arrivals, lifetimes, admitted_s=arrivals + 0.01)).is_stable
    assert not stability(lived(arrivals, lifetimes, admitted_s=arrivals * 1.2)).is_stable


def test_those_wait_too_whose_prompt_is_computed_and_whose_answer_is_not_begun():
    times = {"admitted_s": [1.0, 12.0], "prefill_end_s": [3.0, 13.0], "decode_start_s": [5.0, 13.0]}
    assert waiting(apart(**times).requests, np.array([0, 1, 3, 5, 10, 12, 20.0])).tolist() == [1, 0, 1, 0, 1, 0]


def test_a_trace_that_gets_busier_is_no_growing_queue():
    rng = np.random.default_rng(0)
    busier = 600 * np.sqrt(np.sort(rng.uniform(0, 1, 4000)))  # the rate grows in proportion to time
    assert stability(lived(busier, rng.exponential(4.0, 4000))).is_stable
    assert not stability(lived(busier, 2.0 + 0.001 * busier**2)).is_stable


def test_limits_are_read_and_goodput_counts_failures_as_bad():
    assert [str(slo.parse_slo(text)) for text in ("ttft.p99 <= 2s", "tpot<=100ms")] == [
        "ttft.p99 <= 2000 ms",
        "tpot <= 100 ms",
    ]
    for text, problem in (
        ("ttft", "is not understood"),
        ("itl <= 5ms", "itl has no value per request"),
        ("ttft <= 5", "not understood"),
    ):
        with pytest.raises(ValueError, match=problem):
            slo.parse_slo(text)
    assert [str(limit) for limit in slo.preset("llama3.1-8b-interactive")] == [
        "ttft.p99 <= 500 ms",
        "tpot.p99 <= 30 ms",
    ]
    with pytest.raises(ValueError, match="slo_preset 'gpt-9' is unknown; expected one of llama2-70b"):
        slo.preset("gpt-9")
    error = np.array(["timeout"] + [""] * 9, dtype=object)
    made = run("a", ttft=[0.1] * 5 + [3.0] * 5, error=error)
    figures = summarize([made], [slo.parse_slo("ttft <= 1s")]).arms["a"].goodput
    assert (figures.good, figures.attempted, figures.attainment) == (4, 10, 0.4)


def test_a_limit_on_the_second_token_spares_answers_of_one_token_but_not_unknown_times():
    made = run("a", ttft=[1.0] * 4, osl=[10, 10, 1, 10], second_token_s=[1.5, 4.0, None, None])
    figures = summarize([made], [slo.parse_slo("ttst <= 2s")]).arms["a"].goodput
    assert (figures.good, figures.attempted) == (2, 4)  # the first, and the one that has no second token


def test_a_limit_of_a_run_on_second_tokens_that_nobody_knows_is_missed():
    (outcome,) = summarize([run("a")], [slo.parse_slo("ttst.mean <= 2s")]).arms["a"].outcomes
    assert (outcome.limit, str(outcome)) == ("ttst.mean <= 2000 ms", "missed: no request has this metric")


def test_gates_fail_beyond_noise_only():
    rng = np.random.default_rng(0)
    base = rng.lognormal(0, 0.1, 600)
    worse, noisy = run("worse", ttft=base * 1.1), run("noisy", ttft=base * rng.lognormal(-0.345, 0.9, 600))
    summary = summarize([run("base", ttft=base), worse, noisy])
    gates = [gate.parse_gate("ttft.mean > +5%")]
    found = failures(summary, gates)
    assert len(found) == 1
    assert found[0] == "ttft.mean > +5%: worse is at +10.0%, 95% interval +9.9 to +10.1%"
    assert failures(summary, [gate.parse_gate("ttft.mean > +20%"), gate.parse_gate("failed > 0")]) == []
    assert [text.rpartition(" is at ")[0] for text in failures(summary, [gate.parse_gate("e2e.p90 > 1ms")])] == [
        "e2e.p90 > 1ms: base",
        "e2e.p90 > 1ms: worse",
        "e2e.p90 > 1ms: noisy",
    ]
    for text, problem in (
        ("ttft > 5%", "needs a statistic"),
        ("throughput.p99 < 1", "has a single value"),
        ("speed.p99 > 5%", "'speed' is not a metric"),
        ("ttft.p99 > 5", "needs a unit"),
        ("ttft.p99 5%", "is not understood"),
    ):
        with pytest.raises(ValueError, match=problem):
            gate.parse_gate(text)


def test_no_time_is_lower_by_more_than_the_whole_of_the_other():
    rare = np.where(np.arange(1000) % 250 == 0, 900.0, 0.1)
    pair = paired_difference(rare, np.full(1000, 0.1), np.arange(1000) // 25)
    assert pair is not None
    assert pair.shares()[0] == -1 < pair.relative


def test_no_fewer_than_0_requests_wait_at_first():
    arrivals = np.arange(600.0)  # those of the second half wait, each longer than the one before
    found = stability(lived(arrivals, 0.1 + np.maximum(arrivals - 300, 0) * 0.9))
    assert (found.is_stable, found.start) == (False, 0.0)
    assert found.end > 50
