"""Random scenarios: engines with tight limits, and requests that share prefixes and press on their caches."""

import random
from dataclasses import replace
from typing import Any

from dynabench.arm import Settings
from dynabench.deployment.description import Deployment, Pool
from mocker import EngineConfig, SglangConfig
from mocker.config import EngineVersion
from mocker.timing.config import TimingConfig
from workloads import Workload
from workloads.request import Request

BLOCK = 8
"""Tokens that each name of a prompt's blocks stands for."""
LONGEST = 96
"""Tokens of the longest prompt and answer together."""
SPECULATING = (
    {"speculative_method": "eagle3"},
    {"speculative_method": "mtp"},
    {"speculative_method": "ngram", "async_scheduling": False},
)


def scenario(seed: int, version: EngineVersion) -> tuple[Settings, Workload]:
    """Return an engine that follows the rules of a version, and requests for it; the same ones for the same seed."""
    rng = random.Random(f"scenario {seed}")
    config = _engine(rng, version)
    timing = TimingConfig(timing="constant", constant_prefill_ms=3.7, constant_decode_ms=1.3)
    settings = Settings(Deployment(pools=(Pool(mocker=config, timing=timing),)))
    adapters = rng.randint(1, 3) if config.enable_lora else 0
    return settings, Workload(f"scenario {seed}", BLOCK, _requests(rng, adapters))


def sglang_scenario(seed: int) -> tuple[Settings, Workload]:
    """Return an engine of SGLang's family and requests for it; the same ones for the same seed."""
    rng = random.Random(f"scenario {seed} of SGLang")
    timing = TimingConfig(timing="constant", constant_prefill_ms=3.7, constant_decode_ms=1.3)
    pool = Pool(engine_type="sglang", sglang=_sglang(rng), timing=timing)
    return Settings(Deployment(pools=(pool,))), Workload(f"scenario {seed}", BLOCK, _requests(rng, 0))


def _sglang(rng: random.Random) -> SglangConfig:
    page = rng.choice([1, 1, 2, 4, 8])
    config = SglangConfig(
        page_size=page,
        max_total_tokens=rng.choice([128, 160, 256, 512]),
        chunked_prefill_size=rng.choice([max(page, 8), 16, 33, 64, -1]),
        max_prefill_tokens=rng.choice([16384, 16384, 24, 64]),
        max_running_requests=rng.choice([2, 3, 4, 8, 16]),
        prefill_max_requests=rng.choice([None, None, 1, 2]),
        enable_mixed_chunk=rng.random() < 0.4,
        prefill_decode_interval=rng.choice([0, 0, 0, 1, 3]),
        prefill_decode_interval_min_bs=rng.choice([0, 0, 2]),
        schedule_policy=rng.choice(["fcfs", "fcfs", "lof", "lpm", "dfs-weight", "hrrn"]),
        schedule_conservativeness=rng.choice([0.02, 0.02, 0.1, 0.3, 1.0]),
        disable_radix_cache=rng.random() < 0.2,
        radix_eviction_policy=rng.choice(["lru", "lru", "lfu", "fifo", "mru", "filo", "slru"]),
        disable_overlap_schedule=rng.random() < 0.5,
        new_token_ratio_decay_steps=rng.choice([1, 5, 20, 600]),
        clip_max_new_tokens_estimation=rng.choice([4096, 4096, 8]),
    )
    if config.schedule_policy in ("fcfs", "lof") and rng.random() < 0.5:
        return replace(
            config,
            enable_priority_scheduling=True,
            schedule_low_priority_values_first=rng.random() < 0.4,
            disable_priority_preemption=rng.random() < 0.4,
            priority_scheduling_preemption_threshold=rng.choice([0, 1, 10]),
            retraction_policy=rng.choice(["length", "priority"]),
        )
    return config


def _engine(rng: random.Random, version: EngineVersion) -> EngineConfig:
    budget, size = rng.choice([8, 9, 12, 16, 16, 32, 64]), rng.choice([1, 2, 4, 4, 8])
    config = EngineConfig(
        engine_version=version,
        block_size=size,
        num_gpu_blocks=1 + rng.choice([104, 128, 160, 256]) // size,
        max_num_seqs=(seats := min(rng.choice([2, 3, 4, 8]), budget)),
        max_num_active_seqs=rng.choice([None, None, None, rng.randint(1, seats)]),
        max_num_batched_tokens=budget,
        max_model_len=rng.choice([None, None, LONGEST]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 0, 4, 7]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.5,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        scheduler_reserve_full_isl=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.75,
        async_scheduling=rng.random() < 0.6,
    )
    more: dict[str, Any] = {}
    if rng.random() < 0.25:
        more |= rng.choice(SPECULATING) | {"num_speculative_tokens": 3, "acceptance_length": 2.0, "drafting_ms": 0.4}
    elif rng.random() < 0.2:
        more |= {"enable_lora": True, "max_loras": rng.choice([1, 2])}
    if config.rules.holds_prefills and rng.random() < 0.3:
        more["prefill_schedule_interval"] = rng.choice([2, 3, 6])
    return replace(config, **more)


def _requests(rng: random.Random, num_adapters: int) -> list[Request]:
    """Return requests some of whose prompts begin as an earlier one does."""
    made: list[Request] = []
    now, names = 0.0, iter(range(1 << 30))
    for _ in range(rng.randint(20, 60)):
        now += rng.expovariate(rng.choice([30.0, 100.0]))
        length, answer = rng.randint(1, LONGEST // 2), rng.randint(1, LONGEST // 2 - 1)
        earlier = rng.choice(made) if made and rng.random() < 0.5 else None
        ids = () if earlier is None else earlier.hash_ids[: min(earlier.input_length, length) // BLOCK]
        ids = (*ids, *(next(names) for _ in range(-(-length // BLOCK) - len(ids))))
        adapter = rng.randint(0, num_adapters)
        made.append(
            Request(
                now,
                length,
                answer,
                ids,
                ends=rng.choice(["length", "stop"]),
                priority=rng.randrange(3),
                adapter=f"adapter {adapter}" if adapter else "",
            )
        )
    return made
