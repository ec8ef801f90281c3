"""The router expects what an engine finds, whatever its scheduler: in virtual time, and over HTTP."""

import random

import pandas as pd
import pytest

from dynabench.arm import Run, Settings
from dynabench.deployment.description import Deployment, Pool
from dynabench.virtual.run import simulate
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from tests.support.commands import dynabench
from workloads import Request, Workload
from workloads.pacing import LoadConfig

SMALL = {
    "vllm": {"mocker": EngineConfig(block_size=16, num_gpu_blocks=201)},
    "sglang": {"sglang": SglangConfig(page_size=16, max_total_tokens=3200)},
    "trtllm": {"trtllm": TrtllmConfig(tokens_per_block=16, kv_cache_max_tokens=3200)},
}
"""Caches in which not all prompts have room."""


def returning():
    """Make a workload of prompts with beginnings in common that come again, one after the other."""
    rng, requests = random.Random(1), []
    for number in range(150):
        group, prompt = rng.randrange(4), rng.randrange(6)
        ids = (group, 10 + group, *(100 * group + 10 * prompt + place for place in range(20, 23)))
        requests.append(Request(2.0 * number, 16 * rng.randrange(29, 35) + 3, rng.randrange(2, 40), ids))
    return Workload("returning", 112, requests)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kind", SMALL)
def test_the_router_expects_what_the_engine_finds(kind, workers):
    pool = Pool(replicas=workers, engine_type=kind, **SMALL[kind])
    deployment = Deployment(pools=(pool,), router_mode="prefix-longest")
    run = simulate(Run.alone(Settings(deployment, load=LoadConfig()), seed=0), returning())
    assert run.requests.predicted_tokens.tolist() == run.requests.cached_tokens.tolist()
    assert run.requests.cached_tokens.sum() > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("vllm", ["--block-size", "16", "--num-gpu-blocks", "1801"]),
        ("sglang", ["--page-size", "16", "--max-total-tokens", "28800"]),
        ("trtllm", ["--tokens-per-block", "16", "--kv-cache-max-tokens", "28800", "--enable-chunked-context"]),
    ],
)
def test_a_live_router_expects_what_the_engine_finds(kind, flags, tmp_path):
    done = dynabench(
        *("run", "--engine-type", kind, *flags, "--router-mode", "kv", "--workers", "2", "--max-requests", "60"),
        *("--concurrency", "1", "--speedup-ratio", "50", "--cap-isl", "6000", "--out", tmp_path / "run"),
    )
    assert done.returncode == 0, done.stderr
    requests = pd.read_parquet(tmp_path / "run" / "requests.parquet")
    assert requests.predicted_tokens.tolist() == requests.cached_tokens.tolist()
    assert requests.cached_tokens.sum() > 0
