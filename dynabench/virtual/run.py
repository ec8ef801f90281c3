"""One run in virtual time."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from dynabench.arm import Run
from dynabench.deployment.description import Deployment
from dynabench.deployment.engines import ANY_LENGTH, check_fits, engines_of, pools_of
from dynabench.installed.process import schedulers_of
from dynabench.interrupt import noted
from dynabench.virtual.cluster import Cluster
from dynabench.virtual.planner import SimulatedPlanner
from dynabench.virtual.rollout import best_by_rollout
from dynabench.virtual.use import adapter_use, draft_use, encoder_use, fleet_use, kv_use, link_use, pool_use, tier_use
from dynabench.virtual.whole_prompts import num_held
from mocker.installed.scheduler import NewScheduler
from mocker.step_log import StepLog
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import chunk
from reports.figures.gap_bins import GAP_ERROR
from reports.record.records import Floats, Record, Requests
from serving.router import Mode
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.reuse import reuse_of
from workloads.workload import select

HOSTLESS = ("polynomial", "constant", "table")
"""Step times that do not separate the host's work from the GPU's."""

MODELLESS = ("polynomial", "constant")
"""Step times that are the same for every model."""

FOLLOW_PREFIXES = (
    "cached_tokens", "host_tokens", "disk_tokens", "store_tokens", "endless_tokens", "predicted_tokens", "best_tokens",
)  # fmt: skip
"""Columns that are meaningless if shared prefixes are unknown."""

MANY = 100_000
"""Requests whose simulation takes so long that collecting what it leaves in memory does not matter."""

COLLECT_AFTER = 1_000_000
"""Objects made and not released after which Python looks for cycles: a simulation leaves none behind before it ends."""

SHORTEST_STEP_S = 1e-9
"""Shorter steps can vanish in the sum with the time, so that the clock stands still."""


class _Stopped(Exception):  # noqa: N818 (no error)
    """The simulation is to end between two events."""


def simulate(
    run: Run,
    workload: Workload,
    *,
    on_progress: Callable[[int], None] | None = None,
    is_interrupted: Callable[[], bool] | None = None,
    watch: Callable[[Cluster], object] | None = None,
    logs: list[StepLog] | None = None,
    installed: NewScheduler | None = None,
) -> Record:
    """Carry out one run in virtual time.

    Args:
        run: what to simulate.
        workload: its requests.
        on_progress: takes the number of requests that have ended, now and then.
        is_interrupted: when it returns true between two events, the run stops and keeps what is done.
        watch: takes the cluster now and then between two events; whatever it raises ends the run.
        logs: takes a log of the steps of each engine, in the order in which they start.
        installed: makes the schedulers that decide (None: as the deployment says).

    Raises:
        WorkloadError: a request can never fit.
        ValueError: the deployment cannot be simulated.
        StalledError: the simulation ended with unfinished requests (a defect).
    """
    record = _simulated(run, workload, on_progress, is_interrupted, watch, logs, installed)
    if len(workload) >= MANY:
        gc.collect()  # the parts of the cluster know each other, so they would stay in memory beside the statistics
        workload.columns.let_go()
    return record


def _simulated(
    run: Run,
    workload: Workload,
    on_progress: Callable[[int], None] | None,
    is_interrupted: Callable[[], bool] | None,
    watch: Callable[[Cluster], object] | None,
    logs: list[StepLog] | None,
    installed: NewScheduler | None,
) -> Record:
    with schedulers_of(run.deployment.core) if installed is None else nullcontext(installed) as installed:
        cluster = cluster_of(run, workload, installed=installed, logs=logs)
        return _run_out(run, workload, cluster, on_progress, is_interrupted, watch)


def _run_out(
    run: Run,
    workload: Workload,
    cluster: Cluster,
    on_progress: Callable[[int], None] | None,
    is_interrupted: Callable[[], bool] | None,
    watch: Callable[[Cluster], object] | None,
) -> Record:
    cluster.clock.on_look = _look(cluster, on_progress, is_interrupted, watch)
    config = run.deployment.planner
    planner = SimulatedPlanner(config, cluster) if config.planner != "static" else None
    with noted() if is_interrupted is not None else nullcontext():
        return _carried_out(run, workload, cluster, planner)


def _carried_out(run: Run, workload: Workload, cluster: Cluster, planner: SimulatedPlanner | None) -> Record:
    """Run a cluster until its requests have ended, or it is stopped, and return what is done."""
    started, is_complete = time.perf_counter(), True
    try:
        with _collecting_rarely():
            cluster.run()
    except _Stopped:
        is_complete = False
    wall_s = time.perf_counter() - started
    requests = _requests(cluster, workload, run.settings.load)
    gaps, gap_starts_s = cluster.gaps.rows()
    overhead = cluster.overhead
    facts: dict[str, float] = run.settings.load.facts
    if cluster.gaps.is_binned:
        facts["gap_error"] = GAP_ERROR
    if _is_sync_free(run.deployment):
        facts["without_host_time"] = 1.0
    if _has_unused_model(run.deployment):
        facts["without_gpu"] = 1.0
    if not workload.knows_prefixes:
        facts["without_prefixes"] = 1.0
    fleet = fleet_use(cluster, planner)
    if missed := sum(event.time_s > fleet.length_s for event in run.deployment.fleet.timeline):
        facts["missed_events"] = missed
    longest = cluster.prompts.longest
    if longest != ANY_LENGTH:
        is_cut = requests.succeeded & (requests.osl < requests.planned_osl.filled(0))
        facts |= {"refused": cluster.flights.num_refused, "cut": int(is_cut.sum())}
        facts |= {name: value for name, value in longest._asdict().items() if value is not None}
        if longest.prompt is not None:
            facts["uncut"] = int((requests.isl > longest.prompt).sum())
            if not run.deployment.is_disaggregated:
                facts["held"] = num_held(requests, longest.prompt)
    waits_s = requests.first_token_s - requests.sent_s
    if any(overhead) and waits_s.filled(0).sum() > 0:  # not if none was answered, nor if steps take no time
        delays_s = cluster.arrivals.delays_s + cluster.flights.rank_effects.pauses_s
        outside = delays_s / np.count_nonzero(~np.isnan(cluster.log.noted("intended_s"))) + overhead.answer_s
        facts["overhead_share"] = outside / float(waits_s.mean())
    return Record(
        run.arm.name,
        requests,
        gaps,
        wall_s,
        len(cluster.ranks),
        repeat=run.repeat,
        is_complete=is_complete,
        notes=requests.failure,
        facts=facts,
        pools=pool_use(cluster),
        links=link_use(cluster),
        tiers=tier_use(cluster, requests),
        adapters=adapter_use(cluster, requests),
        drafts=draft_use(cluster),
        encoders=encoder_use(cluster, requests),
        kv=kv_use(cluster),
        fleet=fleet,
        gap_starts_s=gap_starts_s,
    )


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Look for cycles less often: it would visit all that a simulation remembers, a tenth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], COLLECT_AFTER) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _is_sync_free(deployment: Deployment) -> bool:
    """Return whether synchronous scheduling was requested with step times that do not know its cost."""
    return any(
        pool.mocker.async_scheduling is False and pool.engine_type == "vllm" and pool.timing.timing_name in HOSTLESS
        for pool in deployment.pools
    )


def _has_unused_model(deployment: Deployment) -> bool:
    """Return whether a model was named that affects neither step times nor KV blocks."""
    timings = [pool.timing for pool in deployment.pools]
    return any(
        timing.model is not None and timing.gpu is None and timing.timing_name in MODELLESS for timing in timings
    )


def cluster_of(
    run: Run, workload: Workload, *, installed: NewScheduler | None = None, logs: list[StepLog] | None = None
) -> Cluster:
    """Build the cluster of one run; the same settings and seed give the same run.

    Args:
        run: what to simulate.
        workload: its requests.
        installed: makes the schedulers that decide in place of ours, if any do.
        logs: takes a log of the steps of each engine.

    Raises:
        WorkloadError: a request can never fit.
        ValueError: the deployment cannot be simulated.
    """
    deployment = run.deployment
    for pool in pools_of(deployment):
        check_fits(workload, pool.engine, fail_on_too_long=run.settings.load.fail_on_too_long)
    if deployment.is_disaggregated:
        _check_apart(deployment, engines_of(deployment))
    cluster = Cluster(run, workload, installed=installed, logs=logs)
    if cluster.routing.router.policy.needs_rollout:
        if installed is not None:
            raise ValueError(
                f"router_mode is {deployment.router_mode!r}, and engine_core is not mocker; expected another mode: a rollout copies "
                "engines, and an installed scheduler cannot be copied"
            )
        cluster.flights.choose = partial(best_by_rollout, cluster)
    return cluster


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


def _look(
    cluster: Cluster,
    on_progress: Callable[[int], None] | None,
    is_interrupted: Callable[[], bool] | None,
    watch: Callable[[Cluster], object] | None,
) -> Callable[[], None]:
    def look() -> None:
        if on_progress is not None:
            on_progress(cluster.num_ended)
        if is_interrupted is not None and is_interrupted():
            raise _Stopped
        if watch is not None:
            watch(cluster)

    return look


def _requests(cluster: Cluster, workload: Workload, load: LoadConfig) -> Requests:
    """Return the records of the requests that have ended."""
    log = cluster.log
    intended_s: Floats = log.noted("intended_s")
    num_arrived = int(np.flatnonzero(~np.isnan(intended_s)).max(initial=-1)) + 1  # after an interrupt, perhaps not all
    workload = replace(workload, requests=workload.requests[:num_arrived])
    rows, columns = slice(num_arrived), workload.columns
    ranks = np.array([engine.config.max_model_len or np.iinfo(np.int32).max for engine in cluster.engines])
    requests = log.finish(
        rows,
        sent_s=(intended_s if load.max_concurrency is None else log.noted("sent_s"))[rows],
        first_byte_s=log.noted("first_token_s")[rows],
        done_s=log.noted("last_token_s")[rows],
        isl=columns.input_length,
        osl=columns.output_length,
        planned_isl=columns.input_length,
        planned_osl=columns.output_length,
        priority=np.array(columns.values("priority"), np.int32),
        adapter=np.array(columns.values("adapter"), object),
        first_chunk_tokens=np.ones(num_arrived, np.int32),
        endless_tokens=_endless_tokens(cluster, workload),
        is_measured=load.are_measured(intended_s[rows]),
    )
    if not workload.knows_prefixes:  # hits of made-up ids are meaningless
        requests = requests.replace(**dict.fromkeys(FOLLOW_PREFIXES))
    if cluster.num_ended < len(log):
        requests = requests[~requests.worker.mask | ~requests.succeeded]
    room = ranks[requests.worker.filled(0)] - requests.isl
    return requests.replace(osl=np.where(requests.succeeded, np.minimum(requests.osl, room), 0))


def _endless_tokens(cluster: Cluster, workload: Workload) -> npt.NDArray[np.int64]:
    """Return the prompt tokens that an unlimited cache would have held; nobody computes what is refused."""
    if not cluster.flights.num_refused:
        return reuse_of(workload, cluster.block_size).endless_hits()
    numbers = [number for number in range(len(workload)) if cluster.prompts.refusal(number) is None]
    served = replace(workload, requests=select(workload.requests, numbers))
    found = np.zeros(len(workload), np.int64)
    found[numbers] = reuse_of(served, cluster.block_size).endless_hits()
    return found
