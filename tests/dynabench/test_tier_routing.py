"""The router in virtual time knows what simulated engines hold beyond their GPUs."""

import random

import pytest

from dynabench.virtual.run import with_step_costs
from mocker import EngineConfig
from mocker.timing.choose import resolve
from serving.router import RouterConfig
from tests.support.simulated import simulate
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
        simulate(returning(5 * workers), "prefix-longest", workers=workers, engine=config)
        for config in (engine, EngineConfig(**SMALL))
    )
    assert run.requests.predicted_tokens.tolist() == run.requests.cached_tokens.tolist()
    assert run.requests.cached_tokens.sum() > without.requests.cached_tokens.sum()


def test_host_memory_draws_requests_to_the_worker_that_has_their_prompt():
    engine = EngineConfig(**SMALL, kv_offloading_size=2.0)
    hits = {
        mode: int(simulate(returning(10), mode, workers=3, engine=engine).requests.cached_tokens.sum())
        for mode in ("kv", "kv-tiered", "marginal", "round-robin")
    }
    assert hits["kv"] == hits["kv-tiered"] == hits["marginal"] > 1.5 * hits["round-robin"]


def test_what_a_load_from_host_memory_takes_follows_from_the_engine():
    # Llama-3.1-8B: 131,072 bytes a token, at 32 GB/s.
    small, large = (resolve(EngineConfig(kv_offloading_size=size, block_size=64)) for size in (0, 8))
    assert with_step_costs(RouterConfig(), [small, large]).host_load_us_per_token == pytest.approx(4.096)
    assert with_step_costs(RouterConfig(host_load_us_per_token=7.0), [large]).host_load_us_per_token == 7.0
    assert with_step_costs(RouterConfig(), [small]).host_load_us_per_token is None
