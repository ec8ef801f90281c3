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
from mocker.timing.choose import timing_model
from mocker.timing.files import step_noise
from mocker.timing.model import chunk
from reports.metrics import spread
from reports.records import Record, Requests
from serving.router import Router, RouterConfig
from workloads import Workload, WorkloadError
from workloads.describe import endless_hits
from workloads.pacing import LoadConfig

ASK_EVERY = 64
"""Steps between two looks at whether to go on, which may be looks at a file."""


def check_fits(workload: Workload, engine: EngineConfig) -> None:
    """Refuse a workload with a request that the engine could never hold.

    Raises:
        WorkloadError: the first such request, and what would help.
    """
    capacity = engine.num_usable_blocks * engine.block_size
    limit = capacity if engine.max_model_len is None else min(capacity, engine.max_model_len - 1)
    for number, request in enumerate(workload.requests):
        if request.input_length + request.output_length - 1 > capacity or request.input_length > limit:
            raise WorkloadError(
                f"{workload.name}: request {number} has {request.input_length} prompt and {request.output_length} output tokens, "
                f"more than the {limit} an engine can hold (num_gpu_blocks {engine.num_kv_blocks} x block_size "
                f"{engine.block_size}); raise --num-gpu-blocks or cut prompts with --cap-isl"
            )
        if not engine.enable_chunked_prefill and request.input_length > engine.max_num_batched_tokens:
            raise WorkloadError(
                f"{workload.name}: request {number} has a prompt of {request.input_length} tokens; without chunked prefill "
                f"max_num_batched_tokens ({engine.max_num_batched_tokens}) must be at least that"
            )


def simulate(
    workload: Workload,
    *,
    mode: str,
    engine: EngineConfig,
    router: RouterConfig,
    num_workers: int,
    seed: int,
    load: LoadConfig = LoadConfig(),  # noqa: B008 (frozen)
    overhead: OverheadConfig = OverheadConfig(),  # noqa: B008 (frozen)
    on_progress: Callable[[int], None] | None = None,
    is_interrupted: Callable[[], bool] = bool,
) -> Record:
    """Run one arm of an experiment in virtual time; once `is_interrupted` says so, end it and keep what is done.

    Raises:
        WorkloadError: a request can never fit.
        StalledError: the simulation ended with unfinished requests (a defect).
    """
    check_fits(workload, engine)
    times = overhead_of(overhead, engine)
    router = with_step_costs(router, engine)
    core = Router(mode, router, block_size=engine.block_size, rng=random.Random(f"router {seed}"), closed_events=True)

    times_asked = itertools.count()

    def progressed(done: int) -> None:
        if on_progress is not None:
            on_progress(done)
        if next(times_asked) % ASK_EVERY == 0 and is_interrupted():
            raise InterruptError

    cluster = Cluster(
        workload,
        engine=engine,
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
    gaps = spread(gaps, step_noise(engine))
    requests = _requests(cluster, workload, engine, load)
    facts = {}
    if any(times) and len(requests):
        sent = np.count_nonzero(~np.isnan(cluster.log.intended_s))
        outside = cluster.delays_s / sent + times.answer_s
        facts["overhead_share"] = float(outside / (requests.first_token_s - requests.sent_s).mean())
    return Record(mode, requests, gaps, wall_s, len(cluster.workers), is_complete=is_complete, facts=facts)


def _requests(cluster: Cluster, workload: Workload, engine: EngineConfig, load: LoadConfig) -> Requests:
    """Return what became of the requests that were answered."""
    log = cluster.log
    isl = np.array([request.input_length for request in workload.requests], np.int32)
    osl = np.array([request.output_length for request in workload.requests], np.int32)
    requests = log.finish(
        sent_s=log.intended_s,
        first_byte_s=log.first_token_s,
        done_s=log.last_token_s,
        isl=isl,
        osl=osl if engine.max_model_len is None else np.minimum(osl, engine.max_model_len - isl),
        planned_isl=isl,
        planned_osl=osl,
        first_chunk_tokens=np.ones(len(log), np.int32),
        endless_tokens=endless_hits(workload),
        is_measured=[load.is_measured(time) for time in log.intended_s],
    )
    return requests if cluster.num_finished == len(log) else requests[~requests.worker.mask]


def with_step_costs(router: RouterConfig, engine: EngineConfig) -> RouterConfig:
    """Tell the predicting modes what the simulated engine's steps cost, where the user has not."""
    timing = timing_model(engine)
    budget, capacity = engine.max_num_batched_tokens, engine.kv_capacity_tokens
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
