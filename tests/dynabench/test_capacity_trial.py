"""What a part of the workload shows for certain, the whole workload shows, too."""

import pytest
from msgspec import structs

from dynabench.arm import Arm, Run, Settings
from dynabench.capacity.trial import WORTH_CUTTING, attempt, busiest, certain_misses
from dynabench.deployment.description import Deployment, Pool
from dynabench.interrupt import Interrupt
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.figures import slo
from reports.figures.outcomes import state_of
from reports.summarize import summarize
from tests.support.workloads import bursty
from workloads import Request, Workload
from workloads.pacing import LoadConfig
from workloads.shape import ShapeConfig, shape


@pytest.fixture(scope="module")
def source():
    whole = bursty(1500)
    return lambda config: shape(whole, config)


def simulated(workload, workers):
    pool = Pool(
        replicas=workers,
        mocker=EngineConfig(max_num_batched_tokens=2048),
        timing=TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100"),
    )
    return simulate(Run.alone(Settings(Deployment(pools=(pool,)))), workload)


def test_the_busiest_part_is_where_most_tokens_come(source):
    part = busiest(source, ShapeConfig(rate_scale=2.0))
    whole, cut = source(ShapeConfig()), source(part)
    assert part.rate_scale == 2.0
    tokens = sum(request.input_length + request.output_length for request in cut)
    assert tokens > 2 / 8 * sum(request.input_length + request.output_length for request in whole)
    assert busiest(source, ShapeConfig(max_requests=10)) is None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_missed_for_certain_is_missed(source, workers):
    whole = source(ShapeConfig())
    part = simulated(source(busiest(source, ShapeConfig())), workers)
    limits = [
        slo.parse_slo(f"{metric}.{statistic} <= {value}ms")
        for metric, values in {"ttft": (50, 500, 5000), "itl": (8, 15, 40), "e2e": (500, 5000)}.items()
        for statistic in ("mean", "p50", "p90", "p99")
        for value in values
    ]
    figures = summarize([simulated(whole, workers)], limits, with_intervals=False).arms["round-robin"]
    missed = {outcome.limit for outcome in figures.outcomes if outcome.state == "missed"}
    certain = {outcome.limit for outcome in certain_misses(part, whole, limits, 0.99)}
    assert certain <= missed
    assert certain, "some are so tight that the part shows it"
    assert state_of(certain_misses(part, whole, limits, 0.99)) == "missed"


def test_times_that_begin_elsewhere_than_at_0_are_not_cut():
    whole = bursty(1500)
    later = [structs.replace(request, arrival_s=request.arrival_s + 1e9) for request in whole.requests]
    assert busiest(lambda config: shape(Workload("later", 16, later), config), ShapeConfig()) is None


def test_a_closed_loop_is_not_judged_by_a_part_which_would_begin_with_a_burst_of_its_own():
    lengths = [1000 if 2000 <= number < 2500 else 10 for number in range(WORTH_CUTTING)]
    requests = [
        Request(float(number), length, 100 + number * 7919 % 200, (number,)) for number, length in enumerate(lengths)
    ]
    whole = Workload("closed", 2048, requests, knows_prefixes=False)
    pool = Pool(timing=TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100"))
    settings = Settings(Deployment(pools=(pool,)), load=LoadConfig(concurrency=250))
    arm, limits = Arm("closed", settings, {}), [slo.parse_slo("ttft.p95 <= 800ms")]
    with Interrupt() as interrupt:
        found, _ = attempt(arm, lambda config: shape(whole, config), 0, 1, limits, 0.99, interrupt.flag, False)
    assert found.state == "met"
