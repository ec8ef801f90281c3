"""A planner's view of real workers: their load reports, and the frontend's metrics."""

import re
from collections.abc import Iterable, Mapping

from dynabench.planner.messages import ReportedWorker
from serving.planner import Counts, PoolState, RankLoad
from serving.worker.load_reports import HEARTBEAT_S, LoadReport

STALE_S = 3 * HEARTBEAT_S
"""Older reports count as missing."""

_ROW = re.compile(r"^dynamo_frontend_(\w+)\{[^\n]*\} (\S+)$", re.MULTILINE)

METRICS = (
    "input_sequence_tokens_count",
    "input_sequence_tokens_sum",
    "output_sequence_tokens_count",
    "output_sequence_tokens_sum",
    "ended_input_tokens_total",
    "cached_tokens_total",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum",
    "request_duration_seconds_count",
    "request_duration_seconds_sum",
)
"""The frontend's metrics (`dynamo_frontend_...`) for the fields of `Counts`, in the same order."""


def counts_of(metrics: str) -> Counts:
    """Read the frontend's counts, summed over models, from the text of /metrics.

    Raises:
        ValueError: a value is not a number.
    """
    found = dict.fromkeys(METRICS, 0.0)
    for name, value in _ROW.findall(metrics):
        if name in found:
            found[name] += float(value)
    return Counts(*found.values())


class Reports:
    """The last load report of each rank."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, LoadReport]] = {}

    def add(self, now: float, report: LoadReport) -> None:
        """Add a report."""
        self._last[f"{report.instance_id:x}", report.rank] = (now, report)

    def keep(self, now: float) -> None:
        """Forget reports that are too old."""
        self._last = {rank: seen for rank, seen in self._last.items() if now - seen[0] <= STALE_S}

    def state(self, workers: Iterable[ReportedWorker], *, num_ranks: int, block_size: int) -> PoolState:
        """Return the workers of a pool with the loads of those that are ready, as far as the loads are known."""
        workers = list(workers)
        states = [worker.state for worker in workers]
        ready = [worker.instance for worker in workers if worker.state == "ready"]
        reports = [self._last.get((instance, rank)) for instance in ready for rank in range(num_ranks)]
        loads = [_load(seen[1], block_size) for seen in reports if seen is not None]
        return PoolState(
            num_ready=len(ready),
            num_starting=states.count("starting"),
            num_draining=states.count("draining"),
            loads=tuple(load for load in loads if load is not None),
        )

    def idle_first(self, workers: Iterable[ReportedWorker]) -> tuple[str, ...]:
        """Return the ready workers, those with the fewest requests first."""
        requests: dict[str, int] = {}
        for (instance, _), (_, report) in self._last.items():
            requests[instance] = requests.get(instance, 0) + report.num_running + report.num_waiting
        ready = [worker.instance for worker in workers if worker.state == "ready" and worker.instance in requests]
        return tuple(sorted(ready, key=requests.__getitem__))


def mean_startup_s(workers: Iterable[ReportedWorker], *, default_s: float) -> float:
    """Return how long starts took on average, or the default while none is known."""
    known = [worker.startup_s for worker in workers if worker.startup_s is not None]
    return sum(known) / len(known) if known else default_s


def is_up(pools: Mapping[str, Iterable[ReportedWorker]]) -> bool:
    """Return whether every pool has a ready worker."""
    return all(any(worker.state == "ready" for worker in workers) for workers in pools.values())


def _load(report: LoadReport, block_size: int) -> RankLoad | None:
    if report.work is None:
        return None
    return RankLoad(
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        kv_tokens=report.kv_active_blocks * block_size,
        **report.work._asdict(),
    )
