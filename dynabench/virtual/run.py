"""One arm of an experiment in virtual time."""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dynabench.experiment.settings import OverheadConfig
from dynabench.interrupt import InterruptError
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.overhead import overhead_of
from mocker import EngineConfig
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import chunk
from reports.metrics import spread
from reports.records import ArmResult
from serving.router import Router, RouterConfig
from workloads import Workload, WorkloadError
from workloads.describe import endless_hits
from workloads.pacing import LoadConfig

ASK_EVERY = 64
"""Steps between two looks at whether to go on, which may be looks at a file."""


def check_fits(workload: Workload, engine: SimulatedEngine) -> None:
    """Refuse a workload with a request that the engine could never hold.

    Raises:
        WorkloadError: the first such request, and what would help.
    """
    config, capacity = engine.config, engine.num_usable_tokens
    limit = capacity if config.max_model_len is None else min(capacity, config.max_model_len - 1)
    for number, request in enumerate(workload.requests):
        if request.input_length + request.output_length - 1 > capacity or request.input_length > limit:
            raise WorkloadError(
                f"{workload.name}: request {number} has {request.input_length} prompt and {request.output_length} output tokens, "
                f"more than the {limit} an engine can hold (num_gpu_blocks {engine.num_blocks} x block_size "
                f"{config.block_size}); raise --num-gpu-blocks or cut prompts with --cap-isl"
            )
        if not config.enable_chunked_prefill and request.input_length > config.max_num_batched_tokens:
            raise WorkloadError(
                f"{workload.name}: request {number} has a prompt of {request.input_length} tokens; without chunked prefill "
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least that"
            )


def simulate(
    workload: Workload,
    *,
    mode: str,
    engine: EngineConfig,
    router: RouterConfig,
    num_workers: int,
    seed: int,
    timing: TimingConfig = TimingConfig(),  # noqa: B008 (frozen)
    load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
    overhead: OverheadConfig = OverheadConfig(),  # noqa: B008 (frozen)
    on_progress: Callable[[int], None] | None = None,
    is_interrupted: Callable[[], bool] = bool,
) -> ArmResult:
    """Run one arm of an experiment in virtual time; once `is_interrupted` says so, end it and keep what is done.

    Raises:
        WorkloadError: a request can never fit.
        StalledError: the simulation ended with unfinished requests (a defect).
        ValueError: the engine's step times cannot be found.
    """
    simulated = resolve(engine, timing)
    check_fits(workload, simulated)
    times = overhead_of(overhead, timing)
    router = with_step_costs(router, simulated)
    core = Router(mode, router, block_size=engine.block_size, rng=random.Random(f"router {seed}"), closed_events=True)

    times_asked = itertools.count()

    def progressed(done: int) -> None:
        if on_progress is not None:
            on_progress(done)
        if next(times_asked) % ASK_EVERY == 0 and is_interrupted():
            raise InterruptError

    cluster = Cluster(
        workload,
        engine=simulated,
        router=core,
        num_workers=num_workers,
        load=load,
        overhead=times,
        kv_event_delay_s=router.kv_event_delay_s,
        on_progress=progressed,
    )
    started, is_complete = time.perf_counter(), True
    try:
        cluster.run()
    except InterruptError:
        is_complete = False
    wall_s = time.perf_counter() - started
    gaps = np.concatenate(
        [
            np.array(worker.engine.log.rows).reshape(-1, 5)[first:]
            for worker, first in zip(cluster.workers, cluster.first_gap_rows, strict=True)
        ]
    )
    gaps = spread(gaps, simulated.noise)
    columns = _columns(cluster, workload, engine)
    columns["is_measured"] = np.array([load.is_measured(time) for time in columns["intended_s"]], bool)
    if not is_complete:
        columns = {name: column[columns["worker"] >= 0] for name, column in columns.items()}
    run = ArmResult(mode, columns, gaps, wall_s, len(cluster.workers), is_complete=is_complete)
    if any(times) and len(columns["request"]):
        outside = cluster.delays_s / sum(time >= 0 for time in cluster.intended_s) + times.answer_s
        run.facts["overhead_share"] = outside / float(np.mean(columns["first_token_s"] - columns["sent_s"]))
    return run


def _columns(cluster: Cluster, workload: Workload, engine: EngineConfig) -> dict[str, np.ndarray]:
    """Return the columns of requests.parquet."""
    requests, size = workload.requests, engine.block_size
    first, last = np.array(cluster.first_token_s), np.array(cluster.last_token_s)
    isl = np.array([request.input_length for request in requests], np.int32)
    osl = np.array([request.output_length for request in requests], np.int32)
    planned = osl
    if engine.max_model_len is not None:
        osl = np.minimum(osl, engine.max_model_len - isl)
    intended = np.array(cluster.intended_s)
    return {
        "request": np.arange(len(requests), dtype=np.int32),
        "worker": np.array(cluster.worker_of),
        "intended_s": intended,
        "sent_s": intended,
        "admitted_s": np.array(cluster.admitted_s),
        "first_byte_s": first,
        "first_token_s": first,
        "last_token_s": last,
        "done_s": last,
        "isl": isl,
        "osl": osl,
        "planned_isl": isl,
        "planned_osl": planned,
        "first_chunk_tokens": np.ones(len(requests), np.int32),
        "cached_tokens": np.array(cluster.cached_tokens),
        "predicted_tokens": np.array(cluster.overlap_blocks) * size,
        "best_tokens": np.maximum(np.array(cluster.best_blocks) * size, -1),
        "endless_tokens": endless_hits(workload),
        "queue_depth": np.array(cluster.queue_depth),
        "preemptions": np.array(cluster.preemptions),
        "error": np.full(len(requests), "", dtype=object),
    }


def with_step_costs(router: RouterConfig, engine: SimulatedEngine) -> RouterConfig:
    """Tell the predicting modes what the simulated engine's steps cost, where the user has not."""
    timing, budget, capacity = engine.timing, engine.config.max_num_batched_tokens, engine.kv_capacity_tokens
    decode = timing.decode(1, 1).first
    base = timing.mixed(chunk(1), 0, 0)
    costs: dict[str, Any] = {
        "step_base_ms": (base + decode) * 1e3,
        "step_prefill_us": (timing.mixed(chunk(budget), 0, 0) - base) / max(budget - 1, 1) * 1e6,
        "step_decode_us": (timing.decode(2, 2).first - decode) * 1e6,
        "step_context_ns": (timing.decode(1, capacity // 2).first - decode) / max(capacity // 2, 1) * 1e9,
        "step_budget_tokens": budget,
    }
    return dataclasses.replace(
        router, **{name: max(value, 0) for name, value in costs.items() if getattr(router, name) is None}
    )
