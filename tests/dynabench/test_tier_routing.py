"""The router in virtual time knows what simulated engines hold beyond their GPUs."""

import random
from dataclasses import replace

import pytest

from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.virtual.means import with_load_costs
from mocker import EngineConfig
from mocker.timing.choose import resolve
from serving.router import RouterConfig
from tests.support.simulated import simulate_pool
from workloads import Request, Workload

SMALL = {"block_size": 16, "num_gpu_blocks": 80, "async_scheduling": False}


def returning(num_prompts):
    """Make a workload of some prompts of 500 tokens that come again and again, one after the other."""
    rng, requests = random.Random(1), []
    for number in range(6 * num_prompts):
        prompt = rng.randrange(num_prompts)
        ids = tuple(10 * prompt + place for place in range(5))
        requests.append(Request(2.0 * number, 500, 4, ids))
    return Workload("returning", 112, requests)


@pytest.mark.parametrize("workers", [1, 3, 17])
@pytest.mark.parametrize(("eviction_policy", "blocks_per_chunk"), [("lru", 1), ("arc", 1), ("lru", 4)])
def test_the_router_expects_what_the_engine_finds_on_the_gpu_and_in_host_memory(
    workers, eviction_policy, blocks_per_chunk
):
    chunks = {"kv_offloading_size": 0.3, "eviction_policy": eviction_policy, "blocks_per_chunk": blocks_per_chunk}
    engine = EngineConfig(**SMALL, **chunks)
    run, without = (
        simulate_pool(returning(5 * workers), "prefix-longest", workers=workers, engine=config)
        for config in (engine, EngineConfig(**SMALL))
    )
    assert run.requests.predicted_tokens.tolist() == run.requests.cached_tokens.tolist()
    assert run.requests.cached_tokens.sum() > without.requests.cached_tokens.sum()


def test_host_memory_draws_requests_to_the_worker_that_has_their_prompt():
    engine = EngineConfig(**SMALL, kv_offloading_size=2.0)
    hits = {
        mode: int(simulate_pool(returning(10), mode, workers=3, engine=engine).requests.cached_tokens.sum())
        for mode in ("kv", "kv-tiered", "marginal", "round-robin")
    }
    assert hits["kv"] == hits["kv-tiered"] == hits["marginal"] > 1.5 * hits["round-robin"]


@pytest.mark.parametrize("workers", [1, 3, 17])
def test_the_router_expects_what_the_engine_finds_on_disk(workers):
    engine = EngineConfig(**SMALL, kv_offloading_size=0.2, kv_disk_size=1.0)
    run, without = (
        simulate_pool(returning(8 * workers), "prefix-longest", workers=workers, engine=config)
        for config in (engine, replace(engine, kv_disk_size=0.0))
    )
    assert run.requests.predicted_tokens.tolist() == run.requests.cached_tokens.tolist()
    assert run.requests.cached_tokens.sum() > without.requests.cached_tokens.sum()


@pytest.mark.parametrize("workers", [3, 17])
def test_the_router_expects_at_every_worker_what_one_has_written_to_the_store(workers):
    engine, store = EngineConfig(**SMALL, kv_offloading_size=0.2), KvStoreConfig(kv_store_size=8.0)
    run = simulate_pool(returning(8), "lmetric", workers=workers, engine=engine, kv_store=store, seed=3)
    requests = run.requests
    assert requests.predicted_tokens.tolist() == requests.best_tokens.tolist() == requests.cached_tokens.tolist()
    assert (requests.cached_tokens > 0).sum() == len(requests) - 8  # all but the first of each prompt
    assert len(set(requests.worker.tolist())) > 2


def test_what_a_load_takes_follows_from_the_engine():
    # Llama-3.1-8B: 131,072 bytes a token. What is behind host memory passes through it, and through a worker's port.
    plain, host, disk = (
        resolve(EngineConfig(kv_offloading_size=size, kv_disk_size=behind, block_size=64))
        for size, behind in ((0, 0), (8, 0), (8, 8))
    )
    store = replace(disk, host=replace(disk.host, tiers=(KvStoreConfig(kv_store_size=8.0).tier(disk.host),)))

    def costs(*engines, **given):
        found = with_load_costs(RouterConfig(**given), engines, [20e9] * len(engines))
        return found.host_load_us_per_token, found.disk_load_us_per_token, found.shared_load_us_per_token

    assert costs(plain) == (None, None, None)
    assert costs(plain, host) == pytest.approx((4.096, None, None))
    assert costs(host, host_load_us_per_token=7.0) == (7.0, None, None)
    assert costs(host, disk)[1] == pytest.approx(131072 / 7e3 + 4.096)
    assert costs(store)[2] == pytest.approx(131072 / 20e3 + 4.096)
