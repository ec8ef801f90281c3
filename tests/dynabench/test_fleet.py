"""A simulated fleet that changes: workers start, leave, die and slow down while requests are served."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.fleet import FleetConfig
from dynabench.virtual.run import cluster_of, simulate
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from reports.figures.insight import remarks
from serving.router import ROUTER_MODES
from tests.dynabench.test_handover import BLOCK, apart, clusters, workload
from tests.support.examples import worth
from workloads import Request, Workload

TIMING = TimingConfig(timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0)


def aggregated(events="", *, replicas=2, mode="round-robin", gpus=None, startup_s=5.0, **fleet):
    engine = EngineConfig(block_size=BLOCK, num_gpu_blocks=200)
    return Deployment(
        pools=(Pool(replicas=replicas, mocker=engine, timing=TIMING),),
        router_mode=mode,
        gpus=gpus,
        fleet=FleetConfig(events=events, startup_s=startup_s, **fleet),
    )


def simulated(deployment, requests):
    """Return the finished cluster and the record of a run."""
    plan = Run.alone(Settings(deployment))
    made = cluster_of(plan, requests)
    made.run()
    return made, simulate(plan, requests)


def counts(made, pool="worker"):
    """Return the history of a pool as (time, starting, ready, draining)."""
    return [(row.time_s, row.starting, row.ready, row.draining) for row in made.fleet.history[pool]]


def num_generated(deployment, requests, at_s):
    """Return how many tokens the first request has at a time from workers that it has left."""
    made = cluster_of(Run.alone(Settings(deployment)), requests)
    made.resume(at_s)
    return made.flights[0].num_generated


STEADY = workload(*[(0.1 * place, 96, 100) for place in range(100)])


def test_workers_that_are_added_take_requests_once_they_are_ready():
    made, record = simulated(aggregated("at 1s: +2"), STEADY)
    assert counts(made) == [(0, 0, 2, 0), (1, 2, 2, 0), (6, 0, 4, 0)]
    assert set(record.requests.worker[record.requests.sent_s < 6]) == {0, 1}
    assert set(record.requests.worker[record.requests.sent_s > 6]) == {0, 1, 2, 3}


def test_workers_that_leave_finish_their_requests_first():
    made, record = simulated(aggregated("at 2s: -1"), STEADY)
    history = counts(made)
    assert history[1] == (2, 0, 1, 1)
    gone = 1 if made.fleet.workers[1].state == "gone" else 0
    left_s = made.fleet.workers[gone].until_s
    assert history[2] == (left_s, 0, 1, 0)
    mine = record.requests.worker == gone
    assert left_s == pytest.approx(record.requests.last_token_s[mine].max())
    assert (record.requests.sent_s[mine] <= 2).all()
    assert made.flights.num_lost == 0


def test_a_worker_that_leaves_within_a_limit_passes_on_what_it_has_not_finished():
    made, record = simulated(aggregated("at 2s: -1", drain_policy="bounded", drain_limit_s=0.25), STEADY)
    assert counts(made)[1:] == [(2, 0, 1, 1), (2.25, 0, 1, 0)]
    assert made.flights.num_lost > 0
    assert record.requests.succeeded.all()


def test_a_worker_that_dies_is_replaced_and_its_answers_go_on_where_they_stopped():
    """One request, which has 80 of its 100 tokens when its worker dies, and needs another prefill."""
    world, requests = aggregated("at 1s: kill worker 0"), workload((0.0, 96, 100))
    made, record = simulated(world, requests)
    assert counts(made) == [(0, 0, 2, 0), (1, 1, 1, 0), (6, 0, 2, 0)]
    assert num_generated(world, requests, at_s=1.05) == 81
    [last_s] = record.requests.last_token_s
    assert last_s == pytest.approx(1.0 + 0.2 + 18 * 0.01)
    assert record.requests.first_token_s[0] == pytest.approx(0.2)
    gaps = [row[0] for row in record.gaps for _ in range(int(row[3]))]
    assert sorted(gaps) == pytest.approx([0.01] * 98 + [0.2])
    assert record.requests.osl.tolist() == [100]


def test_a_worker_that_would_die_after_the_last_answer_has_not_died():
    _, record = simulated(aggregated("at 1s: kill worker 0; at 1000s: kill worker 1"), workload((0.0, 96, 100)))
    [pool] = record.fleet.pools
    assert (pool.died, pool.died_s) == (1, (1.0,))


def test_a_worker_that_hands_over_passes_on_the_kv_and_leaves_once_it_was_read():
    """Forty-one tokens are said by the first worker; their KV, 9 blocks of 1 MiB, takes 10 ms to be read."""
    deployment = aggregated("at 0.605s: drain worker 0", drain_policy="hand-over")
    transfer = TransferConfig(bandwidth_gb_s=9 * BLOCK / 1000, latency_ms=0.0, kv_bytes_per_token=1e6 / 1.0)
    world, requests = replace(deployment, transfer=transfer), workload((0.0, 96, 100))
    made, record = simulated(world, requests)
    assert num_generated(world, requests, at_s=0.7) == 41
    assert made.flights.num_lost == 0
    left_s = made.fleet.workers[0].until_s
    assert left_s == pytest.approx(0.605 + 1.0, rel=0.02)
    [last_s] = record.requests.last_token_s
    assert record.requests.osl.tolist() == [100]
    assert last_s == pytest.approx(left_s + 0.2 + 58 * 0.01)
    gaps = [row[0] for row in record.gaps for _ in range(int(row[3]))]
    assert len(gaps) == 99


def test_a_worker_that_is_lost_is_not_replaced():
    made, _ = simulated(aggregated("at 1s: lose worker 0; at 2s: lose worker 1; at 3s: =1"), STEADY)
    assert counts(made) == [(0, 0, 2, 0), (1, 0, 1, 0), (2, 0, 0, 0), (3, 1, 0, 0), (8, 0, 1, 0)]


@pytest.mark.parametrize("mode", sorted(ROUTER_MODES))
def test_in_every_router_mode_requests_fail_while_there_is_no_worker(mode):
    requests = workload((0.0, 96, 10), (2.0, 96, 10), (9.0, 96, 10))
    _, record = simulated(aggregated("at 1s: =0; at 3s: =20", mode=mode), requests)
    assert record.requests.error.tolist() == ["", "the router knows no worker", ""]


def test_requests_that_come_while_there_is_no_worker_fail_and_those_that_had_one_wait():
    made, record = simulated(aggregated("at 1s: kill worker 0, kill worker 1"), STEADY)
    sent_s, failed = record.requests.sent_s, ~record.requests.succeeded
    assert set(record.requests.error[failed]) == {"the router knows no worker"}
    assert failed.tolist() == [bool(1 <= time < 6) for time in sent_s]
    assert made.flights.num_lost == 10
    assert record.requests.osl[failed].sum() == 0


@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_where_disaggregation_is_enforced_requests_wait_for_a_prefill_worker_as_those_that_lost_one_do(flow):
    world = apart(timing=TIMING, enforce_disagg=True, flow=flow)
    arrivals = [(0.0, 96, 5), (2.0, 96, 5), (30.9, 96, 5), (31.1, 96, 5), (50.0, 96, 5)]
    back = replace(world, fleet=FleetConfig(events="at 1s: =0 prefill; at 57s: +1 prefill", startup_s=4.0))
    _, record = simulated(back, workload(*arrivals))
    reason = "there is no prefill worker, and enforce_disagg is on"
    assert record.requests.error.tolist() == ["", reason, reason, "", ""]
    assert record.requests.prefill_worker.tolist() == [0, None, None, 2, 2]
    assert (record.requests.first_token_s[3:] > 61.0).all()


def test_requests_that_follow_one_which_waits_at_the_router_in_vain_fail_after_it():
    """The only worker leaves while the second waits at the router; the third follows it."""
    [first, second, third] = workload((0.0, 900, 10), (0.1, 900, 10), (0.2, 96, 10)).requests
    requests = Workload("w", BLOCK, [first, second, structs.replace(third, after=(1,))])
    _, record = simulated(aggregated("at 0.15s: drain worker 0", replicas=1, mode="kv+late(100)"), requests)
    nobody = "it waited at the router, but no worker became available", "the router knows no worker"
    assert record.requests.error.tolist() == ["", *nobody]


def test_a_worker_that_dies_while_it_is_slow_says_nothing_more():
    """Its time to recover comes after its death; what it would have computed until then does not count."""
    deployment = aggregated("at 0.5s: slow worker 0 x3 for 1s; at 1s: lose worker 0")
    _, record = simulated(deployment, workload((0.0, 96, 100)))
    assert sum(int(row[3]) for row in record.gaps) == 99


def test_a_request_that_loses_its_worker_too_often_fails():
    kills = "; ".join(f"at {1 + place}s: kill worker {place}" for place in range(6))
    deployment = aggregated(kills, replicas=1, startup_s=0.0)
    _, record = simulated(deployment, workload((0.9, 96, 1000)))
    assert record.requests.error.tolist() == ["its worker is gone and the migration limit of 3 is exhausted"]


@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_an_answer_that_went_on_and_has_become_too_long_for_a_prefill_worker_fails_alone(flow, fallback):
    """The first has more than 176 tokens when its worker dies, and needs 12 blocks where there are 11."""
    deployment = apart(1, 2, flow=flow, prefill_fallback=fallback)
    prefill, decode = deployment.pools
    prefill = replace(prefill, mocker=replace(prefill.mocker, num_gpu_blocks=12))
    world = replace(
        deployment, pools=(prefill, decode), fleet=FleetConfig(events="at 1.05s: kill worker 1", startup_s=5.0)
    )
    made, record = simulated(world, workload((0.0, 96, 100), (0.01, 96, 100), (2.0, 96, 2)))
    [error, *others] = record.requests.error.tolist()
    assert ("need 12 KV blocks; the cache has 11" in error) is not fallback
    assert others == ["", ""]
    assert all(rank.is_gone or rank.is_done for rank in made.ranks)


@pytest.mark.parametrize("is_apart", [False, True])
def test_an_answer_that_went_on_and_has_become_too_long_for_a_step_fails_alone(is_apart):
    world = apart(1, 2) if is_apart else aggregated()
    engine = replace(world.pools[-1].mocker, enable_chunked_prefill=False, max_num_batched_tokens=170, max_num_seqs=8)
    pools = (*world.pools[:-1], replace(world.pools[-1], mocker=engine))
    fleet = FleetConfig(events=f"at 1s: kill worker {int(is_apart)}", startup_s=5.0)
    alone = workload((0.0, 96, 100), (0.01, 96, 100))
    requests = replace(alone, requests=[*alone.requests, Request(0.0, 96, 2, tuple(range(6)), after=(0,))])
    made, record = simulated(replace(world, pools=pools, fleet=fleet), requests)
    [error, *others] = record.requests.error.tolist()
    assert "without chunked prefill it must be at most max_num_batched_tokens (170)" in error
    assert others == ["", ""]
    assert all(rank.is_gone or rank.is_done for rank in made.ranks)


def test_cached_tokens_of_an_answer_that_went_on_are_those_of_its_first_part_wherever_they_came_from():
    """All but the last block of its prompt is on the GPU of its first worker, and all of it in host memory of the other one."""
    deployment = aggregated("at 4.5s: kill worker 0")
    engine = replace(deployment.pools[0].mocker, num_gpu_blocks=14, num_host_blocks=100)
    shared = tuple(range(6))
    prompts = [(0.0, 96, 2, shared), (1.0, 96, 2, shared), (2.0, 16, 2, (7,)), (3.0, 190, 2, tuple(range(10, 22)))]
    requests = [Request(*prompt) for prompt in [*prompts, (4.0, 96, 100, shared)]]
    pools = (replace(deployment.pools[0], mocker=engine),)
    _, record = simulated(replace(deployment, pools=pools), Workload("w", BLOCK, requests))
    found = record.requests
    assert found.worker.tolist()[-1] == 1
    assert (found.cached_tokens[4], found.host_tokens[4]) == (96, 16)


def test_a_second_token_that_a_worker_would_have_had_comes_from_another():
    """The step that computes it takes 1 s, but the worker dies before that; the other one needs 0.2 s."""
    events = "at 0.1s: slow worker 0 x100; at 0.5s: kill worker 0"
    _, record = simulated(aggregated(events), workload((0.0, 96, 3)))
    found = record.requests
    assert found.second_token_s.tolist() == pytest.approx([0.7])
    assert found.last_token_s.tolist() == pytest.approx([0.71])


def test_a_second_token_comes_when_all_ranks_of_a_worker_have_ended_the_step():
    """The other rank computes a prompt of 0.2 s in the same step."""
    deployment = aggregated(replicas=1)
    engine = replace(deployment.pools[0].mocker, dp_size=2)
    timing = replace(TIMING, enable_expert_parallel=True)
    pools = (replace(deployment.pools[0], mocker=engine, timing=timing),)
    _, record = simulated(replace(deployment, pools=pools), workload((0.0, 96, 2), (0.1, 96, 2)))
    assert record.requests.second_token_s.tolist() == pytest.approx([0.4, 0.41])
    assert record.requests.last_token_s.tolist() == pytest.approx([0.4, 0.41])


def test_an_answer_that_went_on_was_admitted_when_its_first_part_was():
    """Where prompts are computed apart, it is computed again, long after the first token."""
    requests = workload((0.0, 96, 100))
    world = replace(apart(1, 2), fleet=FleetConfig(events="at 1s: kill worker 1", startup_s=5.0))
    _, record = simulated(world, requests)
    found = record.requests
    assert (found.admitted_s[0], found.cached_tokens[0]) == (0.0, 0)
    assert found.first_token_s[0] == pytest.approx(0.21)


def test_a_slow_worker_takes_longer_until_it_has_recovered():
    made, record = simulated(aggregated("at 1s: slow worker 0 x3 for 0.6s", replicas=1), workload((0.0, 96, 200)))
    assert made.ranks[0].busy_s == pytest.approx(0.2 + 199 * 0.01 + 0.4)
    assert record.requests.last_token_s[0] == pytest.approx(0.2 + 199 * 0.01 + 0.4)


def test_a_worker_that_is_slowed_twice_recovers_after_the_second():
    """Twice as long from 1 s on; thrice from 1.2 s until 1.8 s, when 4 and 20 tokens are done: the rest is as usual."""
    events = "at 1s: slow worker 0 x2 for 0.4s; at 1.2s: slow worker 0 x3 for 0.6s"
    _, record = simulated(aggregated(events, replicas=1), workload((0.0, 96, 200)))
    tokens = round((1.0 - 0.2) / 0.01) + round(0.2 / 0.02) + round(0.6 / 0.03)
    assert record.requests.last_token_s[0] == pytest.approx(1.8 + (199 - tokens) * 0.01)


def test_workers_wait_for_gpus_and_take_those_of_one_that_has_left():
    deployment = aggregated("at 1s: +2", replicas=2, gpus=3)
    made, _ = simulated(deployment, STEADY)
    assert [row.pending for row in made.fleet.history["worker"]] == [0, 1, 1]
    made, _ = simulated(aggregated("at 1s: +2; at 7s: lose worker 0", replicas=2, gpus=3), STEADY)
    assert [structs.astuple(row) for row in made.fleet.history["worker"]][-2:] == [(7, 0, 1, 2, 0), (12, 0, 0, 3, 0)]


def test_a_worker_that_takes_the_gpus_of_another_pool_is_seen_to_start():
    deployment = replace(
        apart(), gpus=2, fleet=FleetConfig(events="at 1s: +1 decode; at 2s: -1 prefill", startup_s=5.0)
    )
    made, _ = simulated(deployment, workload((0.0, 96, 10)))
    assert counts(made, "decode") == [(0, 0, 1, 0), (1, 0, 1, 0), (2, 1, 1, 0), (7, 0, 2, 0)]


def test_gpus_are_taken_from_the_start_of_a_worker_until_it_is_gone():
    made, _ = simulated(aggregated("at 1s: +1; at 3s: lose worker 0"), STEADY)
    assert made.fleet.gpu_s("worker", 10.0) == pytest.approx(3 + 10 + 9)


def test_a_start_that_fails_is_tried_again():
    deployment = aggregated("at 0s: +40", replicas=1, start_failure_rate=0.5, startup_s=1.0)
    made, _ = simulated(deployment, STEADY)
    assert 20 < made.fleet.num_failed_starts["worker"] < 70
    assert made.fleet.of("worker", "ready")[-1].ready_s == pytest.approx(round(made.fleet.workers[-1].ready_s))
    assert len(made.fleet.of("worker", "ready")) == 41


def test_startup_times_are_spread_around_their_mean():
    deployment = aggregated("at 0s: +400", replicas=1, startup_spread=0.5, startup_s=10.0)
    made, _ = simulated(deployment, STEADY)
    lasted = [worker.ready_s - worker.since_s for worker in made.fleet.workers[1:]]
    assert np.mean(lasted) == pytest.approx(10.0, rel=0.1)
    assert np.std(lasted) == pytest.approx(5.0, rel=0.2)


def test_a_start_takes_its_fixed_part_and_the_time_to_read_the_weights():
    config = FleetConfig(startup_fixed_s=40.0, weights_gb_s=4.0)
    model = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100")
    assert config.mean_startup_s(model) == pytest.approx(40 + 16.06e9 / 4e9, rel=0.01)
    halves = replace(model, tensor_parallel_size=2)
    assert config.mean_startup_s(halves) == pytest.approx(40 + 8.03e9 / 4e9, rel=0.01)
    assert config.mean_startup_s(TIMING) == 40.0


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ("60s: +2", "events: '60s: +2' is not understood; expected 'at TIME: ACTION', such as 'at 60s: +2 decode'"),
        ("at 5s: jump", "events: 'jump' is not understood; expected +N POOL, -N POOL, =N POOL, kill worker N"),
        ("at 5s: slow worker 1 x0", "events: 'slow worker 1 x0' is not understood"),
        ("at 5s: +10001", "events: '+10001' is too many; expected at most 10,000 workers"),
    ],
)
def test_events_that_are_not_understood_are_refused(events, message):
    with pytest.raises(ValueError, match="events") as refused:
        FleetConfig(events=events)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ("at 1s: +1 decode", "events: pool 'decode' is unknown; expected one of worker"),
        (
            "at 1s: kill worker 7",
            "events: at 1s: kill worker 7: worker 7 does not exist at that time; expected one of 0, 1",
        ),
        (
            "at 1s: kill worker 0; at 2s: drain worker 0",
            "events: at 2s: drain worker 0: worker 0 is gone at that time; expected one of 1, 2",
        ),
        (
            "at 1s: +1; at 2s: slow worker 2 x2",
            "events: at 2s: slow worker 2 x2: worker 2 is starting at that time; expected one of 0, 1",
        ),
    ],
)
def test_events_that_name_an_unknown_pool_or_worker_are_refused(events, message):
    with pytest.raises(ValueError, match="events") as refused:
        simulated(aggregated(events), STEADY)
    assert str(refused.value) == message


def test_events_that_come_after_the_last_answer_are_remarked_upon():
    _, record = simulated(aggregated("at 1s: +1; at 1h: -1; at 2h: +1"), STEADY)
    assert record.facts["missed_events"] == 2
    [remark] = [each for each in remarks([record]) if "events" in each]
    assert remark == "2 of the events of its fleet were due after its last answer, so they had no effect"


def test_an_event_must_name_the_pool_if_there_are_several():
    deployment = replace(apart(), fleet=FleetConfig(events="at 1s: +1"))
    with pytest.raises(ValueError, match=r"events: \+1 does not name a pool; expected one of prefill, decode"):
        simulated(deployment, STEADY)


ACTIONS = (
    "+1 {pool}",
    "+2 {pool}",
    "-1 {pool}",
    "kill worker {number}",
    "drain worker {number}",
    "lose worker {number}",
    "slow worker {number} x2 for 0.2s",
)


@st.composite
def changing(draw):
    """Return a world of prefill and decode workers, or of workers that do both, and what happens to them."""
    deployment, requests = draw(clusters())
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    if rng.random() < 0.4:
        one = replace(deployment.pools[1], name="worker", role="aggregated", replicas=rng.randint(1, 3))
        deployment = replace(deployment, pools=(one,), transfer=replace(deployment.transfer, overlap="none"))
    length = requests.requests[-1].arrival_s + 1.0
    names, first = [pool.name for pool in deployment.pools], deployment.num_workers
    picks = rng.sample(range(first), k=rng.randint(0, first))
    events = [f"at {rng.random() * length:.4f}s: {rng.choice(ACTIONS[3:]).format(number=n)}" for n in picks]
    pools = [rng.choice(names) for _ in range(rng.randint(0, 3))]
    events += [f"at {rng.random() * length:.4f}s: {rng.choice(ACTIONS[:2]).format(pool=pool)}" for pool in pools]
    fleet = FleetConfig(
        events="; ".join(events),
        startup_s=rng.choice([0.0, 0.05, 1.0]),
        drain_policy=rng.choice(["wait", "bounded", "hand-over", "hand-over"]),
        drain_limit_s=rng.choice([0.0, 0.1]),
        start_failure_rate=rng.choice([0.0, 0.3]),
    )
    return replace(deployment, fleet=fleet), requests


def test_a_worker_that_dies_has_given_no_token_that_the_next_step_only_starved():
    """Two requests are read and sampled in the step in flight, and get no place in the next one, when their worker dies."""
    rows = [(0.0, 214, 49, 4), (1.71, 243, 28, 8), (1.71, 347, 59, 12), (1.84, 219, 20, 12), (1.85, 14, 24, 0)]
    requests = [
        Request(
            at,
            isl,
            osl,
            tuple(block if block < shared else 1000 * (number + 1) + block for block in range(-(-isl // BLOCK))),
        )
        for number, (at, isl, osl, shared) in enumerate(rows)
    ]
    world = apart(mode="least-loaded", blocks=40, timing=TIMING, transfer=TransferConfig(), flow="destination-first")
    world = replace(world, fleet=FleetConfig(events="at 2.15s: kill worker 1; at 2.2s: +1 decode", startup_s=1.0))
    _, record = simulated(world, Workload("w", BLOCK, requests))
    assert record.requests.succeeded.all()
    assert sum(int(row[3]) * int(row[4]) for row in record.gaps) == sum(osl - 1 for _, _, osl, _ in rows)


@settings(max_examples=worth(150), deadline=None)
@given(changing())
def test_nothing_is_lost_while_the_fleet_changes(world):
    """Every request ends once, with all its tokens or one error; who is there at the end holds nothing; GPU time adds up."""
    deployment, requests = world
    made, record = simulated(deployment, requests)
    assert record.requests.request.tolist() == list(range(len(requests)))
    for rank in made.ranks:
        engine = rank.engine
        if not rank.is_gone:
            assert engine.num_free_blocks == engine.num_blocks
            assert not (engine.view().num_retained or engine.outbox.loads)
    assert made.traffic.links.next_s() is None
    assert not len(made.flights)
    for routing in (made.routing, made.prefills):
        for rank in [] if routing is None else routing.ranks:
            books = routing.router.load(rank.number)
            assert (books.num_requests, books.prefill_tokens, books.decode_blocks) == (0, 0, 0)
        assert routing is None or not routing.held
    assert not any(rank.readers for rank in made.ranks)
    good = record.requests.succeeded
    planned = np.array([request.output_length for request in requests.requests])
    assert record.requests.osl[good].tolist() == planned[good].tolist()
    assert (record.requests.last_token_s >= record.requests.first_token_s)[good].filled(False).all()
    failed = [number for number, error in enumerate(record.requests.error) if error]
    tokens = planned[good].sum() - good.sum()
    gaps = sum(int(row[3]) * int(row[4]) for row in record.gaps)
    assert gaps >= tokens
    if not failed:
        assert gaps == tokens
    for pool in deployment.pools:
        workers = [worker for worker in made.fleet.workers if worker.pool.name == pool.name]
        end = made.clock.now
        taken = sum(min(m.until_s, end) - m.since_s for m in workers if m.since_s < end) * pool.gpus_per_worker
        assert made.fleet.gpu_s(pool.name, end) == pytest.approx(taken)
        assert (
            sum(worker.state in ("ready", "draining") for worker in workers) == made.fleet.history[pool.name][-1].ready
        )
