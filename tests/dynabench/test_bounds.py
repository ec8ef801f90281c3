"""What no router could beat: hits by memory, and mean TTFT."""

import json
import random
from dataclasses import replace
from itertools import count
from typing import get_args

import numpy as np
import pytest

from dynabench.arm import Arm, Run, Settings
from dynabench.deployment.engines import engines_of
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.experiment.bounds import PromptHits, bounds_of, hit_shares, lower_bound, tiers_of, ttft_bound
from dynabench.virtual.run import simulate
from mocker import EngineConfig
from mocker.tiers.config import PrefetchPolicy, WritePolicy
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from reports.figures import metrics
from serving.router import ROUTER_MODES
from tests.support.commands import dynabench
from tests.support.simulated import deployed, simulate_pool
from tests.support.workloads import conversations
from workloads import Request, Workload
from workloads.pacing import LoadConfig

SMALL_MODEL = TimingConfig(timing="polynomial", model="Qwen/Qwen3-0.6B")  # 112 KiB of KV a token
MODES = [mode for mode in ROUTER_MODES if mode != "oracle-rollout"]  # that one takes long


@pytest.fixture(scope="module")
def workload():
    return conversations(300, rate=12)


def prompts_at(times, prompts, *, block_size=64):
    """Make a workload of prompts of whole blocks, and a token."""
    rows = [
        Request(time, block_size * len(ids) + 1, 2, (*ids, -n))
        for n, (time, ids) in enumerate(zip(times, prompts, strict=True), 1)
    ]
    return Workload("w", block_size, rows)


def drawn(rng):
    """Draw a workload whose prompts share prefixes, and an engine that barely holds it."""
    fresh, now, rows, paths = count(), 0.0, [], [()]
    size, gap = rng.choice([64, 128, 256]), rng.choice([0.01, 0.2, 2, 10])
    for _ in range(rng.randint(20, 80)):
        now += rng.expovariate(1 / gap)
        before = rng.choice(paths[-12:])
        ids = before[: rng.choice([len(before), rng.randint(0, len(before))])]
        ids = (ids + tuple(next(fresh) for _ in range(rng.randint(not ids, 8))))[:40]
        paths.append(ids)
        length = len(ids) * size + rng.choice([1, 1, 0, -rng.randint(0, size - 1)])
        rows.append(
            Request(now, length, rng.choice([1, 1, 5, 40]), (*ids, next(fresh)) if length > len(ids) * size else ids)
        )
    block_size = rng.choice([16, 32, 64])
    longest = max((row.input_length + row.output_length) // block_size + 2 for row in rows)
    engine = EngineConfig(
        block_size=block_size,
        num_gpu_blocks=longest + rng.choice([0, 5, 20, 100]),
        max_num_batched_tokens=rng.choice([256, 512, 8192]),
        long_prefill_token_threshold=rng.choice([0, 0, 128]),
        async_scheduling=rng.choice([True, False]),
        kv_offloading_size=rng.choice([0, 0.03, 0.1, 1]),
        blocks_per_chunk=rng.choice([1, 2]),
        eviction_policy=rng.choice(["lru", "arc"]),
        host_bandwidth_gb_s=rng.choice([1, 5, 32, 1000]),
    )
    if engine.kv_offloading_size:
        far = {"kv_disk_size": rng.choice([0, 0.1, 1]), "kv_disk_bandwidth_gb_s": rng.choice([1, 7, 1000])}
        policies = {
            "kv_disk_write_policy": rng.choice(get_args(WritePolicy)),
            "kv_prefetch_policy": rng.choice(get_args(PrefetchPolicy)),
        }
        engine = replace(engine, **(far | policies if rng.random() < 0.7 else {"store_threshold": 2}))
    return Workload("w", size, rows), engine


@pytest.mark.parametrize("seed", range(120))
def test_no_run_beats_the_bounds(seed):
    rng = random.Random(seed)
    workload, config = drawn(rng)
    timing = rng.choice(
        [
            SMALL_MODEL,
            TimingConfig(timing="constant", model="Qwen/Qwen3-0.6B"),
            TimingConfig(model="Qwen/Qwen3-8B", gpu="h100"),
        ]
    )
    mode, workers = rng.choice(MODES) + rng.choice(["", "", "+late(256)"]), rng.randint(1, 3)
    deployment = deployed(mode, workers=workers, engine=config, timing=timing)
    if config.kv_offloading_size and not config.store_threshold:
        store = KvStoreConfig(
            kv_store_size=rng.choice([0, 0.2, 2]), kv_store_write_policy=rng.choice(get_args(WritePolicy))
        )
        deployment = replace(deployment, kv_store=store)
    found = simulate(Run.alone(Settings(deployment), seed=seed), workload).requests
    engines, prompts = engines_of(deployment), PromptHits(workload, config.block_size)
    highest = max(hit_shares(prompts, tiers_of(engines)).values())
    assert found.cached_tokens.sum() / found.isl.sum() <= highest + 1e-9, f"{mode}, {workers} workers, {config}"
    ttft = metrics.per_request(found)["ttft_sched"].mean()
    assert ttft >= lower_bound(prompts, engines[0], workers) * (1 - 1e-9), f"{mode}, {workers} workers, {config}"


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_beats_the_bounds(workload, mode):
    engine = resolve(EngineConfig(num_gpu_blocks=800))
    prompts = PromptHits(workload, 64)
    found = simulate_pool(workload, mode, engine=engine.config, workers=3, seed=1).requests
    assert metrics.per_request(found)["ttft"].mean() >= lower_bound(prompts, engine, 3) > 0
    (share,) = hit_shares(prompts, tiers_of([engine] * 3)).values()
    assert found.cached_tokens.sum() / found.isl.sum() <= share


def test_each_tier_adds_to_what_can_be_found():
    # 16 blocks come again after 32 others. 20 blocks of GPU memory keep none of them; 1 GiB of host memory keeps all.
    workload = prompts_at(range(4), [range(16), range(100, 116), range(200, 216), range(16)])
    engine = resolve(EngineConfig(num_gpu_blocks=21, kv_offloading_size=1), SMALL_MODEL)
    tiers = tiers_of([engine])
    assert hit_shares(PromptHits(workload, 64), tiers) == {
        "GPU memory": pytest.approx(4 * 64 / (4 * 1025)), "host memory": pytest.approx(16 * 64 / (4 * 1025)),
    }  # fmt: skip
    assert [tier.num_blocks for tier in tiers] == [20, 2**30 // (64 * 112 * 1024)]
    assert tiers[1].token_s == pytest.approx(112 * 1024 / 32e9)
    assert [tier.num_blocks for tier in tiers_of([engine] * 3)] == [3 * tier.num_blocks for tier in tiers]


def test_disks_add_up_and_a_store_is_one():
    engine = EngineConfig(kv_offloading_size=1, kv_disk_size=2, kv_disk_bandwidth_gb_s=8)
    store = KvStoreConfig(kv_store_size=4, kv_store_bandwidth_gb_s=24)
    deployment = replace(deployed(workers=3, engine=engine, timing=SMALL_MODEL), kv_store=store)
    tiers = tiers_of(engines_of(deployment))
    assert [tier.name for tier in tiers] == ["GPU memory", "host memory", "disk", "store"]
    block = 64 * 112 * 1024
    assert [tier.num_blocks for tier in tiers[1:]] == [3 * (2**30 // block), 3 * (2**31 // block), 2**32 // block]
    near, disk, shared = (tier.token_s for tier in tiers[1:])
    assert near < disk == shared == pytest.approx(112 * 1024 * (1 / 32e9 + 1 / 32e9))  # both are read at once


def bound_s(workload, timing=SMALL_MODEL, **engine):
    """Return the bound of the mean TTFT on one worker, and that of an unlimited cache."""
    found = resolve(EngineConfig(**engine), timing)
    prompts = PromptHits(workload, 64)
    return ttft_bound(prompts, found, tiers_of([found])), ttft_bound(prompts, found)


def test_what_cannot_be_in_a_cache_is_computed():
    workload = prompts_at(range(0, 40, 10), [range(16), range(100, 116), range(200, 216), range(16)])
    bound, unlimited = bound_s(workload, num_gpu_blocks=21)
    missing = 12 * 64  # 4 of 16 blocks can stay
    assert bound - unlimited == pytest.approx(
        missing * 1.518344e-5 / 4, rel=0.01
    )  # what the polynomial adds for a token


def test_what_is_in_host_memory_costs_a_copy_unless_it_is_computed_faster():
    workload = prompts_at(range(0, 40, 10), [range(16), range(100, 116), range(200, 216), range(16)])
    sizes = {"num_gpu_blocks": 21, "kv_offloading_size": 1}
    copied, unlimited = bound_s(workload, host_bandwidth_gb_s=32, **sizes)
    assert copied - unlimited == pytest.approx(12 * 64 * 112 * 1024 / 32e9 / 4, rel=0.01)
    slow, _ = bound_s(workload, host_bandwidth_gb_s=0.1, **sizes)
    none, _ = bound_s(workload, num_gpu_blocks=21)
    assert slow == pytest.approx(none)
    assert bound_s(workload, num_gpu_blocks=1000) == (unlimited, unlimited)


def arms(*deployments, load=None):
    """Return arms that are called by their numbers."""
    load = load or LoadConfig()
    return [Arm(str(number), Settings(deployment, load=load), {}) for number, deployment in enumerate(deployments)]


def test_arms_that_differ_in_memory_have_a_bound_in_common(workload):
    small, large = EngineConfig(num_gpu_blocks=100), EngineConfig(num_gpu_blocks=4000)
    found = bounds_of(
        arms(deployed(engine=small), deployed(engine=large), deployed(workers=3, engine=large)), lambda _: workload
    )
    single, _ = (bounds_of(arms(deployed(workers=n, engine=large)), lambda _: workload) for n in (3, 1))
    assert found.ttft_s == single.ttft_s
    assert (
        found.hit_shares["0"]["GPU memory"] < found.hit_shares["1"]["GPU memory"] == found.hit_shares["2"]["GPU memory"]
    )


def test_without_an_order_of_arrival_nothing_is_known(workload):
    assert bounds_of(arms(deployed(), load=LoadConfig(concurrency=3)), lambda _: workload) == (None, {})
    waiting = Workload("w", 64, [Request(0.0, 100, 2, (1, 2)), Request(0.0, 100, 2, (1, 3), after=(0,), delay_s=1.0)])
    assert bounds_of(arms(deployed()), lambda _: waiting) == (None, {})


def test_of_made_up_ids_no_hits_are_known(workload):
    made_up = Workload("w", 512, workload.requests, knows_prefixes=False)
    found = bounds_of(arms(deployed()), lambda _: made_up)
    assert (found.ttft_s is not None, found.hit_shares) == (True, {})


def test_the_warm_up_counts_for_no_bound(workload):
    late = PromptHits(workload, 64, LoadConfig(warmup_s=10.0))
    engine = resolve(EngineConfig(num_gpu_blocks=200))
    found = simulate_pool(workload, "kv", engine=engine.config, load=LoadConfig(warmup_s=10.0)).measured.requests
    assert len(found) == late.is_counted.sum() < len(workload)
    (share,) = hit_shares(late, tiers_of([engine])).values()
    assert found.cached_tokens.sum() / found.isl.sum() <= share
    assert metrics.per_request(found)["ttft"].mean() >= lower_bound(late, engine, 1)
    assert np.array_equal(late.hits, PromptHits(workload, 64).hits)


def test_a_report_says_how_much_of_the_possible_hits_was_reached(tmp_path):
    flags = ("--model", "Qwen/Qwen3-0.6B", "--timing", "polynomial", "--num-gpu-blocks", "200", "--workers", "1")
    done = dynabench(
        "simulate",
        *flags,
        "--max-requests",
        "300",
        "--router-mode",
        "kv",
        "--vary",
        "kv_offloading_size=0,8",
        "--out",
        tmp_path / "x",
    )
    assert done.returncode == 0, done.stderr
    assert "best possible hit share" in done.stdout
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    without, beside = summary["bound"]["hit_shares"].values()
    assert list(without) == ["GPU memory"]
    assert without["GPU memory"] == beside["GPU memory"] < beside["host memory"]
    for arm, reached in summary["bound"]["reached"].items():
        share = summary["arms"][arm]["waterfall"]["actual"]
        assert reached == pytest.approx(share / max(summary["bound"]["hit_shares"][arm].values()))
        assert 0 < reached <= 1
    report = (tmp_path / "x" / "report.html").read_text()
    for label in ("best hits: GPU memory", "best hits: with host memory", "best possible, reached"):
        assert label in report
