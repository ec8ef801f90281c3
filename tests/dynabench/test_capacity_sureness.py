"""How sure a plan's answer is: what is said of the sample and of the model, from a simulation."""

import math
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from msgspec import structs

from dynabench.arm import Arm, Run, Settings
from dynabench.capacity.sureness import at_cliff, sureness_in, sureness_of
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.points import point_of
from dynabench.experiment.settings import ExperimentConfig
from dynabench.experiment.source import source_of
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.capacity.answer import SURE, Held, Sureness, doubt, likely
from reports.figures.conditions import read_condition
from reports.figures.metrics import goodput, per_request
from reports.figures.outcomes import Outcome
from reports.figures.slo import good_requests
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig


def within(*, context):
    """Return a deployment that refuses longer requests."""
    timing = TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")
    return Deployment(pools=(Pool(mocker=EngineConfig(max_model_len=context), timing=timing),))


SETTINGS = Settings(
    Deployment(pools=(Pool(timing=TimingConfig(model="Qwen/Qwen3-8B", gpu="h100")),)),
    ShapeConfig(max_requests=100),
)


def test_the_error_of_means_is_not_taken_for_one_of_percentiles_and_itl_has_an_interval():
    limits = [read_condition(text) for text in ("itl.p99 <= 60ms", "tpot.mean <= 20ms", "ttft.max <= 9s")]
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})
    of_itl, of_mean, of_max = (
        sure.text for sure in sureness_of(arm, source_of((), ExperimentConfig()), 0, limits, 0.99)
    )
    assert "; for a real engine, the chance that it holds is " in of_itl
    assert ": 9 of 10 real mean TPOTs are " in of_itl
    assert ", and a p99 was not measured; the sample's 95% interval, " in of_itl
    assert "was not measured" not in of_mean
    assert ": 9 of 10 real mean TTFTs are " in of_max
    assert of_max.endswith("; not certain: no interval (a maximum comes from one request).")


def test_a_limit_within_the_interval_is_met_without_certainty():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})

    def sure(limit):
        [found] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read_condition(limit)], 0.99)
        return found

    first = sure("tpot.mean <= 1s")
    assert (first.is_open, doubt([first])) == (False, "")
    within = sure(f"tpot.mean <= {(first.value + first.high) * 500}ms")
    assert within.is_open
    assert "not certain: the 95% interval includes the limit of tpot.mean" in doubt([first, within])


def test_a_margin_within_the_error_of_the_model_is_no_certainty():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})

    def sure(limit):
        [found] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read_condition(limit)], 0.99)
        return found

    first = sure("itl.mean <= 9s")
    near = sure(f"itl.mean <= {first.value * 1020:.3f}ms")
    far = sure(f"itl.mean <= {max(first.high, first.real_high * 1.3) * 1000:.3f}ms")
    assert (near.is_doubtful, far.is_doubtful) == (True, False)
    assert near.real_low < near.value < near.real_high
    assert 0.3 < near.chance < SURE < far.chance < 1
    assert f"for a real engine, the chance of {near.limit} is {likely(near.chance)}" in doubt([near, far])


def test_a_plan_with_divided_step_times_does_not_quote_the_error_of_whole_ones():
    timing = TimingConfig(model="Qwen/Qwen3-8B", gpu="h100", speedup_ratio=2.0)
    divided = replace(SETTINGS, deployment=Deployment(pools=(Pool(timing=timing),)))
    arm, limit = Arm("a", divided, {"router_mode": "round-robin"}), read_condition("tpot.mean <= 20ms")
    [sure] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [limit], 0.99)
    assert sure.model_error is None
    assert sure.text.endswith("; the model's error is not known for this case.")


def test_only_requests_that_count_are_in_the_certainty():
    window = replace(SETTINGS, shape=ShapeConfig(max_requests=400), load=LoadConfig(warmup_s=20))
    arm, source = Arm("a", window, {"router_mode": "round-robin"}), source_of((), ExperimentConfig())
    record = simulate(Run(arm, seed=0), source(window.shape))
    assert 0 < record.requests.is_measured.sum() < 400
    slowest = per_request(record.requests)["ttft_sched"]
    limit = read_condition(f"ttft <= {np.median(slowest[record.requests.is_measured]) * 1000:.3f}ms")
    [sure] = sureness_of(arm, source, 0, [limit], 0.3)
    assert sure.value == goodput(record.measured, good_requests(record.measured, [limit])).attainment


def test_without_an_interval_nothing_is_certain():
    [sure] = sureness_of(
        Arm("a", SETTINGS, {"router_mode": "round-robin"}),
        source_of((), ExperimentConfig()), 0, [read_condition("ttft.max <= 90s")], 0.99,
    )  # fmt: skip
    assert (sure.has_interval, sure.is_doubtful) == (False, True)
    assert doubt([sure]) == " This is not certain: there is no interval for ttft.max <= 90s."


def test_failed_requests_are_infinite_in_the_interval_too():
    short = replace(SETTINGS, shape=ShapeConfig(max_requests=400), deployment=within(context=9000))
    arm, limit = Arm("a", short, {"router_mode": "round-robin"}), read_condition("ttft.p90 <= 900s")
    [sure] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [limit], 0.9)
    assert sure.low <= sure.value < sure.high == math.inf
    assert sure.is_open
    assert "to infinite, because requests failed, includes the limit" in sure.text


def test_a_chance_has_the_error_of_the_sample_and_without_an_interval_there_is_none():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})
    tail, most = sureness_of(
        arm,
        source_of((), ExperimentConfig()),
        0,
        [read_condition("itl.p99 <= 9s"), read_condition("itl.max <= 9s")],
        0.9,
    )
    low, high = map(float, re.findall(r"TPOTs are ([\d.]+) to ([\d.]+) times", tail.text)[0])
    assert tail.real_high / tail.real_low > high / low
    assert (most.chance, most.real_low, most.real_high) == (None, None, None)
    assert "TPOTs are" in most.text and "the chance" not in most.text


def test_prefill_workers_decide_the_error_of_ttft_and_decode_workers_that_of_tpot():
    timing = {gpu: TimingConfig(model="Qwen/Qwen3-8B", gpu=gpu) for gpu in ("h100", "b200")}
    limits = [read_condition("ttft.mean <= 9s"), read_condition("tpot.mean <= 9s")]

    def errors(prefill, decode):
        pools = (
            Pool(name="prefill", role="prefill", timing=timing[prefill]),
            Pool(name="decode", role="decode", timing=timing[decode]),
        )
        arm = Arm("a", replace(SETTINGS, deployment=Deployment(pools=pools)), {"router_mode": "round-robin"})
        return [sure.of for sure in sureness_of(arm, source_of((), ExperimentConfig()), 0, limits, 0.9)]

    [ttft, tpot] = errors("h100", "b200")
    assert "h100" in ttft and "b200" in tpot
    [ttft, tpot] = errors("b200", "h100")
    assert "b200" in ttft and "h100" in tpot


def test_two_limits_of_each_request_are_at_most_as_likely_as_one():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})

    def chance(*limits):
        [found] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read_condition(one) for one in limits], 0.9)
        return found.chance

    record = simulate(Run(arm, seed=0), source_of((), ExperimentConfig())(SETTINGS.shape))
    known = per_request(record.requests)
    ttft, tpot = (
        f"{metric} <= {np.quantile(known[name], 0.97) * 1100:.3f}ms"
        for metric, name in (("ttft", "ttft_sched"), ("tpot", "tpot"))
    )
    assert 0 < chance(ttft, tpot) <= min(chance(ttft), chance(tpot))
    assert chance("ttft <= 900s", tpot) == pytest.approx(chance(tpot), abs=0.02), "the other has all the room"


def test_where_a_little_more_load_is_too_much_a_little_slower_an_engine_is_too_slow():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})
    limits = [read_condition("ttft.mean <= 900s"), read_condition("tpot.mean <= 9s")]
    ttft, tpot = sureness_of(arm, source_of((), ExperimentConfig()), 0, limits, 0.9)
    assert ttft.chance > SURE

    def at(times):
        held = Held(times, times * 1.01, [Outcome("steady queue", "missed", reason="it grew")])
        return at_cliff([ttft, tpot], held, SETTINGS.deployment)

    assert at_cliff([ttft, tpot], Held(30.0), SETTINGS.deployment) == [ttft, tpot]
    near, same = at(1.02)
    assert same == tpot, "later tokens do not wait"
    assert near.is_within_error and 0.2 < near.chance < SURE
    assert near.real_high == math.inf
    slower = " A real engine that is 2% slower than simulated cannot keep up with this load"
    assert near.text == f"{ttft.text}{slower}, which lowers the chance to {near.chance:.0%}."
    known = structs.replace(ttft, chance=0.9999)
    [sure] = at_cliff(
        [known], Held(2.0, 2.1, [Outcome("steady queue", "missed", reason="it grew")]), SETTINGS.deployment
    )
    assert 0.99 < sure.chance < known.chance and sure.text == ttft.text, "over 99% in any case"
    assert at(1.0)[0].chance < near.chance < at(1.1)[0].chance
    again = msgspec.json.decode(msgspec.json.encode(near), type=Sureness)
    assert again == near, "also from plan.json, which has null for what is infinite"


def test_the_order_of_limits_does_not_matter_at_a_cliff():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})
    chances = []
    for limits in (["ttft <= 900s", "tpot <= 9s"], ["tpot <= 9s", "ttft <= 900s"]):
        sure = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read_condition(one) for one in limits], 0.9)
        held = Held(1.02, 1.03, [Outcome("steady queue", "missed", reason="it grew")])
        [found] = at_cliff(sure, held, SETTINGS.deployment)
        chances.append(found.chance)
    assert chances[0] == chances[1] < SURE


def test_limits_of_each_request_are_as_sure_as_the_sample_is_large():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})

    def sure(*limits, attainment):
        [found] = sureness_of(
            arm, source_of((), ExperimentConfig()), 0, [read_condition(text) for text in limits], attainment
        )
        return found

    all_within = sure("ttft <= 9s", "e2e <= 900s", attainment=0.95)
    assert (all_within.value, all_within.low, all_within.is_open) == (1.0, 0.97, False)
    assert all_within.limit == "ttft <= 9s and e2e <= 900s in 95%"
    assert "the sample's 95% interval, 97.00% to 100.00%, is within the limit." in all_within.text
    assert sure("ttft <= 9s", attainment=0.99).is_open, "3 in 100 may be over"
    half = f"e2e <= {sure('e2e.p50 <= 9s', attainment=0.5).value * 1000:.3f}ms"
    some = sure(half, attainment=0.1)
    assert some.is_share and 0 < some.low < some.value < some.high < 1
    assert sure(half, attainment=(some.low + some.value) / 2).is_open


@pytest.mark.parametrize(
    "limit", ["ttft.p50 <= 1s", "ttft.mean <= 1s", "e2e.p50 <= 9s", "itl.mean <= 15ms", "ttft <= 1s"]
)
def test_only_what_is_measured_after_the_warm_up_counts(limit):
    settings = replace(SETTINGS, shape=ShapeConfig(max_requests=400), load=LoadConfig(concurrency=100, warmup_s=20))
    arm, limits = Arm("a", settings, {"router_mode": "round-robin"}), [read_condition(limit)]
    record = simulate(Run(arm), source_of((), ExperimentConfig())(settings.shape))
    assert 0 < len(record.measured.requests) < len(record.requests)
    [whole] = sureness_in(record, arm, limits, 0.5)
    [measured] = sureness_in(replace(record, requests=record.measured.requests), arm, limits, 0.5)
    assert whole == measured
    outcome = point_of(arm, [record], limits, 0.5).outcomes[0]
    assert (whole.limit, whole.value) == (outcome.limit, pytest.approx(outcome.value))


def test_requests_that_are_within_their_limits_by_less_than_the_models_error_are_no_certainty():
    arm = Arm("a", SETTINGS, {"router_mode": "round-robin"})

    def sure(limit):
        [found] = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read_condition(limit)], 0.5)
        return found

    median = sureness_of(arm, source_of((), ExperimentConfig()), 0, [read_condition("ttft.p50 <= 9s")], 0.5)[0].value
    near, far = (sure(f"ttft <= {median * times * 1000:.3f}ms") for times in (1.05, 9))
    assert (near.is_within_error, far.is_within_error) == (True, False)
    assert near.chance < SURE < far.chance
    assert "; it holds with TTFTs up to 1.05 times as long; for a real engine, " in near.text
    assert f"for a real engine, the chance of {near.limit} is " in doubt([near])


def test_a_cliff_that_is_nearer_than_the_models_error_is_no_certainty():
    sure = Sureness("ttft <= 300 ms in 99%", 1.0, 0.999, 1.0, 0.126, is_share=True)
    assert doubt([sure], Held(1.09, 1.14)) == (
        " This is not certain: a limit is missed beyond 1.09x of the load, which is nearer than the model's error of 12.6%."
    )
    assert doubt([sure], Held(1.13, 1.18)) == doubt([sure], Held(1.0)) == doubt([sure]) == ""
