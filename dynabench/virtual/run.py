"""One run in virtual time."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import check_fits, engines_of, pools_of
from dynabench.deployment.overhead import Overhead, overhead_of
from dynabench.interrupt import noted
from dynabench.plan import Plan
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.handover import Disaggregation
from dynabench.virtual.planner import SimulatedPlanner
from dynabench.virtual.rollout import best_by_rollout
from dynabench.virtual.use import fleet_use, kv_use, link_use, pool_use, tier_use
from mocker.network.links import Links
from mocker.timing.choose import SimulatedEngine
from mocker.timing.kv_size import KvSize, kv_size_of
from mocker.timing.model import chunk
from mocker.vllm.offload.config import HostMemory
from reports.figures.metrics import spread
from reports.record.records import Floats, Record, Requests
from serving.engines.mock.costs import step_costs_of
from serving.model.card import Role
from serving.router import Mode, Router, RouterConfig, StepCosts
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.request import select
from workloads.reuse import reuse_of

HOSTLESS = ("polynomial", "constant", "table")
"""Step times that do not separate the host's work from the GPU's."""

MODELLESS = ("polynomial", "constant")
"""Step times that are the same for every model."""

FOLLOW_PREFIXES = (
    "cached_tokens", "host_tokens", "disk_tokens", "store_tokens", "endless_tokens", "predicted_tokens", "best_tokens",
)  # fmt: skip
"""Columns that are meaningless if shared prefixes are unknown."""

SHORTEST_STEP_S = 1e-9
"""Shorter steps can vanish in the sum with the time, so that the clock stands still."""


class _Stopped(Exception):  # noqa: N818 (no error)
    """The simulation is to end between two events."""


def run(
    plan: Plan,
    workload: Workload,
    *,
    on_progress: Callable[[int], None] | None = None,
    is_interrupted: Callable[[], bool] | None = None,
) -> Record:
    """Carry out one run in virtual time; when `is_interrupted` returns true between two events, stop and keep what is done.

    Raises:
        WorkloadError: a request can never fit.
        ValueError: the deployment cannot be simulated.
        StalledError: the simulation ended with unfinished requests (a defect).
    """
    cluster = cluster_of(plan, workload)
    cluster.clock.on_look = _look(cluster, on_progress, is_interrupted)
    config = plan.deployment.planner
    planner = SimulatedPlanner(config, cluster) if config.planner != "static" else None
    with noted() if is_interrupted is not None else nullcontext():
        return _carried_out(plan, workload, cluster, planner)


def _carried_out(plan: Plan, workload: Workload, cluster: Cluster, planner: SimulatedPlanner | None) -> Record:
    """Run a cluster until its requests have ended, or it is stopped, and return what is done."""
    started, is_complete = time.perf_counter(), True
    try:
        cluster.run()
    except _Stopped:
        is_complete = False
    wall_s = time.perf_counter() - started
    requests = _requests(cluster, workload, plan.settings.load)
    gaps, gap_starts_s = _gaps(cluster)
    overhead = cluster.overhead
    facts: dict[str, float] = {}
    if _is_sync_free(plan.deployment):
        facts["without_host_time"] = 1.0
    if _has_unused_model(plan.deployment):
        facts["without_gpu"] = 1.0
    if not workload.knows_prefixes:
        facts["without_prefixes"] = 1.0
    fleet = fleet_use(cluster, planner)
    if missed := sum(event.time_s > fleet.length_s for event in plan.deployment.fleet.timeline):
        facts["missed_events"] = missed
    if cluster.longest is not None:
        is_cut = requests.succeeded & (requests.osl < requests.planned_osl.filled(0))
        facts |= {"refused": cluster.num_refused, "cut": int(is_cut.sum()), "context": cluster.longest}
    if any(overhead) and requests.succeeded.any():
        delays_s = cluster.delays_s + (cluster.handover.delays_s if cluster.handover is not None else 0.0)
        outside = delays_s / np.count_nonzero(~np.isnan(cluster.log.intended_s)) + overhead.answer_s
        facts["overhead_share"] = outside / float((requests.first_token_s - requests.sent_s).mean())
    return Record(
        plan.arm.name,
        requests,
        gaps,
        wall_s,
        len(cluster.ranks),
        repeat=plan.repeat,
        is_complete=is_complete,
        notes=requests.failure,
        facts=facts,
        pools=pool_use(cluster),
        links=link_use(cluster),
        tiers=tier_use(cluster, requests),
        kv=kv_use(cluster),
        fleet=fleet,
        gap_starts_s=gap_starts_s,
    )


def _is_sync_free(deployment: Deployment) -> bool:
    """Return whether synchronous scheduling was requested with step times that do not know its cost."""
    return any(
        pool.mocker.async_scheduling is False and pool.timing.timing_name in HOSTLESS for pool in deployment.pools
    )


def _has_unused_model(deployment: Deployment) -> bool:
    """Return whether a model was named that affects neither step times nor KV blocks."""
    timings = [pool.timing for pool in deployment.pools]
    return any(
        timing.model is not None and timing.gpu is None and timing.timing_name in MODELLESS for timing in timings
    )


def cluster_of(plan: Plan, workload: Workload) -> Cluster:
    """Build the cluster of one run; the same settings and seed give the same run.

    Raises:
        WorkloadError: a request can never fit.
        ValueError: the deployment cannot be simulated.
    """
    deployment = plan.deployment
    pools, engines = pools_of(deployment), engines_of(deployment)
    for pool in pools:
        check_fits(workload, pool.engine, fail_on_too_long=plan.settings.load.fail_on_too_long)
    if deployment.is_disaggregated:
        _check_apart(deployment, engines)
    router = _router(plan, engines, "decode" if deployment.is_disaggregated else "aggregated")
    return Cluster(
        workload,
        pools,
        router,
        load=plan.settings.load,
        overhead=mean_overhead(deployment),
        kv_event_delay_s=deployment.router.kv_event_delay_s,
        choose=best_by_rollout if router.policy.needs_rollout else None,
        apart=_disaggregation(plan, engines) if deployment.is_disaggregated else None,
        links=Links(deployment.transfer),
        fleet=deployment.fleet,
        moved_kv=_moved_kv(deployment),
        gpus=deployment.gpus,
        migration_limit=max(pool.worker.migration_limit for pool in deployment.pools),
        rng=random.Random(f"fleet {plan.seed}"),
    )


def _moved_kv(deployment: Deployment) -> KvSize | None:
    """Return the size of the KV that requests take along from leaving workers, None if they take none."""
    if deployment.fleet.drain_policy != "hand-over":
        return None
    pool = next(pool for pool in deployment.pools if pool.role != "prefill")
    return kv_size_of(
        pool.timing, block_size=pool.mocker.block_size, kv_bytes_per_token=deployment.transfer.kv_bytes_per_token
    )


def _check_apart(deployment: Deployment, engines: Sequence[SimulatedEngine]) -> None:
    """Refuse settings that cannot be simulated with workers that only prefill or only decode."""
    for role in ("prefill", "decode"):
        if Mode.parse(mode := deployment.mode_of(role)).base == "oracle-rollout":
            raise ValueError(
                f"router_mode is {mode!r} for {role} workers; expected another mode: a rollout works only with "
                "aggregated workers"
            )
    for engine in set(engines):
        is_instant = engine.timing.mixed(chunk(1), 0, 0) < SHORTEST_STEP_S
        if is_instant and not engine.config.scheduler_reserve_full_isl:
            raise ValueError(
                "scheduler_reserve_full_isl is false, but prefills take no time; expected true or other step times: "
                "a prompt "
                "that waits for blocks held by a transfer would be preempted forever at the same instant"
            )


def _router(plan: Plan, engines: Sequence[SimulatedEngine], role: Role) -> Router:
    """Return the router over the workers of a role; each role has its own seed."""
    deployment = plan.deployment
    pairs = [pair for pair in zip(engines, deployment.worker_pools, strict=True) if pair[1].role == role]
    of_role = [engine for engine, _ in pairs]
    ports = [deployment.transfer.gpu_bandwidth * pool.timing.tensor_parallel_size for _, pool in pairs]
    return Router(
        deployment.mode_of(role),
        with_load_costs(with_step_costs(deployment.router, of_role), of_role, ports),
        block_size=of_role[0].config.block_size,
        rng=random.Random(f"{'prefill ' if role == 'prefill' else ''}router {plan.seed}"),
        closed_events=True,
        stage=role,
        follows_events=deployment.disaggregation.conditional_disagg != "never",
    )


def _disaggregation(plan: Plan, engines: Sequence[SimulatedEngine]) -> Disaggregation:
    """Return how requests get from workers that only prefill to workers that decode."""
    deployment = plan.deployment
    reader = next(pool for pool in deployment.pools if pool.role == "decode")
    return Disaggregation(
        deployment.disaggregation,
        deployment.transfer,
        _router(plan, engines, "prefill"),
        kv_size=kv_size_of(
            reader.timing,
            block_size=reader.mocker.block_size,
            kv_bytes_per_token=deployment.transfer.kv_bytes_per_token,
        ),
    )


def with_step_costs(router: RouterConfig, engines: Sequence[SimulatedEngine]) -> RouterConfig:
    """Set the step costs for the predicting modes that the user has not set: the mean over the workers."""
    rows = {engine: step_costs_of(engine) for engine in set(engines)}
    means = [_mean(column) for column in zip(*(rows[engine] for engine in engines), strict=True)]
    base, prefill, sequence, context, budget = means
    return router.with_costs(StepCosts(base, prefill, sequence, context, round(budget)))


def with_load_costs(router: RouterConfig, engines: Sequence[SimulatedEngine], ports: Sequence[float]) -> RouterConfig:
    """Set the KV load times that the user has not set: the mean over the workers that have them.

    Args:
        router: the user's settings.
        engines: the workers' engines.
        ports: the receive bandwidth of each rank (bytes/s).
    """
    rows: dict[str, list[float]] = {}
    for engine, port in zip(engines, ports, strict=True):
        if engine.host is not None:
            for name, load_us in _load_costs(engine.host, engine.config.block_size, port).items():
                rows.setdefault(name, []).append(load_us)
    return replace(router, **{name: _mean(row) for name, row in rows.items() if getattr(router, name) is None})  # type: ignore[arg-type]


def _load_costs(host: HostMemory, block_size: int, port: float) -> dict[str, float]:
    """Return the load time of a token's KV from each tier of a worker (us); lower tiers load through host memory."""
    token_us = host.chunk_bytes / (host.blocks_per_chunk * block_size) * 1e6
    found = {"host_load_us_per_token": token_us / host.bandwidth}
    for tier in host.tiers:
        name, bandwidth = ("shared", min(tier.bandwidth, port)) if tier.name == "store" else ("disk", tier.bandwidth)
        found[f"{name}_load_us_per_token"] = token_us / bandwidth + found["host_load_us_per_token"]
    return found


def mean_overhead(deployment: Deployment) -> Overhead:
    """Return the delays between a client and the engines: the mean over the workers if pools differ."""
    each = [overhead_of(deployment.overhead, pool.timing) for pool in deployment.pools for _ in range(pool.replicas)]
    return Overhead(*(_mean(values) for values in zip(*each, strict=True)))


def _mean(values: Sequence[float]) -> float:
    """Return the mean, exactly if all values are equal."""
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def _look(
    cluster: Cluster, on_progress: Callable[[int], None] | None, is_interrupted: Callable[[], bool] | None
) -> Callable[[], None]:
    def look() -> None:
        if on_progress is not None:
            on_progress(cluster.num_finished)
        if is_interrupted is not None and is_interrupted():
            raise _Stopped

    return look


def _requests(cluster: Cluster, workload: Workload, load: LoadConfig) -> Requests:
    """Return the records of the requests that have ended."""
    log, intended_s = cluster.log, np.array(cluster.log.intended_s)
    num_arrived = int(np.flatnonzero(~np.isnan(intended_s)).max(initial=-1)) + 1  # after an interrupt, perhaps not all
    workload = replace(workload, requests=workload.requests[:num_arrived])
    rows = slice(num_arrived)
    isl = np.array([request.input_length for request in workload.requests], np.int32)
    planned = np.array([request.output_length for request in workload.requests], np.int32)
    ranks = np.array([engine.config.max_model_len or np.iinfo(np.int32).max for engine in cluster.engines])
    requests = log.finish(
        rows,
        sent_s=intended_s[rows],
        first_byte_s=np.array(log.first_token_s[rows]),
        done_s=np.array(log.last_token_s[rows]),
        isl=isl,
        osl=planned,
        planned_isl=isl,
        planned_osl=planned,
        priority=[request.priority for request in workload.requests],
        first_chunk_tokens=np.ones(num_arrived, np.int32),
        endless_tokens=_endless_tokens(cluster, workload),
        is_measured=[load.is_measured(time) for time in intended_s[rows].tolist()],
    )
    if not workload.knows_prefixes:  # hits of made-up ids are meaningless
        requests = requests.replace(**dict.fromkeys(FOLLOW_PREFIXES))
    if cluster.num_finished < len(log):
        requests = requests[~requests.worker.mask | ~requests.succeeded]
    room = ranks[requests.worker.filled(0)] - requests.isl
    return requests.replace(osl=np.where(requests.succeeded, np.minimum(requests.osl, room), 0))


def _endless_tokens(cluster: Cluster, workload: Workload) -> npt.NDArray[np.int64]:
    """Return the prompt tokens that an unlimited cache would have held; nobody computes what is refused."""
    if not cluster.num_refused:
        return reuse_of(workload, cluster.block_size).endless_hits()
    numbers = [number for number in range(len(workload)) if cluster.refusal(number) is None]
    served = replace(workload, requests=select(workload.requests, numbers))
    found = np.zeros(len(workload), np.int64)
    found[numbers] = reuse_of(served, cluster.block_size).endless_hits()
    return found


def _gaps(cluster: Cluster) -> tuple[Floats, Floats]:
    """Return the gaps between tokens after the warm-up, with each engine's noise, and when each row began (s)."""
    rows, starts_s = [], []
    for rank, first, engine in zip(cluster.ranks, cluster.first_gap_rows, cluster.engines, strict=True):
        log = rank.engine.log
        rows.append(spread(np.array(log.rows).reshape(-1, 5)[first:], engine.noise))
        starts_s.append(np.repeat(np.array(log.starts_s)[first:], max(len(engine.noise), 1)))
    return np.concatenate(rows), np.concatenate(starts_s)
