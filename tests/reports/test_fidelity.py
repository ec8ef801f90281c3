"""Errors of simulated runs against real ones."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from reports import fidelity
from reports.fidelity import BestArm, Distance, Fidelity, Runs, Speed
from reports.record.records import Record, Requests
from reports.tables import fidelity as fidelity_table


def run(scale=1.0, *, count=100, preemptions=0):
    number = np.arange(count)
    sent = number * 0.1
    first = sent + scale * (0.1 + number / 1000)
    last = first + scale * 0.02 * 10
    requests = Requests.of(
        worker=np.zeros(count),
        intended_s=sent,
        sent_s=sent,
        first_token_s=first,
        last_token_s=last,
        isl=np.full(count, 100),
        osl=np.full(count, 11),
        first_chunk_tokens=np.ones(count),
        cached_tokens=np.full(count, 25),
        preemptions=None if preemptions is None else np.full(count, preemptions),
    )
    return Record("arm", requests, np.array([[scale * 0.02, 0.0, 0.0, 10.0, count]]), 1.0, 1)


def named(rows):
    return {row.name: row for row in rows}


def test_every_latency_is_compared_at_its_mean_and_percentiles():
    rows = named(fidelity.deviations([run()], [run(1.1)]))
    for name in ("ttft", "itl", "tpot", "e2e"):
        for statistic in ("mean", "p50", "p90", "p99"):
            assert rows[f"{name}.{statistic}"].error == pytest.approx(0.1, abs=1e-6)
    assert rows["ttft.mean"].real == pytest.approx(0.1495)
    assert rows["tpot.mean"].real == pytest.approx(0.02)
    assert rows["hit_share"].error == pytest.approx(0)
    assert rows["hit_share"].real == 0.25


def test_the_spread_is_the_farthest_real_run():
    row = named(fidelity.deviations([run(0.9), run(1.0), run(1.1)], [run(1.08)]))["tpot.mean"]
    assert row.error == pytest.approx(0.08)
    assert row.spread == pytest.approx(0.1)
    assert row.is_within_spread
    assert named(fidelity.deviations([run()], [run()]))["tpot.mean"].spread is None


def test_what_one_side_does_not_tell_is_left_out():
    rows = named(fidelity.deviations([run(preemptions=None)], [run()]))
    assert "preemptions" not in rows
    silent = replace(run(), gaps=np.empty((0, 5)))
    assert "itl.mean" not in named(fidelity.deviations([silent], [run()]))


def test_distances_of_equal_and_of_shifted_distributions():
    assert fidelity.distances([run()], [run()])["ttft"] == Distance(0.0, 0.0)
    apart = fidelity.distances([run()], [run(3.0)])
    assert apart["ttft"].wasserstein == pytest.approx(2.0, rel=0.01)
    assert apart["tpot"].ks == 1.0


def test_thresholds_fail_what_is_off_by_more_and_by_more_than_real_runs_differ():
    limits = [fidelity.parse("tpot > 5%"), fidelity.parse("e2e.p90 > 20%")]
    found = fidelity.summary({"kv": Runs([run()], [run(1.1)])}, limits)
    assert found.arms["kv"].failed == [f"tpot.{s} is off by +10.0% (tpot > 5%)" for s in ("mean", "p50", "p90", "p99")]
    found = fidelity.summary({"kv": Runs([run(0.85), run(1.15)], [run(1.1)])}, limits)
    assert found.arms["kv"].failed == []


@pytest.mark.parametrize(
    ("others", "is_clear"), [([1.0], False), ([1.0, 1.0], True), ([0.93, 1.07], True), ([0.7, 1.3], False)]
)
def test_the_better_arm_is_named_on_both_sides(others, is_clear):
    """Whether the real runs can tell: each of the better arm's is better than all of the others."""
    real = [run(0.85), run(0.9)] if len(others) > 1 else [run(0.9)]
    arms = {"random": Runs([run(scale) for scale in others], [run(1.02)]), "kv": Runs(real, [run(0.95)])}
    best = fidelity.summary(arms, []).best
    assert best == dict.fromkeys(("ttft.mean", "tpot.mean", "e2e.mean"), BestArm("kv", "kv", is_clear))


def test_a_figure_that_no_run_has_has_no_best_arm():
    short = run()
    short = replace(short, requests=short.requests.replace(osl=[1] * 100))  # no token after the first
    found = fidelity.summary({"random": Runs([short], [short]), "kv": Runs([short], [short])}, [])
    assert list(found.best) == ["ttft.mean", "e2e.mean"]


@pytest.mark.parametrize(
    "text", ["ttft", "ttft > 5", "speed > 5%", "ttft.p42 > 5%", "throughput.mean > 5%", "ttft < 5%"]
)
def test_what_is_no_threshold_is_refused(text):
    with pytest.raises(ValueError, match="is not understood; expected METRIC > N%"):
        fidelity.parse(text)


@pytest.mark.parametrize("speed", [{}, {"speed": None}, {"speed": Speed(1.25, 2.0)}])
def test_a_comparison_comes_back_from_json_as_it_was(speed):
    made = fidelity.summary({"kv": Runs([run(1.0), run(1.1)], [run(1.02)], **speed)}, [])
    written = msgspec.json.encode(made)
    assert msgspec.json.decode(written, type=Fidelity) == made
    assert ("speed" in msgspec.json.decode(written)["arms"]["kv"]) == bool(speed)


def test_errors_at_the_speed_of_the_real_runs_stand_beside_the_others():
    arms = {"kv": Runs([run(), run(1.01)], [run(1.1)], [run(1.02)]), "random": Runs([run()], [run(1.1)])}
    found = fidelity.summary(arms, [])
    row = named(found.arms["kv"].deviations)["tpot.mean"]
    assert row.error == pytest.approx(1.1 / 1.005 - 1)
    assert row.error_at_speed == pytest.approx(1.02 / 1.005 - 1)
    wide, plain = (fidelity_table.fidelity_grid(arm, part) for arm, part in found.arms.items())
    assert wide.columns == [*plain.columns, "real runs differ by", "error at the runs' speed"]
    assert plain.columns == ["real", "simulated", "error"]  # of one real run
    assert all(len(cells) == len(shown.columns) for shown in (wide, plain) for _, cells in shown.rows)
