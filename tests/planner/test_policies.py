"""What each policy asks for, with numbers that a reader can check by hand."""

import itertools
import math
import random

import pytest

from serving.planner.config import PlannerConfig
from serving.planner.observation import RankLoad, RequestTraffic
from serving.planner.planner import Planner
from serving.planner.policies.hpa import desired
from serving.planner.policies.named import PLANNERS
from serving.planner.policies.wva import Fullness, change_of
from tests.planner.fleet import Fleet, FleetPool, facts, replicas, seen, state, timed

MANY = 10_000


def planner(name: str, *pools, **settings) -> Planner:
    return Planner(PlannerConfig(planner=name, **settings), pools or (timed(),))


OWN = """
from serving.planner import Policy, Proposal

class Mine(Policy):
    default_interval_s = 1.0

    def _propose_one(self, now, facts, state):
        waiting = sum(load.num_waiting for load in state.loads)
        return Proposal(state.size + waiting, f"{waiting} requests wait")
"""


def waiting(number: int) -> RankLoad:
    return RankLoad(num_waiting=number)


def traffic(num_requests: int, duration_s: float = 5.0, **changes) -> RequestTraffic:
    return RequestTraffic(duration_s=duration_s, num_requests=num_requests, **{"isl": 100, "osl": 10} | changes)


def test_every_policy_says_in_a_line_what_it_does():
    for kind in PLANNERS.values():
        assert kind.description and "\n" not in kind.description
        assert kind.default_interval_s > 0


def test_a_policy_of_the_users_own_is_named_by_its_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    decision = planner(str(path)).decide(seen(worker=state(1, waiting(7))))
    assert replicas(decision) == {"worker": 8}
    assert decision.changes["worker"].reason == "7 requests wait"


@pytest.mark.parametrize("name", [name for name, kind in PLANNERS.items() if kind.needs_limits])
def test_policies_refuse_to_plan_without_the_limits_and_step_times_that_they_need(name):
    roles = PLANNERS[name].layouts[0]
    pools = [timed(role, role=role) for role in roles]
    with pytest.raises(
        ValueError,
        match=f"planner {name} needs a TTFT limit: set planner_ttft_ms, .* or use --slo 'ttft <= ...'",
    ):
        planner(name, *pools, planner_itl_ms=50)
    with pytest.raises(ValueError, match=f"planner {name} needs an ITL limit: set .* 'itl <= ...' or 'tpot <= ...'"):
        planner(name, *pools, planner_ttft_ms=500)
    untimed = [timed(role, role=role, times=None) for role in roles]
    with pytest.raises(ValueError, match=f"planner {name} needs step times; those of .* are unknown"):
        planner(name, *untimed, planner_ttft_ms=500, planner_itl_ms=50)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("dynamo-sla", "1 aggregated pool or 1 prefill pool and 1 decode pool"),
        ("dynamo-sla-2025", "1 prefill pool and 1 decode pool"),
    ],
)
def test_policies_that_size_for_all_requests_refuse_several_pools_of_a_role(name, layouts):
    with pytest.raises(ValueError) as error:
        planner(name, timed("a"), timed("b"), planner_ttft_ms=500, planner_itl_ms=50)
    assert str(error.value) == f"planner {name} plans {layouts}, not 2 aggregated pools"


@pytest.mark.parametrize("name", [name for name, kind in PLANNERS.items() if kind.needs_traffic])
def test_policies_that_need_the_traffic_change_nothing_without_it(name):
    pools = [timed(role, role=role) for role in PLANNERS[name].layouts[0]]
    decision = planner(name, *pools, planner_ttft_ms=500, planner_itl_ms=50).decide(
        seen(**{pool.name: state(2, waiting(MANY)) for pool in pools})
    )
    assert not decision.targets
    assert decision.notes == ("nothing changes: the requests that arrived are unknown",)


class TestStatic:
    def test_nothing_ever_changes(self):
        decision = planner("static").decide(seen(worker=state(2, waiting(MANY))))
        assert not decision.targets and not decision.notes


class TestHpa:
    @pytest.mark.parametrize(
        ("total", "num_ready", "num_starting", "workers"),
        [
            (400, 2, 0, 4),  # 200 against 100
            (219, 2, 0, 2),  # within 10%
            (221, 2, 0, 3),
            (100, 2, 0, 1),
            (400, 2, 1, 4),  # the starting one counts as idle: 133
            (300, 2, 1, 3),  # exactly what is under way
            (600, 2, 1, 6),
        ],
    )
    def test_the_workers_are_those_that_bring_the_metric_to_its_target(self, total, num_ready, num_starting, workers):
        pool = state(num_ready, num_starting=num_starting)
        assert desired(total, 100, pool, tolerance=0.1) == workers

    def test_a_pool_grows_to_twice_its_size_or_by_four_within_15_s(self):
        ours = planner("hpa")
        assert replicas(ours.decide(seen(0, worker=state(2, waiting(MANY))))) == {"worker": 6}
        assert replicas(ours.decide(seen(14, worker=state(6, waiting(MANY))))) == {"worker": 6}
        assert replicas(ours.decide(seen(29, worker=state(6, waiting(MANY))))) == {"worker": 12}

    def test_a_pool_shrinks_to_what_was_needed_in_the_last_five_minutes(self):
        ours = planner("hpa")
        ours.decide(seen(0, worker=state(4, waiting(3))))
        assert replicas(ours.decide(seen(15, worker=state(4, waiting(1))))) == {"worker": 4}
        assert replicas(ours.decide(seen(300, worker=state(4, waiting(1))))) == {"worker": 4}
        assert replicas(ours.decide(seen(315, worker=state(4, waiting(1))))) == {"worker": 2}

    def test_a_pool_made_smaller_by_hand_is_not_made_larger_again(self):
        ours = planner("hpa")
        ours.decide(seen(0, worker=state(6, waiting(3))))
        decision = ours.decide(seen(15, worker=state(2, waiting(3))))
        assert replicas(decision) == {"worker": 2}
        assert "not the 6 decided" in decision.notes[0]

    @pytest.mark.parametrize(
        ("metric", "load"),
        [("kv_usage", RankLoad(kv_tokens=100_000)), ("concurrency", RankLoad(num_running=90, num_waiting=10))],
    )
    def test_other_metrics_have_their_own_targets(self, metric, load):
        assert replicas(planner("hpa", hpa_metric=metric).decide(seen(worker=state(3, load)))) == {
            "worker": math.ceil(3 / 0.7 if metric == "concurrency" else 3 / 0.75)
        }


class TestKpa:
    def test_the_workers_are_those_that_run_the_mean_number_of_requests(self):
        ours = planner("kpa", kpa_target_concurrency=10)
        ours.decide(seen(0, worker=state(4, RankLoad(num_running=5))))
        decision = ours.decide(seen(10, worker=state(4, RankLoad(num_running=10))))
        assert replicas(decision) == {"worker": 3}  # 20 and 40 requests

    def test_it_halves_a_pool_at_most(self):
        assert replicas(planner("kpa").decide(seen(worker=state(8)))) == {"worker": 4}

    def test_a_panic_grows_at_once_and_does_not_shrink_for_a_minute(self):
        ours = planner("kpa", kpa_target_concurrency=10)
        for now in range(0, 60, 2):
            ours.decide(seen(now, worker=state(2, RankLoad(num_running=10))))
        decision = ours.decide(seen(60, worker=state(2, RankLoad(num_running=100))))
        assert replicas(decision) == {"worker": 7}  # 20, 20, 20 and 200 requests within 6 s
        assert "panic" in decision.targets["worker"].reason
        for now in range(62, 120, 2):
            assert replicas(ours.decide(seen(now, worker=state(7)))) == {"worker": 7}
        assert replicas(ours.decide(seen(124, worker=state(7)))) == {"worker": 3}


class TestWva:
    def test_a_worker_is_added_when_the_spare_queue_is_too_short(self):
        """C14."""
        change, reason = change_of([Fullness(0.5, 1), Fullness(0.6, 2), Fullness(0.75, 4)], PlannerConfig())
        assert change == 1
        assert reason == "spare KV 0.183 (least 0.1), spare queue 2.67 (least 3)"

    @pytest.mark.parametrize(
        ("workers", "change"),
        [
            ([Fullness(0.9, 0), Fullness(0.1, 9)], 1),  # both saturated
            ([Fullness(0.75, 0), Fullness(0.75, 0)], 1),  # spare KV 0.05
            ([Fullness(0.5, 0), Fullness(0.5, 0)], 0),  # one alone would be full
            ([Fullness(0.3, 0), Fullness(0.3, 0)], -1),  # 0.2 would be left
            ([Fullness(0.3, 1.5), Fullness(0.3, 1.5)], 0),  # 2 waiting would be left
            ([Fullness(0.1, 0)], 0),
        ],
    )
    def test_a_worker_leaves_if_the_rest_keep_enough_to_spare(self, workers, change):
        assert change_of(workers, PlannerConfig())[0] == change

    def test_a_worker_leaves_after_a_minute_in_which_it_was_not_needed(self):
        ours = planner("wva")
        ours.decide(seen(0, worker=state(3, RankLoad(kv_tokens=55_000))))
        assert replicas(ours.decide(seen(30, worker=state(3, RankLoad(kv_tokens=10_000))))) == {"worker": 3}
        assert replicas(ours.decide(seen(61, worker=state(3, RankLoad(kv_tokens=10_000))))) == {"worker": 2}


class TestDynamoLoad:
    @pytest.mark.parametrize(
        ("target", "tokens", "workers"),
        [
            ("throughput", 100_000, None),
            ("throughput", 100_001, 3),
            ("throughput", 60_000, None),
            ("throughput", 59_000, None),  # one worker alone would be full
            ("throughput", 49_000, 1),
            ("latency", 40_001, 3),
            ("latency", 10_000, None),
            ("latency", 9_000, 1),
        ],
    )
    def test_decode_workers_follow_the_kv_in_use(self, target, tokens, workers):
        load = RankLoad(decode_kv_tokens=tokens - 1000, queued_decode_kv_tokens=1000, queued_prefill_tokens=MANY)
        ours = planner("dynamo-load", facts("d", role="decode"), dynamo_target=target)
        assert replicas(ours.decide(seen(d=state(2, load)))).get("d") == workers

    @pytest.mark.parametrize(
        ("target", "tokens", "workers"),
        [
            ("throughput", 8000, 3),
            ("throughput", 7999, None),
            ("throughput", 799, 1),
            ("latency", 800, 3),
            ("latency", 1, None),
            ("latency", 0, 1),
        ],
    )
    def test_prefill_workers_follow_queued_tokens_by_the_longest_context(self, target, tokens, workers):
        ours = planner("dynamo-load", facts("p", role="prefill", max_model_len=8000), dynamo_target=target)
        decision = ours.decide(seen(p=state(2, RankLoad(queued_prefill_tokens=tokens))))
        assert replicas(decision).get("p") == workers

    def test_one_full_rank_is_enough_to_grow_and_all_must_be_idle_to_shrink(self):
        ours = planner("dynamo-load")
        full, idle = RankLoad(decode_kv_tokens=150_000), RankLoad()
        assert replicas(ours.decide(seen(worker=state(2, full, idle)))) == {"worker": 3}
        half = RankLoad(decode_kv_tokens=70_000)
        assert not ours.decide(seen(worker=state(2, half, idle))).targets

    def test_queued_prompts_count_as_kv_of_aggregated_workers(self):
        load = RankLoad(decode_kv_tokens=60_000, queued_prefill_tokens=50_000)
        assert replicas(planner("dynamo-load").decide(seen(worker=state(1, load)))) == {"worker": 2}


LIMITS = {"planner_ttft_ms": 200, "planner_itl_ms": 20}
"""A rank decodes 20 requests at once, so that it ends 100 requests of 10 tokens a second. A prompt of 100 takes 10 ms."""


def split(**changes):
    return timed("p", role="prefill", **changes), timed("d", role="decode", **changes)


class TestDynamoSla:
    def test_floors_follow_the_load_every_three_minutes(self):
        ours = planner("dynamo-sla", *split(), **LIMITS)
        pools = {"p": state(1), "d": state(1)}
        for now in range(0, 175, 5):
            assert replicas(ours.decide(seen(now, traffic(1500), **pools))) == {"p": 1, "d": 1}
        decision = ours.decide(seen(175, traffic(1500), **pools))  # 300 requests/s; a prefill worker takes 100
        assert replicas(decision) == {"p": 3, "d": 3}
        assert decision.targets["d"].reason == "the predicted load needs 3"

    def test_a_floor_moves_by_eight_at_most(self):
        ours = planner("dynamo-sla", *split(), **LIMITS)
        decision = ours.decide(seen(180, traffic(180_000, 180), p=state(1), d=state(1)))
        assert replicas(decision) == {"p": 9, "d": 9}

    def test_cached_tokens_need_no_prefill_workers(self):
        ours = planner("dynamo-sla", *split(), **LIMITS)
        decision = ours.decide(seen(180, traffic(300 * 180, 180, hit_share=0.5), p=state(1), d=state(1)))
        assert replicas(decision) == {"p": 2, "d": 3}

    def test_a_pool_grows_by_one_when_all_its_ranks_are_over_the_limit(self):
        ours = planner("dynamo-sla", *split(), **LIMITS)
        over, under = RankLoad(queued_prefill_tokens=2000), RankLoad(queued_prefill_tokens=1500)
        decode = state(1, RankLoad(num_running=18, decode_kv_tokens=1))
        decision = ours.decide(seen(0, traffic(1), p=state(2, over, over), d=decode))
        assert replicas(decision) == {"p": 3, "d": 1}
        assert decision.targets["p"].reason == "TTFT would be 210 ms, its limit 200 ms"
        decision = ours.decide(seen(5, traffic(1), p=state(3, over, under, over), d=decode))
        assert replicas(decision) == {"p": 3, "d": 1}

    @pytest.mark.parametrize(("running", "workers"), [(21, 3), (20, 2), (9, 2), (7, 1)])
    def test_decode_workers_leave_if_the_rest_keep_four_fifths_of_the_limit(self, running, workers):
        ours = planner("dynamo-sla", *split(), **LIMITS)
        load = RankLoad(num_running=running, decode_kv_tokens=running * 100)
        decision = ours.decide(seen(0, traffic(1), p=state(1), d=state(2, load)))
        assert replicas(decision)["d"] == workers

    def test_decode_workers_stay_if_their_kv_would_not_fit_the_rest(self):
        ours = planner("dynamo-sla", *split(), **LIMITS)
        load = RankLoad(num_running=2, decode_kv_tokens=60_000)
        assert replicas(ours.decide(seen(0, traffic(1), p=state(1), d=state(2, load))))["d"] == 2

    def test_aggregated_workers_grow_for_either_limit_and_shrink_for_both(self):
        ours = planner("dynamo-sla", **LIMITS)
        queue = RankLoad(num_running=1, decode_kv_tokens=100, queued_prefill_tokens=5000)
        batch = RankLoad(num_running=30, decode_kv_tokens=3000)
        assert replicas(ours.decide(seen(0, traffic(1), worker=state(2, queue)))) == {"worker": 3}
        assert replicas(ours.decide(seen(5, traffic(1), worker=state(3, batch)))) == {"worker": 4}
        assert replicas(ours.decide(seen(10, traffic(1), worker=state(4)))) == {"worker": 3}


class TestDynamoSla2025:
    def decide(self, **measured):
        ours = planner("dynamo-sla-2025", *split(), **LIMITS)
        # 300 requests/s: of prompts, 3 workers' work; of tokens, 3000/s against 1000/s of a worker.
        return ours.decide(seen(180, traffic(300 * 180, 180, **measured), p=state(2), d=state(2)))

    def test_replicas_divide_the_tokens_by_a_workers_throughput(self):
        measured = {"ttft_s": 0.01, "itl_s": 0.15, "e2e_s": 1.0}  # as the step times have them
        assert replicas(self.decide(**measured)) == {"p": 3, "d": 3}

    def test_a_ttft_shorter_than_expected_takes_fewer_prefill_workers_and_a_longer_one_no_more(self):
        assert replicas(self.decide(ttft_s=0.005))["p"] == 2
        assert replicas(self.decide(ttft_s=5.0))["p"] == 3

    def test_an_itl_longer_than_expected_shrinks_the_batch(self):
        class Affine:
            def step_s(self, prefill_tokens, num_decodes=0, num_kv_tokens=0, *, context_tokens=0):
                return prefill_tokens * 1e-4 + (0.01 + num_decodes * 1e-4 if num_decodes else 0.0)

        pools = split(times=Affine(), max_kv_tokens=105_000)
        decisions = [
            planner("dynamo-sla-2025", *pools, **LIMITS).decide(
                seen(180, traffic(300 * 180, 180, ttft_s=0.01, itl_s=itl_s, e2e_s=0.1), p=state(1), d=state(1))
            )
            for itl_s in (0.013, 0.0195)
        ]
        # 30 requests at once take 13 ms. So 100 fit 20 ms, and a worker brings 5000 tokens/s; or 33 fit 13.3 ms: 2481/s.
        assert [replicas(decision)["d"] for decision in decisions] == [1, 2]

    def test_nothing_changes_while_no_request_has_ended(self):
        decision = self.decide(osl=None)
        assert not decision.targets
        assert decision.notes[0] == "p stays as it is: no request has ended since the last look"

    def test_the_budget_is_shared_in_proportion(self):
        ours = planner("dynamo-sla-2025", *split(), max_gpu_budget=4, **LIMITS)
        decision = ours.decide(seen(180, traffic(300 * 180, 180, ttft_s=0.01), p=state(1), d=state(1)))
        assert replicas(decision) == {"p": 2, "d": 2}


class TestLeadTime:
    def test_pools_are_sized_for_the_requests_that_come_with_headroom(self):
        ours = planner("lead-time", *split(startup_s=60), **LIMITS)
        decision = ours.decide(seen(5, traffic(1000), p=state(3), d=state(3)))
        assert replicas(decision) == {"p": 3, "d": 3}  # 200/s need 2 workers, with 20% headroom 2.5

    def test_aggregated_workers_are_sized_for_both(self):
        ours = planner("lead-time", timed(startup_s=60), planner_ttft_ms=200, planner_itl_ms=40)
        decision = ours.decide(seen(5, traffic(250), worker=state(1)))
        # A step with 20 requests takes 20 ms for their tokens and 20 ms for 200 prompt tokens: 50 requests/s.
        assert "load needs 1 workers at 50 requests/s" in decision.targets["worker"].reason

    def test_a_backlog_takes_more_workers_the_longer_it_would_last(self):
        wanted = [
            replicas(
                planner("lead-time", *split(startup_s=60), **LIMITS).decide(
                    seen(5, traffic(400), p=state(1), d=state(1, waiting(number)))
                )
            )["d"]
            for number in (0, 10, 5_000, 19_000)
        ]
        assert wanted == [1, 1, 3, 4]
        # 190 - 0.2 x 60 - 0.2 = 177.8 worker-seconds wait; the root of 3 x 0.8 x 177.8 / 60 is 2.7, beside 1 worker.

    def test_a_trend_is_met_a_start_up_time_ahead(self):
        ours = planner("lead-time", *split(startup_s=60), load_predictor="kalman", **LIMITS)
        for now in range(5, 605, 5):
            decision = ours.decide(seen(now, traffic(5 * now // 10), p=state(1), d=state(1)))
        # 58.5 requests/s in the last 30 s, and 3 more every 30 s: 67.5 in the third 30 s from then, of a worker's 100.
        assert "load needs 0.67" in decision.targets["p"].reason

    def test_workers_that_are_not_needed_leave_after_ten_start_up_times(self):
        fleet = Fleet(
            planner("lead-time", *split(startup_s=60), **LIMITS),
            *(FleetPool(pool, 3) for pool in split(startup_s=60)),
            traffic=lambda now: traffic(1000 if now <= 100 else 250),
        )
        sizes = {}
        while fleet.now < 900:
            fleet.step()
            sizes[fleet.now] = fleet.sizes["d"]
        assert sizes[690] == 3
        assert sizes[800] == 1

    def test_a_decode_pool_stays_until_a_request_has_ended(self):
        decision = planner("lead-time", *split(), **LIMITS).decide(
            seen(5, traffic(1000, osl=None), p=state(1), d=state(1))
        )
        assert replicas(decision)["p"] == 3
        assert decision.notes == ("d stays as it is: no request has ended yet",)

    def test_chance_alone_changes_a_pool_now_and_then_at_most(self):
        rng = random.Random(5)
        pools = split(startup_s=60)
        fleet = Fleet(
            planner("lead-time", *pools, **LIMITS),
            *(FleetPool(pool, 3) for pool in pools),
            traffic=lambda _: traffic(sum(rng.random() < 0.1 for _ in range(10_000))),  # 200/s, give or take
        )
        sizes = []
        while fleet.now < 3600:
            fleet.step()
            sizes.append(fleet.sizes["d"])
        assert sum(size != after for size, after in itertools.pairwise(sizes)) <= 2
