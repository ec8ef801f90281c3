"""What simulated KV tiers held, moved and gave: nothing comes from nowhere, and nothing is lost."""

from dataclasses import replace

import pytest
from msgspec import UNSET

from dynabench.arm import ClientConfig, Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.flags import MeasuredFrontendConfig, MeasuredRouterConfig
from dynabench.deployment.fleet import FleetConfig
from dynabench.live.run import measure
from dynabench.live.tier_watch import TierWatch
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from reports.figures import tiers
from tests.support.simulated import simulate_pool
from tests.support.workloads import conversations
from workloads import Request, Workload

TIMING = TimingConfig(timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0)
A, B, C = ((number,) for number in range(3))
TURNS = Workload("w", 64, [Request(2.0 * place, 64, 2, ids) for place, ids in enumerate((A, B, C, A))])
"""Four prompts of a block each, one after the other; the last is the first again."""


def engine(size_gib=1.0, **changes):
    return EngineConfig(**{"block_size": 64, "num_gpu_blocks": 4, "kv_offloading_size": size_gib} | changes)


def chunk_bytes(config=None):
    return resolve(config or engine(), TIMING).host.chunk_bytes


def test_a_prompt_that_the_gpu_has_lost_comes_from_host_memory():
    """Three blocks of the GPU hold one request of two blocks and a remnant, so A is gone when it comes again."""
    made = simulate_pool(TURNS, engine=engine(), timing=TIMING)
    assert made.requests.host_tokens.tolist() == [0, 0, 0, 64]
    assert made.requests.cached_tokens.tolist() == [0, 0, 0, 64]
    (found,) = made.tiers
    assert (found.pool, found.tier, found.caches) == ("worker", "host", 1)
    assert (found.read.copies, found.read.bytes) == (1, chunk_bytes())
    assert (found.written.copies, found.written.bytes) == (3, 3 * chunk_bytes())
    assert found.full == 3 / (found.capacity_tokens / 64)
    assert found.evicted_chunks == 0


def test_the_prefill_that_a_hit_avoids_is_that_of_its_tokens_alone():
    """A prompt of two steps of 0.2 s comes again; only its last token is computed, in a step of a decode, of 0.01 s."""
    turns = Workload("w", 64, [Request(2.0 * n, 128, 2, ids) for n, ids in enumerate(((0, 1), (2, 3), (0, 1)))])
    config = engine(max_num_batched_tokens=64, max_num_seqs=8)
    timing = TimingConfig(timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0, tensor_parallel_size=2)
    (found,) = simulate_pool(turns, engine=config, timing=timing).tiers
    assert found.tokens == 128
    assert found.avoided_gpu_s == pytest.approx(2 * (0.4 - 0.01))


def test_without_known_prefixes_nothing_is_known_of_what_tiers_avoided():
    made = simulate_pool(replace(TURNS, knows_prefixes=False), engine=engine(), timing=TIMING)
    assert made.tiers[0].tokens is UNSET
    assert tiers.spent(made).avoided is None


def test_a_full_host_memory_evicts_and_says_how_much():
    made = simulate_pool(TURNS, engine=engine(2.5 * chunk_bytes() / (1 << 30)), timing=TIMING)
    (found,) = made.tiers
    assert (found.capacity_bytes, found.capacity_tokens) == (2 * chunk_bytes(), 128)
    assert (found.full, found.evicted_chunks) == (1, 2)
    assert made.requests.host_tokens.tolist() == [0, 0, 0, 0]


def test_a_link_is_busy_while_it_carries_chunks():
    made = simulate_pool(
        TURNS, engine=engine(host_bandwidth_gb_s=chunk_bytes() / 0.5e9, host_latency_us=0.0), timing=TIMING
    )
    end_s = made.requests.last_token_s.max()
    (found,) = made.tiers
    assert found.read.busy.mean == pytest.approx(0.5 / end_s)
    assert found.written.busy.highest == pytest.approx(3 * 0.5 / end_s)


def test_of_tiers_that_no_worker_has_nothing_is_known():
    made = simulate_pool(TURNS, engine=engine(), timing=TIMING)
    assert made.requests.disk_tokens.mask.all()
    assert made.requests.store_tokens.mask.all()


def test_without_tiers_nothing_is_known_of_them():
    made = simulate_pool(TURNS, engine=engine(0.0), timing=TIMING)
    assert made.tiers == ()
    assert made.requests.host_tokens.mask.all()
    assert made.requests.cached_tokens.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("size_gib", "blocks_per_chunk"), [(0.3, 1), (4.0, 1), (4.0, 4)])
def test_every_prompt_token_has_one_source_and_every_chunk_is_accounted_for(size_gib, blocks_per_chunk):
    config = engine(size_gib, num_gpu_blocks=400, blocks_per_chunk=blocks_per_chunk)
    made = simulate_pool(conversations(300, rate=8, max_isl=8192), mode="kv", engine=config, workers=2)
    requests, size = made.requests, chunk_bytes(config)
    assert (requests.host_tokens <= requests.cached_tokens).all()
    assert (requests.cached_tokens <= requests.isl).all()
    assert requests.host_tokens.sum() > 0
    assert sum(tiers.hits([made]).parts.values()) == pytest.approx(1)
    (found,) = made.tiers
    assert found.caches == 2
    read, written = found.read.bytes / size, found.written.bytes / size
    assert (read, written) == (round(read), round(written))
    assert written - found.evicted_chunks == round(found.full * found.capacity_bytes / size)
    least = requests.host_tokens.sum() / (64 * blocks_per_chunk)
    assert read >= least
    if not requests.preemptions.sum() and blocks_per_chunk == 1:
        assert read == least


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_gpu_seconds_are_those_in_which_workers_took_steps(num_gpus):
    timing = TimingConfig(model="meta-llama/Llama-3.1-8B", gpu="h100", tensor_parallel_size=num_gpus)
    made = simulate_pool(TURNS, engine=engine(), timing=timing, workers=2)
    (pool,) = made.pools
    assert pool.gpu_s == pytest.approx(pool.busy.mean * made.requests.last_token_s.max() * 2 * num_gpus)
    assert tiers.spent(made).gpu_s == pool.gpu_s


def test_where_another_worker_prefills_the_tokens_are_those_that_it_found():
    pools = tuple(
        Pool(name=role, role=role, mocker=engine(1.0 if role == "prefill" else 0.0), timing=TIMING)
        for role in ("prefill", "decode")
    )
    made = simulate(Run.alone(Settings(Deployment(pools=pools))), TURNS)
    assert made.requests.host_tokens.tolist() == made.requests.cached_tokens.tolist() == [0, 0, 0, 64]
    assert [use.pool for use in made.tiers] == ["prefill"]


def test_a_live_run_says_what_its_tiers_held_and_which_tokens_came_from_them():
    """Two prompts of 10 blocks drive each other off a GPU of 15; host memory has room for 12, the disk for all."""
    chunk = 16 * 131_072 / (1 << 30)
    config = EngineConfig(block_size=16, num_gpu_blocks=16, kv_offloading_size=12 * chunk, kv_disk_size=100 * chunk)
    timing = TimingConfig(timing="constant", constant_prefill_ms=10, constant_decode_ms=10)
    deployment = Deployment(
        pools=(Pool(name="mine", mocker=config, timing=timing),),
        router=MeasuredRouterConfig(),
        frontend=MeasuredFrontendConfig(),
    )
    ids = [tuple(range(10)), tuple(range(10, 20))]
    workload = Workload("w", 16, [Request(1.0 + 0.6 * i, 165, 3, ids[i % 2]) for i in range(5)])
    record = measure(Run.alone(Settings(deployment, client=ClientConfig())), workload)
    requests = record.requests
    assert requests.cached_tokens.tolist()[:2] == [0, 0]
    beyond = requests.host_tokens + requests.disk_tokens
    assert all(0 < tokens <= 160 for tokens in beyond.tolist()[2:])
    assert requests.disk_tokens.sum() > 0
    assert requests.store_tokens.tolist() == [0] * 5
    host, disk = record.tiers
    assert (host.name, disk.name) == ("mine host", "mine disk")
    assert host.capacity_bytes == 12 * 16 * 131_072
    assert host.capacity_tokens == 12 * 16
    assert host.full == 1.0
    assert host.read.bytes == beyond.sum() / 16 * 16 * 131_072
    assert disk.full == 20 / 100
    assert disk.written.bytes == 20 * 16 * 131_072
    assert disk.read.bytes == requests.disk_tokens.sum() * 131_072
    assert disk.read.copies > 0
    assert 0 < disk.read.busy.mean < 1


def test_requests_that_lose_their_only_worker_have_come_from_no_pool():
    """The host memory of a worker is read, and the worker is lost before the answer ends."""
    turns = Workload("w", 64, [Request(0.6 * place, 64, 20, ids) for place, ids in enumerate((A, B, C, A))])
    pool = Pool(mocker=engine(), timing=TIMING)
    world = Deployment(pools=(pool,), router_mode="round-robin", fleet=FleetConfig(events="at 1.9s: kill worker 0"))
    made = simulate(Run.alone(Settings(world)), turns)
    assert made.requests.host_tokens.tolist()[3] == 64
    assert made.requests.prompt_worker.mask.tolist() == [False, False, False, True]
    assert made.tiers[0].tokens == 0


def reported(rank, **values):
    """Return what the frontend shows of a rank's host memory."""
    labels = f'instance="a",rank="{rank}",tier="host",worker_type="aggregated"'
    rows = (f"dynamo_component_kv_offload_{name}{{{labels}}} {value}\n" for name, value in values.items())
    return "".join(rows).encode()


def test_what_ranks_counted_before_the_run_is_not_its_own_and_a_rank_that_reports_later_is_new():
    watch = TierWatch()
    watch.note(reported(0, reads_total=5, used_bytes=100, capacity_bytes=400))
    for reads in (1, 3):
        watch.note(
            reported(0, reads_total=5 + reads, used_bytes=200, capacity_bytes=400)
            + reported(1, reads_total=10 * reads, used_bytes=0, capacity_bytes=400)
        )
    (use,) = watch.uses(Deployment(pools=(Pool(name="mine", mocker=engine(), timing=TIMING),)), 1.0)
    assert (use.caches, use.full, use.read.copies) == (2, 200 / 800, 3 + 30)
