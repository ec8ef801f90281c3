"""How busy pools and links were, and where TTFT went, in virtual time."""

import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.config import TimingConfig
from reports.figures.split import split_ttft
from reports.record.pools import PoolUse
from serving.life import DisaggregationConfig
from workloads import Request, Workload

TIMING = TimingConfig(timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0)
ONE = Workload("w", 16, [Request(0.0, 96, 5, tuple(range(6)))])
LINK = TransferConfig(bandwidth_gb_s=1.0, latency_ms=0.0, kv_bytes_per_token=1e6)


def pool(role, **changes):
    engine = EngineConfig(block_size=16, num_gpu_blocks=200)
    return Pool(**{"name": role, "role": role, "mocker": engine, "timing": TIMING} | changes)


def simulated(*pools, transfer=LINK, workload=ONE, **dials):
    deployment = Deployment(pools=pools, transfer=transfer, disaggregation=DisaggregationConfig(**dials))
    return simulate(Run.alone(Settings(deployment)), workload)


def shares(use):
    return pytest.approx((use.mean, use.highest), abs=1e-4)


def test_a_pool_is_busy_while_its_workers_take_steps():
    """200 ms of prefill, 96 ms of transfer, 5 steps of 10 ms; the second prefill worker has nothing to do."""
    prefill, decode = simulated(pool("prefill", replicas=2), pool("decode")).pools
    assert (prefill.name, prefill.role, prefill.workers, prefill.gpus) == ("prefill", "prefill", 2, 2)
    assert shares(prefill.busy) == (100 / 346, 200 / 346)
    assert shares(decode.busy) == (50 / 346, 50 / 346)


def test_a_link_is_used_while_kv_travels():
    prefill, decode = simulated(pool("prefill", replicas=2), pool("decode")).links
    assert (shares(prefill.egress), shares(prefill.ingress)) == ((48 / 346, 96 / 346), (0, 0))
    assert (shares(decode.egress), shares(decode.ingress)) == ((0, 0), (96 / 346, 96 / 346))


def test_leases_that_end_after_the_run_do_not_make_it_longer():
    made = simulated(pool("prefill"), pool("decode"), kv_lease_renewal=False, kv_lease_duration_s=30.0)
    assert shares(made.pools[1].busy) == (50 / 346, 50 / 346)
    assert shares(made.links[0].egress) == (96 / 346, 96 / 346)


def test_links_that_carry_any_amount_have_no_share():
    made = simulated(pool("prefill"), pool("decode"), transfer=TransferConfig(bandwidth_gb_s=0))
    assert made.links == ()


def test_the_links_of_nodes_are_listed_where_they_are_limited():
    nodes = TransferConfig(
        bandwidth_gb_s=0, latency_ms=0.0, kv_bytes_per_token=1e6, gpus_per_node=1, node_bandwidth_gb_s=1.0
    )
    (found,) = simulated(pool("prefill"), pool("decode"), transfer=nodes).links
    assert (found.name, found.links) == ("nodes", 2)
    assert shares(found.egress) == (48 / 346, 96 / 346)


def test_the_ranks_of_a_worker_and_the_gpus_of_a_rank_count():
    wide = pool("decode", mocker=EngineConfig(block_size=16, num_gpu_blocks=200, dp_size=2))
    _, decode = simulated(pool("prefill"), wide).pools
    assert (decode.workers, decode.gpus) == (2, 2)


def test_workers_that_do_all_have_a_busy_share_and_no_links():
    made = simulated(pool("aggregated"))
    assert made.links == ()
    (found,) = made.pools
    assert isinstance(found, PoolUse)
    assert shares(found.busy) == (1.0, 1.0)


def test_ttft_goes_into_prefill_transfer_and_the_first_step():
    found = split_ttft([simulated(pool("prefill"), pool("decode"))])
    assert found.ttft == pytest.approx(0.306)
    assert [found.parts[name] for name in ("prefill", "transfer", "first_step")] == pytest.approx([0.2, 0.096, 0.01])


def test_blocks_are_waited_for_before_the_prefill_where_the_flow_is_destination_first():
    """Each prompt takes 6 of 9 blocks of the decode worker, so the second waits until the first has ended."""
    small = pool("decode", mocker=EngineConfig(block_size=16, num_gpu_blocks=10))
    two = Workload("w", 16, [Request(0.0, 90, 6, tuple(range(6))), Request(0.0, 90, 6, tuple(range(6, 12)))])
    made = simulated(pool("prefill", replicas=2), small, workload=two, flow="destination-first")
    found = split_ttft([made])
    assert found.blocks_first
    assert found.decode_queue == pytest.approx(made.requests.last_token_s[0] / 2)
    assert sum(found.parts.values()) == pytest.approx(found.ttft)
