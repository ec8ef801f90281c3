"""Disaggregated prefill and decode in virtual time."""

import itertools
import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.overhead import OverheadConfig
from dynabench.virtual.oracles import true_work
from dynabench.virtual.run import cluster_of, simulate
from dynabench.virtual.use import pool_use
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from reports.figures.insight import blocked_share, remarks
from serving.life import DisaggregationConfig
from serving.life.effects import Effect
from tests.support.examples import worth
from workloads import Request, Workload

FREE = TransferConfig(bandwidth_gb_s=0, latency_ms=0.0)
SLOW = TransferConfig(bandwidth_gb_s=1.0, latency_ms=5.0)
CONSTANT = TimingConfig(timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0)
BLOCK = 16


def workload(*requests):
    """Return a workload of (arrival, prompt, output) with prompts of their own."""
    made, first = [], 0
    for arrival, num_prompt, num_output in requests:
        count = -(-num_prompt // BLOCK)
        made.append(Request(arrival, num_prompt, num_output, tuple(range(first, first + count))))
        first += count
    return Workload("w", BLOCK, made)


def apart(
    prefill=1,
    decode=1,
    *,
    transfer=FREE,
    timing=CONSTANT,
    mode="round-robin",
    blocks=200,
    budget=8192,
    policy="fail",
    **dials,
):
    engine = EngineConfig(
        block_size=BLOCK, num_gpu_blocks=blocks, kv_load_failure_policy=policy, max_num_batched_tokens=budget
    )
    pools = tuple(
        Pool(name=role, role=role, replicas=count, mocker=engine, timing=timing)
        for role, count in (("prefill", prefill), ("decode", decode))
    )
    return Deployment(pools=pools, router_mode=mode, transfer=transfer, disaggregation=DisaggregationConfig(**dials))


def simulated(deployment, requests):
    return simulate(Run.alone(Settings(deployment)), requests).requests


def cluster(deployment, requests):
    """Return a cluster that has run."""
    made = cluster_of(Run.alone(Settings(deployment)), requests)
    made.run()
    return made


def test_a_lone_request_has_its_first_token_after_the_prefill_and_one_step_of_the_decode_worker():
    found = simulated(apart(), workload((0.0, 100, 5)))
    assert found.first_token_s[0] == pytest.approx(0.2 + 0.01, abs=1e-6)
    assert found.last_token_s[0] == pytest.approx(0.2 + 5 * 0.01, abs=1e-6)
    assert (found.prefill_worker[0], found.worker[0]) == (0, 1)


def test_destination_first_the_first_token_comes_with_the_kv():
    found = simulated(apart(flow="destination-first"), workload((0.0, 100, 5), (9.0, 100, 1)))
    assert (found.first_token_s - found.sent_s).tolist() == pytest.approx([0.2, 0.2], abs=1e-6)
    assert (found.last_token_s - found.sent_s).tolist() == pytest.approx([0.2 + 4 * 0.01, 0.2], abs=1e-6)


@pytest.mark.parametrize(("prefill_blocks", "is_blocked"), [(50, True), (2000, False)])
def test_prefill_workers_out_of_blocks_are_told_from_busy_ones(prefill_blocks, is_blocked):
    """The decode worker has room for two prompts at a time, and answers for a second."""
    deployment = apart(blocks=50)
    prefill, decode = deployment.pools
    prefill = replace(prefill, mocker=replace(prefill.mocker, num_gpu_blocks=prefill_blocks))
    found = simulate(
        Run.alone(Settings(replace(deployment, pools=(prefill, decode)))), workload(*[(0.0, 320, 100)] * 12)
    )
    assert (blocked_share(found) > 0.4) is is_blocked
    assert any("their blocks were full" in remark for remark in remarks([found])) is is_blocked


@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_the_second_token_comes_a_decode_step_after_the_first(flow):
    found = simulated(apart(flow=flow), workload((0.0, 100, 5), (9.0, 100, 1), (9.5, 100, 2)))
    assert (found.second_token_s - found.first_token_s).tolist() == [pytest.approx(0.01), None, pytest.approx(0.01)]


def test_the_stamps_of_a_request_follow_each_other():
    found = simulated(apart(transfer=SLOW), workload((0.0, 1000, 5)))
    stamps = [
        getattr(found, name)[0]
        for name in (
            *("sent_s", "prefill_queued_s", "admitted_s", "prefill_end_s", "decode_queued_s", "decode_blocks_s"),
            *("transfer_start_s", "transfer_end_s", "decode_start_s"),
            *("first_token_s", "second_token_s", "last_token_s"),
        )
    ]
    assert stamps == sorted(stamps)
    assert found.prefill_end_s[0] - found.admitted_s[0] == pytest.approx(0.2)


@pytest.mark.parametrize(("overlap", "exposed_s"), [("none", 0.805), ("chunk", 0.605), ("layer", 0.42)])
def test_what_is_sent_during_the_prefill_does_not_delay_the_first_token(overlap, exposed_s):
    """A prompt of two chunks of 0.2 s each, which take 0.4 s each to send, and 5 ms once.

    Sent by layers, nearly half of the 0.8 s lies in the prefill; chunk by chunk, half of the first chunk's 0.4 s.
    """
    size = 0.8 / 2048 * 1e9
    transfer = TransferConfig(bandwidth_gb_s=1.0, latency_ms=5.0, kv_bytes_per_token=size, overlap=overlap)
    deployment = apart(transfer=transfer, flow="destination-first", budget=1024)
    found = simulated(deployment, workload((0.0, 2048, 5)))
    assert found.first_token_s[0] - found.prefill_end_s[0] == pytest.approx(exposed_s, abs=0.02)


def test_the_decode_worker_waits_for_blocks_before_anything_is_read():
    """Each prompt takes 6 blocks of 9, so the second is read when the first has ended; another worker has computed it."""
    found = simulated(apart(2, transfer=SLOW, blocks=10), workload((0.0, 90, 6), (0.0, 90, 6)))
    assert found.decode_queued_s[1] < found.last_token_s[0]
    assert found.transfer_start_s[1] == pytest.approx(found.last_token_s[0])


def test_a_lease_that_is_not_renewed_runs_out():
    short = {"kv_lease_renewal": False, "kv_lease_duration_s": 0.001}
    lost = simulated(apart(transfer=SLOW, **short), workload((0.0, 90, 6)))
    assert "the lease had expired" in lost.error[0]
    assert lost.first_token_s.mask[0]
    again = simulated(apart(transfer=SLOW, policy="recompute", **short), workload((0.0, 90, 6)))
    assert again.error[0] == ""
    assert again.first_token_s[0] == pytest.approx(0.2 + 0.001 + 0.2)
    kept = simulated(apart(transfer=SLOW, kv_lease_duration_s=0.001), workload((0.0, 90, 6)))
    assert kept.error[0] == ""


def test_all_stamps_of_tokens_are_those_of_the_client():
    overhead = OverheadConfig(answer_overhead_ms=50.0)
    found = simulated(replace(apart(), overhead=overhead), workload((0.0, 100, 5)))
    assert found.second_token_s[0] - found.first_token_s[0] == pytest.approx(0.01)


@pytest.mark.parametrize(("flow", "added_s"), [("source-first", 0.03), ("destination-first", 0.0)])
def test_what_lies_between_prefill_and_decode_worker_delays_those_who_are_asked_one_after_the_other(flow, added_s):
    requests = workload((0.0, 100, 5))
    soon = simulated(apart(flow=flow), requests)
    later = simulated(replace(apart(flow=flow), overhead=OverheadConfig(handover_overhead_ms=30.0)), requests)
    assert later.first_token_s[0] - soon.first_token_s[0] == pytest.approx(added_s)


def test_an_answer_of_one_token_that_stops_has_no_second():
    one = Request(0.0, 100, 1, tuple(range(7)), ends="stop")
    assert simulated(apart(), Workload("w", BLOCK, [one])).second_token_s.mask.all()


def test_steps_of_no_time_have_a_second_token_all_the_same():
    deployment = apart(flow="destination-first", timing=TimingConfig(speedup_ratio=0.0))
    assert not simulated(deployment, workload((0.0, 100, 2))).second_token_s.mask.any()


def test_a_prompt_that_is_preempted_is_sent_when_it_has_been_computed_again():
    """Its chunks are counted twice, and the token of its last one is dropped."""
    requests = workload(*[(0.05 * place, size, 2) for place, size in enumerate((81, 98, 66, 52, 50, 59))])
    transfer = replace(FREE, overlap="chunk", block_us=1e4)
    deployment = apart(transfer=transfer, flow="destination-first", blocks=400)
    prefill, decode = deployment.pools
    tight = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks=15,
        max_num_batched_tokens=100,
        max_num_seqs=8,
        long_prefill_token_threshold=20,
        scheduler_reserve_full_isl=False,
    )
    found = simulated(replace(deployment, pools=(replace(prefill, mocker=tight), decode)), requests)
    assert found.preemptions.sum() > 0
    assert (found.transfer_end_s >= found.prefill_end_s).all()


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_an_oracle_knows_the_work_when_a_bypass_is_considered(stage):
    deployment = apart(2, 2, conditional_disagg="isl_or_load")
    pools = tuple(replace(pool, router_mode="oracle-load" if pool.role == stage else None) for pool in deployment.pools)
    found = simulated(replace(deployment, pools=pools), workload(*[(0.1 * place, 900, 30) for place in range(8)]))
    assert (found.error == "").all()


def test_what_is_sent_while_a_prompt_is_computed_has_been_computed():
    """Prompts of one that is preempted are computed twice, and what was sent before counts once."""
    requests = workload(*[(0.05 * place, size, 2) for place, size in enumerate((181, 198, 166, 152, 150, 159))])
    transfer = TransferConfig(bandwidth_gb_s=1e6, latency_ms=0.0, kv_bytes_per_token=1.0, overlap="chunk")
    deployment = apart(transfer=transfer, flow="destination-first", blocks=400)
    prefill, decode = deployment.pools
    tight = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks=18,
        max_num_batched_tokens=100,
        max_num_seqs=8,
        long_prefill_token_threshold=33,
        scheduler_reserve_full_isl=False,
        async_scheduling=False,
    )
    deployment = replace(deployment, pools=(replace(prefill, mocker=tight), decode))
    made = cluster_of(Run.alone(Settings(deployment)), requests)
    engine, computed = made.ranks[0].engine, [0] * 6
    for now in np.arange(0.1, 30.0, 0.1):
        made.resume(now)
        for sequence in engine.sequences():
            computed[sequence.id] = max(computed[sequence.id], sequence.num_computed // BLOCK)
        ended = [-(-one.input_length // BLOCK) for one in requests.requests]
        most = [
            whole if end <= now else part
            for whole, part, end in zip(ended, computed, made.log.prefill_end_s, strict=True)
        ]
        assert num_blocks_sent(made, deployment) <= sum(most) + 1e-3
    assert sum(made.log.preemptions) > 0
    assert num_blocks_sent(made, deployment) == pytest.approx(sum(ended))


def num_blocks_sent(made, deployment):
    """Return how many blocks came to all ranks until now."""
    now, transfer = made.clock.now, deployment.transfer
    shares = [use.ingress for use in made.traffic.links.utilisation(now).ranks]
    return sum(shares) * transfer.gpu_bandwidth * now / made.transfers.kv_size.block


def test_an_oracle_knows_of_a_request_whose_kv_is_on_its_way():
    made = cluster_of(Run.alone(Settings(apart(transfer=SLOW))), workload((0.0, 1000, 5)))
    made.resume(0.21)
    assert true_work(made.ranks[1].engine, 0.21) == [(0, 5, 1000)]


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_the_last_token_needs_no_place_though_it_comes_with_kv_that_fills_the_cache(ends):
    one = Request(0.0, 160, 1, tuple(range(10)), ends=ends)
    found = simulated(apart(flow="destination-first", blocks=11), Workload("w", BLOCK, [one]))
    assert found.error.tolist() == [""]
    assert found.last_token_s[0] == pytest.approx(0.2, abs=1e-6)


def test_what_cannot_be_simulated_apart_is_refused():
    with pytest.raises(ValueError, match="oracle-rollout"):
        simulated(apart(mode="oracle-rollout"), workload((0.0, 100, 5)))


@pytest.mark.parametrize("speedup", [0.0, 1e15])
def test_prompts_that_would_be_preempted_forever_at_one_instant_are_refused(speedup):
    pools = tuple(
        replace(pool, mocker=replace(pool.mocker, scheduler_reserve_full_isl=False))
        for pool in apart(timing=TimingConfig(speedup_ratio=speedup)).pools
    )
    with pytest.raises(ValueError, match="preempted forever"):
        simulated(replace(apart(), pools=pools), workload((0.0, 100, 5)))


def test_prompts_that_do_not_fit_beside_kv_that_waits_preempt_themselves_until_it_is_read():
    """As vLLM's scheduler does, step by step: 3 blocks are left beside 6 that wait 2 s, and a chunk takes 2."""
    transfer = TransferConfig(bandwidth_gb_s=1.0, latency_ms=0.0, kv_bytes_per_token=2e9 / 96)
    deployment = apart(transfer=transfer)
    prefill, decode = deployment.pools
    tight = EngineConfig(
        block_size=BLOCK,
        num_gpu_blocks=10,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        enable_prefix_caching=False,
        scheduler_reserve_full_isl=False,
        async_scheduling=False,
    )
    deployment = replace(deployment, pools=(replace(prefill, mocker=tight), decode))
    found = simulated(deployment, workload((0.0, 96, 3), (0.0, 96, 3)))
    assert found.prefill_end_s[0] == pytest.approx(0.6)
    assert found.preemptions.tolist() == [0, 9]
    assert found.prefill_end_s[1] == pytest.approx(2.4 + 0.6)


def test_a_request_that_waited_at_the_router_is_placed_by_what_is_true_then():
    """Whoever came last has an answer of 1 token, but the third, which waits, is to share 500 steps with one of two."""
    requests = [(0.0, 900, 2), (0.0, 900, 1000), (0.001, 900, 500), (0.002, 900, 1)]
    pool = Pool(replicas=2, mocker=EngineConfig(block_size=BLOCK, num_gpu_blocks=400))
    for seed in range(20):
        settings = Settings(Deployment(pools=(pool,), router_mode="oracle-load+late(1)"))
        found = simulate(Run.alone(settings, seed=seed), workload(*requests)).requests
        assert found.worker[2] == found.worker[0] != found.worker[1]


def test_routers_that_ask_how_many_wait_count_those_whose_kv_is_on_its_way():
    """Two loads of 100 tokens fill fewer blocks than one of 1,000, but they are two."""
    transfer = TransferConfig(bandwidth_gb_s=1.0, latency_ms=0.0, kv_bytes_per_token=1e8)
    deployment = apart(1, 2, transfer=transfer, mode="llmd-weighted")
    found = simulated(deployment, workload((0.0, 1000, 2), (1.0, 100, 2), (2.0, 100, 2), (3.0, 100, 2)))
    long, short, *others = found.worker.tolist()
    assert others == [short, long]
    assert long != short


def test_a_prompt_that_is_mostly_cached_stays_with_its_decode_worker():
    request = Request(0.0, 1600, 3, tuple(range(100)))
    twice = Workload("w", BLOCK, [request, replace_arrival(request, 5.0)])
    always = simulated(apart(mode="kv"), twice)
    assert always.prefill_worker.tolist() == [0, 0]
    found = simulated(apart(mode="kv", conditional_disagg="isl_bounding"), twice)
    assert found.prefill_worker.tolist() == [0, None]
    assert found.cached_tokens.tolist()[1] == 1584


def replace_arrival(request, arrival):
    return Request(arrival, request.input_length, request.output_length, request.hash_ids)


@st.composite
def clusters(draw):
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    requests, now = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        now += rng.choice([0.0, 0.01, rng.random()])
        group, depth = rng.randrange(3), rng.randrange(4)
        shared = [1000 * group + place for place in range(depth * 4)]
        num_prompt = len(shared) * BLOCK + rng.randint(1, 200)
        own = [rng.randrange(10**6, 10**9) for _ in range(-(-num_prompt // BLOCK) - len(shared))]
        requests.append(Request(now, num_prompt, rng.randint(1, 60), (*shared, *own)))
    flow = rng.choice(["source-first", "destination-first"])
    overlap = "none" if flow == "source-first" else rng.choice(["none", "chunk", "layer"])
    deployment = apart(
        rng.randint(1, 3),
        rng.randint(1, 3),
        transfer=replace(rng.choice([FREE, SLOW, TransferConfig()]), overlap=overlap),
        timing=rng.choice([CONSTANT, TimingConfig()]),
        mode=rng.choice(["round-robin", "kv", "least-loaded", "oracle-load+late(100)", "kv+late(100)+wspt(0.1)"]),
        blocks=rng.choice([40, 60, 200]),
        policy=rng.choice(["fail", "recompute"]),
        flow=flow,
        conditional_disagg=rng.choice(["never", "isl_or_load"]),
        kv_lease_renewal=rng.random() < 0.7,
        kv_lease_duration_s=rng.choice([0.05, 30.0]),
    )
    return deployment, Workload("w", BLOCK, requests)


@settings(max_examples=worth(60))
@given(clusters())
def test_nothing_is_lost_on_the_way(world):
    """Every request ends once, no block stays behind, and what was read was there to be read."""
    deployment, requests = world
    made = cluster(deployment, requests)
    for engine in (rank.engine for rank in made.ranks):
        assert engine.num_free_blocks == engine.num_blocks
        assert not (engine.view().num_retained or engine.outbox.loads)
    assert made.traffic.links.next_s() is None
    check_conserved(made, deployment, requests)
    found = simulated(deployment, requests)
    assert found.request.tolist() == list(range(len(requests)))
    good = found.error == ""
    config, may_wait_at_router = deployment.disaggregation, "late" in deployment.router_mode
    if config.kv_lease_renewal and not (may_wait_at_router and config.kv_lease_duration_s < 1):
        assert good.all()  # who waits at the router is at no worker that could renew a lease
    ended = np.ma.getdata(found.last_token_s)[good]
    assert (ended >= np.ma.getdata(found.first_token_s)[good]).all()
    is_apart = good & ~np.ma.getmaskarray(found.prefill_worker)
    if deployment.transfer.overlap != "chunk":
        assert (found.prefill_end_s <= found.transfer_start_s)[is_apart].filled(False).all()
    has_second = good & (found.osl > 1)
    assert (found.first_token_s <= found.second_token_s)[has_second].filled(False).all()
    assert (found.second_token_s <= found.last_token_s)[has_second].filled(False).all()
    assert (found.transfer_end_s <= found.decode_start_s)[is_apart & (found.osl > 1)].filled(False).all()


def check_conserved(made, deployment, requests):
    """Check that nothing is sent twice, that no KV outlives a lease, and that GPUs compute while the run lasts."""
    log, config = made.log, deployment.disaggregation
    is_apart = [worker >= 0 for worker in log.prefill_worker]
    if deployment.transfer.bandwidth_gb_s:
        blocks = [-(-one.input_length // BLOCK) for one in requests.requests]
        assert num_blocks_sent(made, deployment) <= sum(itertools.compress(blocks, is_apart)) * (1 + 1e-9)
    if config.flow == "source-first" and not config.kv_lease_renewal:
        read = [error == "" for error in log.error]
        held_s = np.array(log.transfer_end_s) - np.array(log.prefill_end_s)
        is_whole = is_apart & np.array(read) & (deployment.pools[1].mocker.kv_load_failure_policy == "fail")
        assert (held_s[is_whole] <= config.kv_lease_duration_s + 1e-9).all()
    for pool, use in zip(deployment.pools, pool_use(made), strict=True):
        assert (use.gpus, use.workers) == (pool.num_gpus, pool.replicas)
    for rank in made.ranks:
        assert rank.busy_s <= max(log.last_token_s) + 1e-9


def test_every_effect_of_a_flight_can_be_carried_out():
    flights = cluster_of(Run.alone(Settings(apart())), workload((0.0, 100, 5))).flights
    assert set(flights.can) == set(get_args(Effect))
