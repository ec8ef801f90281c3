"""A run is cut only if it has missed a limit for certain, and simulated without a cache only if that changes nothing."""

import pytest
from msgspec import structs

from dynabench.arm import Arm, Run, Settings
from dynabench.capacity.cutoff import Cutoff, DecidedError
from dynabench.capacity.lean import lean
from dynabench.capacity.trial import attempt
from dynabench.deployment.description import Deployment, Pool
from dynabench.interrupt import Interrupt
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.config import TimingConfig
from reports.figures import slo
from reports.figures.outcomes import num_required
from reports.summarize import summarize
from reports.sweep.points import Cut, Point
from tests.support.workloads import bursty
from workloads import Request, Workload
from workloads.pacing import LoadConfig
from workloads.shape import shape

LIMITS = [
    slo.parse_slo(f"{metric}.{statistic} <= {value}ms")
    for metric, values in {
        "ttft": (50, 500, 5000),
        "itl": (8, 15, 40),
        "e2e": (500, 5000),
        "tpot": (8, 15),
    }.items()
    for statistic in ("mean", "p50", "p90", "p99", "max")
    for value in values
]
EACH = [slo.parse_slo("ttft <= 200ms"), slo.parse_slo("e2e <= 2s")]


def deployed(workers=1, **engine):
    pool = Pool(
        replicas=workers,
        mocker=EngineConfig(max_num_batched_tokens=2048, **engine),
        timing=TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100"),
    )
    return Deployment(pools=(pool,))


def tried(workload, settings, limits, *, repeats=1):
    with Interrupt() as interrupt:
        arm = Arm("tried", settings, {"router_mode": "round-robin"})
        found, _ = attempt(arm, lambda config: shape(workload, config), 0, repeats, limits, 0.99, interrupt.flag, False)
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_missed_when_a_run_is_cut_is_missed_by_the_whole_run(workers):
    whole = bursty(1500)
    run = Run.alone(Settings(deployed(workers)))
    figures = summarize([simulate(run, whole)], LIMITS, with_intervals=False).arms["round-robin"]
    missed = {outcome.limit for outcome in figures.outcomes if outcome.state == "missed"}
    decided = set()
    for limit in LIMITS:
        try:
            simulate(run, whole, watch=Cutoff([limit], whole, 0.99, repeats=1))
        except DecidedError as error:
            decided |= {outcome.limit for outcome in error.missed}
    assert decided <= missed
    assert decided, "some are so tight that a part of the run decides"


def test_a_run_that_meets_its_limits_is_never_cut_and_one_that_is_cut_says_when_and_why():
    whole, limits = bursty(1500), [slo.parse_slo("ttft.p99 <= 300ms")]
    assert isinstance(tried(whole, Settings(deployed(8)), limits), Point)
    cut = tried(whole, Settings(deployed(1)), limits)
    assert isinstance(cut, Cut)
    assert cut.requests < 1500
    most = 1500 - num_required(limits[0], 1500, 0.99)
    [outcome] = cut.outcomes
    assert outcome.reason.startswith(f"after {cut.requests:,} of 1,500 requests, ")
    assert outcome.reason.endswith(f" requests exceed it and at most {most} may, so the run was cut")


def test_limits_on_each_request_cut_a_run_too():
    cut = tried(bursty(1500), Settings(deployed(1)), EACH)
    assert isinstance(cut, Cut)
    assert cut.requests < 1500


def test_a_closed_loop_is_cut_by_the_requests_that_have_ended():
    settings = Settings(deployed(1), load=LoadConfig(concurrency=250))
    cut = tried(bursty(1500), settings, [slo.parse_slo("e2e.p90 <= 100ms")])
    assert isinstance(cut, Cut)
    assert cut.requests < 1500


def test_where_only_requests_of_some_time_count_no_run_is_cut():
    settings = Settings(deployed(1), load=LoadConfig(warmup_s=1))
    assert isinstance(tried(bursty(500), settings, [slo.parse_slo("e2e.p50 <= 1ms")]), Point)


def test_of_repeats_one_that_misses_too_little_for_all_of_them_is_not_cut():
    def decided_after(repeats):
        whole, limits = bursty(1500), [slo.parse_slo("e2e.p90 <= 100ms")]
        with pytest.raises(DecidedError) as error:
            simulate(Run.alone(Settings(deployed(1))), whole, watch=Cutoff(limits, whole, 0.99, repeats=repeats))
        return error.value.cluster.num_ended

    assert decided_after(1) < decided_after(2)


def lengths(count, *, output=100):
    """Requests that share nothing, faster than one worker computes them."""
    requests = [
        Request(number / 40, 200 + number * 7919 % 800, output + number * 31 % 50, (number,)) for number in range(count)
    ]
    return Workload("lengths", 2048, requests, knows_prefixes=False)


def without_time(point):
    return structs.replace(point, wall_s=0)


@pytest.mark.parametrize("blocks", [4000, 90])
def test_prompts_that_share_nothing_give_the_same_point_with_a_cache_whether_or_not_somebody_is_preempted(blocks):
    workload, limits = lengths(300), [slo.parse_slo("ttft.p90 <= 1000s")]
    settings = Settings(deployed(1, num_gpu_blocks=blocks, block_size=64))
    arm = Arm("tried", settings, {"router_mode": "round-robin"})
    assert lean(arm, workload) is not arm
    found = tried(workload, settings, limits)
    exact = tried(Workload("lengths", 2048, workload.requests, knows_prefixes=True), settings, limits)
    assert (found.preemptions > 0) is (blocks == 90)
    assert without_time(found).e2e_sched == exact.e2e_sched
    assert (found.itl, found.preemptions) == (exact.itl, exact.preemptions)


def test_prompts_that_may_share_something_keep_the_cache():
    arm = Arm("tried", Settings(deployed(1)), {})
    assert lean(arm, bursty(10)) is arm
