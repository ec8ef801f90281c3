"""What holds whatever the policy."""

import math
import random
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynabench.deployment.description import Deployment
from dynabench.deployment.paths import hints, own, sections, settings_of_pool
from serving.planner.config import PlannerConfig
from serving.planner.observation import RankLoad, RequestTraffic
from serving.planner.planner import Planner
from serving.planner.policies.named import PLANNERS
from tests.planner.fleet import Fleet, FleetPool, facts, replicas, seen, state, timed
from tests.support.examples import worth

FULL = RankLoad(
    num_running=100, num_waiting=50, kv_tokens=100_000, decode_kv_tokens=90_000, queued_decode_kv_tokens=50_000
)
FULL_PREFILL = RankLoad(num_running=1, num_waiting=50, queued_prefill_tokens=500_000)
BUSY = RankLoad(num_running=50, kv_tokens=80_000, decode_kv_tokens=80_000)
IDLE = RankLoad()


def planner(*pools, name: str = "dynamo-load", **settings) -> Planner:
    return Planner(PlannerConfig(planner=name, **settings), pools or (facts(),))


def test_nothing_changes_while_loads_are_missing():
    decision = planner().decide(seen(worker=state(3, FULL, FULL)))
    assert not decision.targets
    assert decision.notes == ("nothing changes: the loads of 1 of 3 ranks of worker are missing",)


def test_nothing_changes_in_any_pool_while_those_of_one_are_missing():
    pools = facts("p", role="prefill"), facts("d", role="decode")
    decision = planner(*pools).decide(seen(p=state(1, FULL_PREFILL), d=state(2, FULL, FULL, FULL)))
    assert set(replicas(decision)) == {"p", "d"}
    decision = planner(*pools).decide(seen(p=state(1, FULL_PREFILL), d=state(3, FULL, FULL)))
    assert not decision.targets


def test_each_rank_of_a_worker_reports_its_load():
    decision = planner(facts(num_ranks=2)).decide(seen(worker=state(2, FULL, FULL)))
    assert decision.notes == ("nothing changes: the loads of 2 of 4 ranks of worker are missing",)


def test_nothing_changes_while_a_pool_is_out_of_sight():
    decision = planner().decide(seen())
    assert decision.notes == ("nothing changes: the state of worker is unknown",)


def test_pools_that_are_not_planned_are_left_alone():
    assert replicas(planner().decide(seen(worker=state(2, FULL), other=state(2, FULL)))) == {"worker": 3}


def test_a_reduction_may_cancel_starting_workers():
    decision = planner().decide(seen(worker=state(1, IDLE, num_starting=2)))
    assert replicas(decision) == {"worker": 1}


def test_no_pool_grows_while_workers_start():
    pools = facts("p", role="prefill"), facts("d", role="decode")
    assert not planner(*pools).decide(seen(p=state(1, FULL_PREFILL), d=state(1, BUSY, num_starting=1))).targets


def test_a_start_that_takes_too_long_is_given_up_and_does_not_keep_the_pool_from_growing():
    ours = planner(startup_timeout_s=60)
    assert not ours.decide(seen(0, worker=state(2, FULL, num_starting=1))).targets
    assert not ours.decide(seen(60, worker=state(2, FULL, num_starting=1))).targets
    decision = ours.decide(seen(61, worker=state(2, FULL, num_starting=1)))
    assert replicas(decision) == {"worker": 2}
    assert decision.notes == ("worker: 1 start took longer than 60 s and is given up",)
    assert replicas(ours.decide(seen(66, worker=state(2, FULL)))) == {"worker": 3}


def test_a_start_that_hangs_in_a_pool_at_its_minimum_gets_another_beside_it():
    ours = planner(startup_timeout_s=60, min_endpoint=2)
    ours.decide(seen(0, worker=state(1, BUSY, num_starting=1)))
    decision = ours.decide(seen(61, worker=state(1, BUSY, num_starting=1)))
    assert replicas(decision) == {"worker": 3}
    assert not ours.decide(seen(66, worker=state(1, BUSY, num_starting=2))).targets


def test_a_start_that_fails_is_tried_again():
    ours = planner()
    assert replicas(ours.decide(seen(0, worker=state(2, FULL)))) == {"worker": 3}
    assert not ours.decide(seen(5, worker=state(2, FULL, num_starting=1))).targets
    decision = ours.decide(seen(10, worker=state(2, FULL)))
    assert replicas(decision) == {"worker": 3}
    assert decision.notes == ("worker has 2 workers, not the 3 decided: planning continues from there",)


def test_a_pool_changed_by_hand_is_taken_as_it_is():
    ours = planner()
    ours.decide(seen(0, worker=state(2, FULL)))
    decision = ours.decide(seen(5, worker=state(6, BUSY)))
    assert not decision.targets
    assert decision.notes == ("worker has 6 workers, not the 3 decided: planning continues from there",)
    assert ours.decide(seen(10, worker=state(6, BUSY))).notes == ()


def test_a_pool_that_is_slow_to_follow_is_not_taken_for_one_changed_by_hand():
    ours = planner()
    ours.decide(seen(0, worker=state(2, FULL)))
    assert ours.decide(seen(5, worker=state(2, FULL))).notes == ()


@pytest.mark.parametrize("name", ["hpa", "dynamo-load"])
def test_a_pool_grows_to_max_replicas_worth(name):
    decision = planner(name=name, max_replicas=3).decide(seen(worker=state(3, FULL)))
    assert replicas(decision) == {"worker": 3}


def test_a_decision_takes_at_most_the_largest_step():
    ours = planner(name="hpa", hpa_target=1, max_scale_step=2)
    assert replicas(ours.decide(seen(worker=state(3, FULL)))) == {"worker": 5}


def test_a_full_budget_keeps_pools_from_growing():
    pools = facts("p", role="prefill"), facts("d", role="decode")
    decision = planner(*pools, max_gpu_budget=4).decide(seen(p=state(2, FULL_PREFILL), d=state(2, FULL)))
    assert replicas(decision) == {"p": 2, "d": 2}
    assert "the GPU budget makes that 2" in decision.targets["d"].reason


def test_at_a_full_budget_one_pool_gives_what_another_gets_once_it_is_free():
    pools = facts("p", role="prefill"), facts("d", role="decode")
    ours = planner(*pools, max_gpu_budget=4)
    decision = ours.decide(seen(0, p=state(2, IDLE), d=state(2, FULL)))
    assert replicas(decision) == {"p": 1, "d": 2}
    assert "1 worker must wait until GPUs are free" in decision.targets["d"].reason
    decision = ours.decide(seen(5, p=state(1, IDLE, num_draining=1), d=state(2, FULL)))
    assert replicas(decision) == {"d": 2}
    decision = ours.decide(seen(10, p=state(1, IDLE), d=state(2, BUSY)))
    assert replicas(decision) == {"d": 3}


def test_at_a_full_budget_no_pool_gives_what_is_too_little_for_the_other():
    pools = facts("p", role="prefill"), facts("d", role="decode", gpus_per_worker=4)
    decision = planner(*pools, max_gpu_budget=10).decide(seen(p=state(2, IDLE), d=state(2, FULL)))
    assert replicas(decision) == {"p": 2, "d": 2}


def test_a_rebalance_whose_start_hangs_does_not_stick():
    pools = facts("p", role="prefill"), facts("d", role="decode")
    ours = planner(*pools, max_gpu_budget=4, startup_timeout_s=60)
    fleet = Fleet(ours, FleetPool(pools[0], 2, IDLE), FleetPool(pools[1], 2, RankLoad(decode_kv_tokens=300_000)))
    while fleet.sizes != {"p": 1, "d": 3}:
        fleet.step([math.inf])
        assert fleet.gpus <= 4
    fleet.pools["d"].total = RankLoad(decode_kv_tokens=150_000)
    fleet.pools["p"].total = RankLoad(queued_prefill_tokens=300_000)
    while fleet.sizes != {"p": 2, "d": 2}:
        fleet.step()
        assert fleet.gpus <= 4
        assert fleet.now < 200


def test_pools_over_their_budget_shrink_in_proportion():
    pools = facts("p", role="prefill"), facts("d", role="decode")
    decision = planner(*pools, max_gpu_budget=8).decide(
        seen(p=state(6, RankLoad(queued_prefill_tokens=50_000)), d=state(6, BUSY))
    )
    assert replicas(decision) == {"p": 4, "d": 4}


def test_gpus_of_draining_workers_are_in_use():
    decision = planner(max_gpu_budget=4).decide(seen(worker=state(3, FULL, num_draining=1)))
    assert replicas(decision) == {"worker": 3}


def test_pools_keep_min_gpu_budget():
    decision = planner(min_gpu_budget=3).decide(seen(worker=state(3, IDLE)))
    assert replicas(decision) == {"worker": 3}
    assert replicas(planner(name="static", min_gpu_budget=5).decide(seen(worker=state(3)))) == {"worker": 5}


def test_a_pool_below_its_minimum_grows():
    assert replicas(planner(name="static", min_endpoint=2).decide(seen(worker=state(0)))) == {"worker": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "leadtime"}, "planner 'leadtime' is unknown; did you mean lead-time?"),
        (
            {"max_gpu_budget": 2},
            "max_gpu_budget must be at least 4, the GPUs of min_endpoint 1 in each pool, not 2",
        ),
        ({"min_endpoint": 3, "max_replicas": 2}, "max_replicas must be at least min_endpoint (3), not 2"),
        ({"min_gpu_budget": 9, "max_gpu_budget": 8}, "min_gpu_budget must be at most max_gpu_budget (8), not 9"),
        ({"max_gpu_budget": 0}, "max_gpu_budget must be at least 1, not 0"),
        (
            {"startup_timeout_s": 30},
            "startup_timeout_s must be at least the start-up time of p (40 s), not 30",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(settings, message):
    pools = facts("p", gpus_per_worker=2, startup_s=40), facts("d", gpus_per_worker=2)
    with pytest.raises(ValueError) as error:
        planner(*pools, **settings)
    assert str(error.value) == message


LOADS = st.sampled_from([IDLE, BUSY, FULL, FULL_PREFILL])
LIMITS = {"planner_ttft_ms": 500, "planner_itl_ms": 100}
EACH_LAYOUT = [
    (name, layout)
    for name, kind in PLANNERS.items()
    for layout in kind.layouts or (("aggregated",), ("decode", "prefill"))
]


@settings(max_examples=worth(300), deadline=None)
@given(
    st.sampled_from(EACH_LAYOUT),
    st.tuples(*[st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 3))] * 2),
    st.integers(0, 12),
    st.lists(st.tuples(LOADS, st.integers(0, 3000)), min_size=20, max_size=60),
    st.integers(0, 2**32),
)
def test_whatever_fails_hangs_or_dies_decisions_keep_to_the_limits(kind, sizes, spare, work, seed):
    name, layout = kind
    rng = random.Random(seed)
    pools = [
        FleetPool(timed(role, role=role, gpus_per_worker=gpus, startup_s=20), number, drain_s=rng.choice([0, 12, 60]))
        for role, (gpus, number) in zip(layout, sizes, strict=False)
    ]
    budget = sum(pool.gpus for pool in pools) + spare
    config = PlannerConfig(
        planner=name,
        max_gpu_budget=budget,
        min_gpu_budget=rng.choice([None, 1, budget]),
        max_replicas=4,
        startup_timeout_s=45,
        **LIMITS,
    )
    fleet = Fleet(Planner(config, [pool.facts for pool in pools]), *pools)
    for load, num_requests in work:
        pool = rng.choice(pools)
        pool.total = load
        fleet.traffic = lambda _, number=num_requests: traffic_of(number, fleet.planner.interval_s)
        if pool.starts and rng.random() < 0.2:
            pool.starts.pop()  # a start fails
        if pool.num_ready > 1 and rng.random() < 0.1:
            pool.num_ready -= 1  # a worker dies
        before = fleet.sizes
        decision = fleet.step([math.inf if rng.random() < 0.3 else 20])
        assert fleet.gpus <= budget
        for role, target in decision.targets.items():
            assert min(before[role], 1) <= target.replicas <= 4
            assert "\n" not in target.reason


def traffic_of(num_requests: int, duration_s: float) -> RequestTraffic:
    return RequestTraffic(
        duration_s=duration_s, num_requests=num_requests, isl=100, osl=10, ttft_s=0.05, itl_s=0.05, e2e_s=0.5
    )


@pytest.mark.parametrize("share", [0.1, 1.0])
@pytest.mark.parametrize(("name", "layout"), EACH_LAYOUT)
def test_pools_with_a_steady_load_stay_as_they_are_once_they_fit_it(name, layout, share):
    """Of 150 requests/s, and of the tenth of it."""
    pools = [
        FleetPool(
            timed(role, role=role, startup_s=20),
            3,
            RankLoad(
                num_running=round(150 * share),
                kv_tokens=round(150_000 * share),
                decode_kv_tokens=0 if role == "prefill" else round(150_000 * share),
            ),
        )
        for role in layout
    ]
    ours = Planner(PlannerConfig(planner=name, **LIMITS), [pool.facts for pool in pools])
    fleet = Fleet(ours, *pools, traffic=lambda _: traffic_of(round(150 * share * ours.interval_s), ours.interval_s))
    while fleet.now < 2000:
        fleet.step()
    settled = fleet.sizes
    while fleet.now < 4000:
        fleet.step()
        assert fleet.sizes == settled


@pytest.mark.parametrize(("name", "layout"), EACH_LAYOUT)
def test_equal_observations_lead_to_equal_decisions(name, layout):
    runs = []
    for _ in range(2):
        rng = random.Random(7)
        pools = [FleetPool(timed(role, role=role, startup_s=20), 2) for role in layout]
        ours = Planner(PlannerConfig(planner=name, **LIMITS), [pool.facts for pool in pools])
        fleet = Fleet(ours, *pools, traffic=lambda _: traffic_of(rng.randrange(3000), 5.0))  # noqa: B023
        for _ in range(50):
            pools[0].total = rng.choice([IDLE, BUSY, FULL, FULL_PREFILL])
            runs.append(fleet.step())
    assert runs[:50] == runs[50:]


def test_no_setting_of_a_planner_has_a_name_that_another_setting_has():
    others: set[str] = set(own(Deployment))
    for section, kind in sections(Deployment).items():
        if kind is not PlannerConfig:
            others |= {*hints(kind), *(f"{section}_{name}" for name in hints(kind))}
    for engine in ("mocker", "vllm"):
        others |= set(settings_of_pool(engine))
    assert not others & {field.name for field in fields(PlannerConfig)}
