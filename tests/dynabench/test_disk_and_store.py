"""Disks, and a store that workers share, in virtual time: what is fetched, when it comes, and what is written when."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.engines import engines_of, refuse_idle_settings
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.network.config import TransferConfig
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from tests.support.examples import worth
from tests.support.simulated import simulate_pool
from workloads import Request, Workload

GIB, BLOCK = 1 << 30, 64
TIMING = TimingConfig(timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0)
CHUNK_BYTES = 131_072 * BLOCK
"""A block of Llama-3.1-8B, which is what no model named stands for."""


def prompts(*names, gap_s=10.0, blocks=2):
    """Make a workload of prompts of some blocks each, by their names, one after the other."""
    ids = [tuple(f"{name}{place}" for place in range(blocks)) for name in names]
    return Workload("w", BLOCK, [Request(gap_s * place, BLOCK * blocks, 2, each) for place, each in enumerate(ids)])


def engine(*, host=2, disk=0, **changes):
    """Return settings of an engine with 3 usable GPU blocks, and room for so many chunks in host memory and on disk."""
    sizes = {"kv_offloading_size": host * CHUNK_BYTES / GIB, "kv_disk_size": disk * CHUNK_BYTES / GIB}
    quick = {"host_bandwidth_gb_s": 1e6, "host_latency_us": 0.0, "kv_disk_lookup_ms": 0.0, "kv_disk_latency_ms": 0.0}
    return EngineConfig(
        **{"block_size": BLOCK, "num_gpu_blocks": 4, "async_scheduling": False} | sizes | quick | changes
    )


def run_on(workload, config, *, workers=1, **more):
    return simulate_pool(workload, engine=config, workers=workers, timing=TIMING, **more)


def tier(record, name):
    return next(found for found in record.tiers if found.tier == name)


def test_a_prompt_that_left_host_memory_comes_from_disk_in_the_time_that_takes():
    slow = engine(disk=8, kv_disk_bandwidth_gb_s=CHUNK_BYTES / 1e9, kv_disk_lookup_ms=250.0, kv_disk_latency_ms=500.0)
    record = run_on(prompts("a", "b", "c", "a", gap_s=50.0), slow)
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 128]
    assert record.requests.host_tokens.tolist() == [0, 0, 0, 0]
    assert record.requests.cached_tokens.tolist() == [0, 0, 0, 128]
    # All of the first three are looked up in vain. The last waits for 0.5 s and two chunks of 1 s each, and then computes a token.
    ttft = record.requests.first_token_s - record.requests.sent_s
    assert ttft.tolist() == pytest.approx([0.25 + 0.2] * 3 + [0.25 + 0.5 + 2.0 + 0.01], abs=1e-4)
    assert (tier(record, "disk").read.copies, tier(record, "disk").read.bytes) == (1, 2 * CHUNK_BYTES)
    assert tier(record, "disk").written.bytes == 6 * CHUNK_BYTES  # and what was read is not written again


def test_without_a_disk_it_is_computed_again():
    record = run_on(prompts("a", "b", "c", "a"), engine())
    assert record.requests.cached_tokens.tolist() == [0, 0, 0, 0]


def test_a_store_gives_one_worker_what_another_has_computed():
    store = KvStoreConfig(kv_store_size=100 * CHUNK_BYTES / GIB)
    record = run_on(prompts("a", "b", "a", "a"), engine(), workers=2, mode="round-robin", kv_store=store)
    assert record.requests.worker.tolist() == [0, 1, 0, 1]
    assert record.requests.store_tokens.tolist() == [0, 0, 0, 128]  # the third finds it where it left it
    assert tier(record, "store").written.bytes == 4 * CHUNK_BYTES


def test_what_is_nearer_is_taken_first():
    store = KvStoreConfig(kv_store_size=100 * CHUNK_BYTES / GIB)
    record = run_on(prompts("a", "b", "c", "a"), engine(disk=8), kv_store=store)
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 128]
    assert record.requests.store_tokens.tolist() == [0, 0, 0, 0]
    assert tier(record, "store").written.bytes == 6 * CHUNK_BYTES


@pytest.mark.parametrize(
    ("policy", "written"), [("write_through", 8), ("write_through_selective", 2), ("write_back", 6)]
)
def test_when_a_chunk_is_written_is_the_policys(policy, written):
    """The 4 chunks of host memory hold two prompts; a is loaded from there once before it leaves it, and the others are not."""
    config = engine(host=4, disk=50, kv_disk_write_policy=policy)
    record = run_on(prompts("a", "b", "a", "c", "d", "a"), config)
    assert tier(record, "disk").written.bytes == written * CHUNK_BYTES
    assert record.requests.host_tokens.tolist() == [0, 0, 128, 0, 0, 0]
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 0, 0, 128]


def test_a_full_disk_evicts():
    record = run_on(prompts("a", "b", "c", "d", "a"), engine(disk=4))
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 0, 0]
    assert tier(record, "disk").evicted_chunks == 6
    assert tier(record, "disk").full == 1


def test_a_fetch_that_lasts_too_long_brings_what_has_come():
    slow = engine(
        disk=20,
        host=4,
        num_gpu_blocks=6,
        kv_disk_bandwidth_gb_s=CHUNK_BYTES / 1e9,
        kv_prefetch_policy="timeout",
        kv_prefetch_timeout_s=2.5,
        kv_prefetch_timeout_s_per_1k_tokens=0.0,
    )
    record = run_on(prompts("a", "b", "c", "a", gap_s=50.0, blocks=4), slow)
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 2 * BLOCK]


def test_a_limit_of_a_fetch_that_was_not_reached_does_not_make_the_run_longer():
    limited = engine(disk=20, kv_prefetch_policy="timeout", kv_prefetch_timeout_s=1e6)
    record = run_on(prompts("a", "b", "c", "a"), limited)
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 128]
    assert record.kv[0].window_s * len(record.kv[0].shares) <= record.requests.last_token_s[-1]


def test_best_effort_does_not_wait_beyond_its_turn():
    slow = engine(disk=20, kv_disk_bandwidth_gb_s=CHUNK_BYTES / 1e9, kv_prefetch_policy="best_effort")
    record = run_on(prompts("a", "b", "c", "a", gap_s=50.0), slow)
    ttft = record.requests.first_token_s - record.requests.sent_s
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 0]
    assert ttft[-1] == pytest.approx(0.2, abs=1e-3)


def test_a_prompt_that_waits_is_fetched_meanwhile():
    """A prompt waits for a seat, and for its fetch only if that begins with its turn."""
    rows = [(0.0, "a"), (10.0, "b"), (20.0, "c"), (30.0, "e"), (40.0, "d"), (40.1, "a")]
    workload = Workload("w", BLOCK, [Request(at, 2 * BLOCK, 60, (f"{n}0", f"{n}1")) for at, n in rows])
    ends = {}
    for policy in ("when_scheduled", "wait_complete"):
        slow = engine(
            host=6,
            disk=20,
            max_num_seqs=1,
            kv_disk_bandwidth_gb_s=CHUNK_BYTES / 0.2e9,
            kv_prefetch_policy=policy,
        )
        record = run_on(workload, slow)
        assert record.requests.disk_tokens.tolist()[-1] == 128
        ends[policy] = record.requests.first_token_s[-1]
    assert ends["when_scheduled"] - ends["wait_complete"] == pytest.approx(0.4, abs=1e-3)


def test_workers_share_the_bandwidth_of_a_store_and_each_has_links_of_its_own():
    store = KvStoreConfig(
        kv_store_size=1.0,
        kv_store_bandwidth_gb_s=2 * CHUNK_BYTES / 1e9,
        kv_store_latency_ms=0.0,
        kv_store_lookup_ms=0.0,
    )
    rows = [(0.0, "a"), (10.0, "b"), (20.0, "c"), (30.0, "d"), (40.0, "e"), (50.0, "f"), (60.0, "a"), (60.0, "b")]
    workload = Workload("w", BLOCK, [Request(at, 2 * BLOCK, 2, (f"{n}0", f"{n}1")) for at, n in rows])

    def last(bandwidth_gb_s):
        record = run_on(
            workload,
            engine(),
            workers=2,
            mode="round-robin",
            kv_store=store,
            transfer=TransferConfig(bandwidth_gb_s=bandwidth_gb_s),
        )
        assert record.requests.store_tokens.tolist()[-2:] == [128, 128]
        return (record.requests.first_token_s - record.requests.sent_s)[-2:].tolist()

    assert last(0.0) == pytest.approx([2.01, 2.01], abs=1e-3)  # 2 chunks each, 2 chunks/s for both
    assert last(0.5 * CHUNK_BYTES / 1e9) == pytest.approx([4.01, 4.01], abs=1e-3)  # 0.5 chunks/s each


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 30),
        "workers": st.integers(1, 3),
        "host": st.integers(2, 12),
        "disk": st.sampled_from([0, 3, 40]),
        "store": st.sampled_from([0, 3, 40]),
        "policy": st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        "prefetch": st.sampled_from(["when_scheduled", "wait_complete", "timeout", "best_effort"]),
        "bandwidth": st.sampled_from([1.0, 20.0]),
        "is_async": st.booleans(),
        "blocks": st.integers(8, 20),
        "per_chunk": st.sampled_from([1, 2]),
    }
)


@settings(max_examples=worth(60))
@given(worlds)
def test_nothing_is_lost_and_no_token_counts_twice(world):
    rng = random.Random(world["seed"])
    requests, now = [], 0.0
    for _ in range(40):
        now += rng.choice([0.0, 0.3, 2.0])
        blocks, name = rng.randint(1, 5), rng.choice("abcdef")
        requests.append(
            Request(
                now, blocks * BLOCK - rng.choice([0, 5]), rng.randint(1, 40), tuple(f"{name}{p}" for p in range(blocks))
            )
        )
    config = engine(
        host=world["host"],
        disk=world["disk"],
        num_gpu_blocks=world["blocks"],
        max_num_batched_tokens=256,
        max_num_seqs=4,
        blocks_per_chunk=world["per_chunk"],
        async_scheduling=world["is_async"],
        host_bandwidth_gb_s=world["bandwidth"],
        kv_disk_bandwidth_gb_s=world["bandwidth"] / 4,
        kv_disk_write_policy=world["policy"],
        kv_prefetch_policy=world["prefetch"],
        kv_prefetch_timeout_s=0.01,
    )
    store = KvStoreConfig(kv_store_size=world["store"] * CHUNK_BYTES / GIB, kv_store_write_policy=world["policy"])
    record = run_on(Workload("w", BLOCK, requests), config, workers=world["workers"], kv_store=store)
    made = record.requests
    beyond = sum(tokens.filled(0) for tokens in (made.host_tokens, made.disk_tokens, made.store_tokens))
    assert made.succeeded.all() and len(made) == 40
    assert (beyond <= made.cached_tokens).all() and (made.cached_tokens <= made.isl).all()
    come = {found.tier: found.written.bytes for found in record.tiers}
    come["host"] += sum(found.read.bytes for found in record.tiers if found.tier != "host")
    for found in record.tiers:
        assert come[found.tier] >= found.evicted_chunks * world["per_chunk"] * CHUNK_BYTES
        assert found.full <= 1
        assert found.read.bytes % (world["per_chunk"] * CHUNK_BYTES) == 0
    again = run_on(Workload("w", BLOCK, requests), config, workers=world["workers"], kv_store=store)
    assert again.requests.last_token_s.tolist() == made.last_token_s.tolist()


def test_a_load_is_taken_in_when_it_ends_though_a_store_of_another_prompt_lasts_longer():
    """The worker is idle while d is stored, chunk by chunk of 5 s, and a is loaded."""
    rows = [(0.0, "a", 2), (30.0, "b", 10), (190.0, "d", 5), (190.3, "a", 2)]
    requests = [Request(at, BLOCK * blocks, 1, tuple(f"{n}{p}" for p in range(blocks))) for at, n, blocks in rows]
    config = engine(host=20, num_gpu_blocks=11, host_bandwidth_gb_s=CHUNK_BYTES / 5e9)
    made = run_on(Workload("w", BLOCK, requests), config).requests
    assert made.host_tokens.tolist()[-1] == 128
    assert (made.first_token_s - made.sent_s)[-1] == pytest.approx(10.01)


def test_a_tier_counts_for_no_token_that_was_on_the_gpu():
    """The first chunk of two blocks is read from disk, though the first of these is on the GPU."""
    requests = [
        Request(at, BLOCK * blocks, 1, tuple(f"{name}{place}" for place in range(blocks)))
        for at, name, blocks in [(0.0, "a", 4), (10.0, "b", 7), (20.0, "a", 4)]
    ]
    made = run_on(
        Workload("w", BLOCK, requests), engine(host=6, disk=20, blocks_per_chunk=2, num_gpu_blocks=9)
    ).requests
    assert made.cached_tokens.tolist()[-1] == 4 * BLOCK
    assert (made.host_tokens.tolist()[-1], made.disk_tokens.tolist()[-1]) == (0, 3 * BLOCK)


def test_ranks_in_lockstep_go_on_when_a_look_up_ends_in_a_hurry():
    config = engine(disk=8, dp_size=2, kv_prefetch_policy="best_effort", kv_disk_lookup_ms=1000.0)
    timing = TimingConfig(
        timing="constant", constant_prefill_ms=200.0, constant_decode_ms=10.0, enable_expert_parallel=True
    )
    made = simulate_pool(prompts("a"), engine=config, timing=timing).requests
    assert (made.first_token_s - made.sent_s).tolist() == pytest.approx([0.2])


def test_a_prompt_that_was_loaded_in_part_goes_on_when_blocks_held_for_others_are_free():
    """The second a waits with its 2 loaded blocks for those of d, whose KV takes 40 s to its decode worker."""
    rows = [(0.0, "a", 2), (60.0, "b", 6), (200.0, "d", 4), (201.0, "a", 4)]
    requests = [Request(at, BLOCK * blocks, 1, tuple(f"{n}{p}" for p in range(blocks))) for at, n, blocks in rows]
    prefilling = engine(host=20, num_gpu_blocks=7, scheduler_reserve_full_isl=False)
    pools = (
        Pool(name="prefill", role="prefill", mocker=prefilling, timing=TIMING),
        Pool(name="decode", role="decode", mocker=engine(host=0, num_gpu_blocks=20), timing=TIMING),
    )
    transfer = TransferConfig(bandwidth_gb_s=CHUNK_BYTES / 10e9)
    deployment = Deployment(pools=pools, transfer=transfer)
    made = simulate(Run.alone(Settings(deployment)), Workload("w", BLOCK, requests)).requests
    assert made.succeeded.all()
    assert made.host_tokens.tolist()[-1] == 128


def test_prefill_workers_keep_kv_in_tiers_too():
    pools = (
        Pool(name="prefill", role="prefill", mocker=engine(disk=8), timing=TIMING),
        Pool(name="decode", role="decode", mocker=engine(host=0, num_gpu_blocks=20), timing=TIMING),
    )
    record = simulate(Run.alone(Settings(Deployment(pools=pools))), prompts("a", "b", "c", "a"))
    assert record.requests.disk_tokens.tolist() == [0, 0, 0, 128]
    assert record.requests.succeeded.all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_disk_size": 4}, "kv_disk_size is 4, and kv_offloading_size is 0; expected host memory, too"),
        (
            {"kv_offloading_size": 1e308},
            r"kv_offloading_size must be from 0 to 1000000000 \(GiB for each data-parallel rank\), not 1e",
        ),
        (
            {"kv_disk_size": 4, "kv_offloading_size": 4, "store_threshold": 2},
            "store_threshold is 2; expected 0 with a disk",
        ),
    ],
)
def test_sizes_of_tiers_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_bandwidth_gb_s": 50}, "host_bandwidth_gb_s is 50, but there is no host memory for KV"),
        (
            {"kv_offloading_size": 4, "kv_disk_write_policy": "write_back"},
            "kv_disk_write_policy is write_back, but there is no disk",
        ),
        (
            {"kv_offloading_size": 4, "kv_prefetch_policy": "timeout"},
            "kv_prefetch_policy is timeout, but there is no tier behind host memory",
        ),
        (
            {"kv_offloading_size": 4, "kv_disk_size": 4, "kv_prefetch_timeout_s": 3},
            "kv_prefetch_timeout_s is 3, but kv_prefetch_policy is not timeout",
        ),
    ],
)
def test_a_setting_of_a_tier_that_no_worker_has_is_refused_unless_another_arm_has_it(changes, message):
    idle = Deployment(pools=(Pool(mocker=EngineConfig(**changes)),))
    with pytest.raises(ValueError, match=message):
        refuse_idle_settings([idle])
    full = EngineConfig(kv_offloading_size=4, kv_disk_size=4, kv_prefetch_policy="timeout")
    refuse_idle_settings([idle, Deployment(pools=(Pool(mocker=full),))])


def test_a_setting_of_a_store_that_no_arm_has_is_refused():
    without, with_store = (
        Deployment(kv_store=KvStoreConfig(kv_store_size=size, kv_store_latency_ms=3)) for size in (0, 4)
    )
    with pytest.raises(ValueError, match="kv_store_latency_ms is 3, but there is no store; set kv_store_size"):
        refuse_idle_settings([without])
    refuse_idle_settings([without, with_store])


def test_chunks_of_a_store_take_whole_pages_as_those_of_host_memory_and_disk_do():
    odd = EngineConfig(block_size=1, num_gpu_blocks=100, kv_offloading_size=1, kv_disk_size=1)
    fp8 = TimingConfig(gpu="h100", model="deepseek-ai/DeepSeek-V3", kv_cache_dtype="fp8", tensor_parallel_size=8)
    host = resolve(odd, fp8).host
    assert host.chunk_bytes % 4096
    tiers = [*host.tiers, KvStoreConfig(kv_store_size=1).tier(host)]
    assert {tier.num_chunks for tier in tiers} == {host.num_chunks}


def test_a_disk_or_store_smaller_than_a_chunk_is_refused():
    with pytest.raises(
        ValueError, match=r"kv_disk_size is 0.001 GiB; expected at least 0.007812, one chunk \(blocks_per_chunk is 1\)"
    ):
        resolve(EngineConfig(block_size=BLOCK, kv_offloading_size=1, kv_disk_size=0.001))
    with pytest.raises(ValueError, match=r"kv_store_size is 0.001 GiB; expected at least 0.007812"):
        engines_of(_deployment(engine(), 0.001))


def test_a_store_needs_workers_with_host_memory_and_chunks_of_one_size():
    with pytest.raises(ValueError, match="kv_store_size is 1, but no worker has kv_offloading_size"):
        engines_of(_deployment(engine(host=0), 1.0))
    two = (Pool(name="a", mocker=engine(host=4)), Pool(name="b", mocker=engine(host=4, blocks_per_chunk=2)))
    with pytest.raises(ValueError, match="kv_store_size is 1, but workers have chunks of"):
        engines_of(Deployment(pools=two, kv_store=KvStoreConfig(kv_store_size=1.0)))


def _deployment(config, size):
    return Deployment(pools=(Pool(mocker=config, timing=TIMING),), kv_store=KvStoreConfig(kv_store_size=size))
