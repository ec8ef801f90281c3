"""Figures of a fleet: GPU-hours, changes, time out of limits, and what the fewest workers would have used.

requests by window  -> which windows were out of limits -> breaks, each from its first such window to its recovery
history of a pool   -> workers on GPUs, and ready, over time -+-> GPU-hours, workers
oracle              -> workers needed, window by window ------+-> more than needed, fewer than needed
"""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from reports.figures import slo
from reports.figures.conditions import Condition
from reports.record.fleet import FleetUse, Headcount, Oracle, PoolFleet
from reports.record.pools import mean
from reports.record.records import Flags, Floats, Record

ENOUGH = 0.95
"""Share of the requests that must be within the limits for a window, or an arm, to meet them."""
WINDOWS = 60
"""The most windows of a run."""
WIDTHS = (10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 14400.0)
"""Widths of windows (s)."""
HOUR = 3600.0
FORMULAS = {
    "gpu_h": "GPUs x the time from the start of each worker to its end, including starting, draining and the warm-up",
    "busy_gpu_h": "the part of the GPU-hours in which workers took steps",
    "good_per_gpu_h": "requests within every limit / GPU-hours, both including the warm-up",
    "workers": "workers that occupy GPUs (starting, ready or draining): mean over the run / most at one time",
    "changes": "how often the planner changed a pool; up, down: by how many workers in total",
    "out_of_limits": f"windows in which fewer than {ENOUGH:.0%} of the requests that were due were within the limits (a window "
    "without requests meets them); a break is a sequence of such windows, and the longest break is the longest time until recovery",
    "oracle": f"the fewest workers, all ready and none slow, with which {ENOUGH:.0%} of the requests that can be within "
    "the limits (possible) are within them, window by window; only a simulation can find this; over: integral of max(0, workers on GPUs - needed) x GPUs; under: integral of max(0, "
    "needed - ready workers) x GPUs",
}
LABELS = {
    "gpu_h": "GPU-hours",
    "busy_gpu_h": "busy GPU-hours",
    "good_per_gpu_h": "good per GPU-hour",
    "workers": "workers",
    "changes": "changes",
    "out_of_limits": "out of limits",
    "oracle": "needed, over, under",
}


class OutOfLimits(msgspec.Struct, frozen=True):
    """The time in which too few requests were within the limits."""

    window_s: float
    """The width of a window."""
    total_s: float
    breaks: float
    longest_s: float
    """The longest time from a break to its recovery."""


class AgainstOracle(msgspec.Struct, frozen=True):
    """How a fleet compares with the fewest workers that meet the limits, if they are known."""

    possible: float
    """The share of the requests that can be within the limits with any number of workers."""
    needed_gpu_h: float
    over_gpu_s: float
    under_gpu_s: float
    steady_gpu_h: float
    """The GPU-hours of running as many workers as the busiest window needs, all the time."""


class FleetFigures(msgspec.Struct, frozen=True):
    """Figures of an arm's fleet: means over its repeats."""

    planner: str
    gpu_h: float
    busy_gpu_h: float | None
    good_per_gpu_h: float | None
    """None without limits, like `out_of_limits`."""
    mean_workers: float
    least_workers: float
    most_workers: float
    changes: float
    added: float
    """Workers added by all changes of the planner."""
    removed: float
    failed_starts: float
    died: float
    lost: float
    """How often a request lost its worker."""
    peak_gpu_h: float
    """The GPU-hours of running the most GPUs that it had at one time for the whole run."""
    out_of_limits: OutOfLimits | None
    against_oracle: AgainstOracle | None

    @property
    def is_still(self) -> bool:
        """Whether the number of workers never changed, and no planner could have changed it."""
        happened = self.changes or self.died or self.failed_starts or self.lost
        return self.planner == "static" and not happened and self.least_workers == self.most_workers

    @property
    def is_shown(self) -> bool:
        """Whether anything happened to it that a report should show."""
        return not self.is_still or self.against_oracle is not None


def figures(repeats: Sequence[Record], limits: list[Condition], edges: Floats) -> FleetFigures | None:
    """Return the mean figures of an arm's runs; None if the workers of one are not known."""
    each = [_figures(run, fleet, limits, edges) for run in repeats if (fleet := fleet_of(run))]
    return mean(each) if len(each) == len(repeats) else None


def windows(runs: Sequence[Record]) -> Floats:
    """Return the edges of the windows into which the arrivals of runs are divided; the last may be shorter."""
    span = max((float(run.measured.requests.intended_s.max(initial=0.0)) for run in runs), default=0.0)
    width = next((width for width in WIDTHS if width * WINDOWS >= span), float(np.ceil(span / WINDOWS / HOUR)) * HOUR)
    count = max(int(np.ceil(span / width)), 1)
    return np.append(np.arange(count) * width, max(span, width))


def fleet_of(run: Record) -> FleetUse | None:
    """Return the fleet of a run; if only its pools are known, as in older folders, they never changed."""
    if run.fleet is not None or not run.pools:
        return run.fleet
    length_s = float(run.requests.done_s.max()) if run.requests.done_s.count() else 0.0
    pools = tuple(
        PoolFleet(
            pool.name,
            pool.role,
            pool.gpus // max(pool.workers, 1),
            (Headcount(0.0, pending=0, starting=0, ready=pool.workers, draining=0),),
            gpu_s=pool.gpus * length_s,
        )
        for pool in run.pools
    )
    return FleetUse(pools, length_s)


def good(run: Record, limits: list[Condition]) -> Flags:
    """Return which requests were within the per-request limits or, without those, within all limits."""
    return slo.good_requests(run, [limit for limit in limits if limit.statistic is None] or limits)


def attained(run: Record, is_good: Flags, edges: Floats) -> Floats:
    """Return the share of good requests among those due in each window, NaN where there are none."""
    came, kept = (
        np.histogram(times, edges)[0] for times in (run.requests.intended_s, run.requests.intended_s[is_good])
    )
    return np.where(came, kept / np.maximum(came, 1), np.nan)


def out_of_limits(shares: Floats, edges: Floats) -> OutOfLimits:
    """Return the time in which the share of good requests was too low."""
    is_out = np.concatenate([[False], np.nan_to_num(shares, nan=1.0) < ENOUGH, [False]])
    begins, ends = np.flatnonzero(~is_out[:-1] & is_out[1:]), np.flatnonzero(is_out[:-1] & ~is_out[1:])
    lengths = edges[ends] - edges[begins]
    return OutOfLimits(float(edges[1] - edges[0]), float(lengths.sum()), len(lengths), float(lengths.max(initial=0.0)))


def against_oracle(fleet: FleetUse, oracle: Oracle, intended_s: Floats) -> AgainstOracle:
    """Compare a fleet with the fewest workers, over the time for which both are known."""
    needed = over = under = steady = 0.0
    for pool in fleet.pools:
        replicas = np.array(oracle.replicas.get(pool.pool, ()), float)
        begins = np.arange(len(replicas), dtype=float) * oracle.window_s
        end = min(len(replicas) * oracle.window_s, fleet.length_s)
        times = np.unique(np.concatenate([begins, [row.time_s for row in pool.history]]))
        times = times[times < end]
        lasts = np.diff(np.append(times, end)) * pool.gpus_per_worker
        need = held(times, begins, replicas)
        steady += float(replicas.max(initial=0.0)) * pool.gpus_per_worker * fleet.length_s
        needed += float((need * lasts).sum())
        over += float((np.maximum(0, over_time(pool, times, lambda row: row.on_gpus) - need) * lasts).sum())
        under += float((np.maximum(0, need - over_time(pool, times, lambda row: row.ready)) * lasts).sum())
    came = np.diff(np.searchsorted(np.sort(intended_s), np.arange(len(oracle.possible) + 1) * oracle.window_s))
    possible = float((came * oracle.possible).sum() / came.sum()) if came.any() else 1.0
    return AgainstOracle(possible, needed / HOUR, over, under, steady / HOUR)


def over_time(pool: PoolFleet, times: Floats, of: Callable[[Headcount], int]) -> Floats:
    """Return how many workers of a pool `of` counts at the given times."""
    return held(
        times, np.array([row.time_s for row in pool.history]), np.array([float(of(row)) for row in pool.history])
    )


def held(times: Floats, begins: Floats, values: Floats) -> Floats:
    """Return the values in effect at the given times: the one that began last, or 0 before the first."""
    return np.append(values, 0.0)[np.searchsorted(begins, times, side="right") - 1]


def _figures(run: Record, fleet: FleetUse, limits: list[Condition], edges: Floats) -> FleetFigures:
    gpu_h = fleet.gpu_s / HOUR
    busy = [pool.gpu_s / HOUR for pool in run.pools if isinstance(pool.gpu_s, float)]
    times: Floats = np.unique(
        [row.time_s for pool in fleet.pools for row in pool.history if row.time_s < fleet.length_s]
    )
    by_pool = [(over_time(pool, times, lambda row: row.on_gpus), pool.gpus_per_worker) for pool in fleet.pools]
    workers = sum((count for count, _ in by_pool), np.zeros(len(times)))
    gpus = sum((count * each for count, each in by_pool), np.zeros(len(times)))
    lasts = np.diff(np.append(times, fleet.length_s))
    steps = [change.after - change.before for change in fleet.changes]
    measured = run.measured
    return FleetFigures(
        planner=fleet.planner,
        gpu_h=gpu_h,
        busy_gpu_h=sum(busy) if busy else None,
        good_per_gpu_h=float(slo.good_requests(run, limits).sum()) / gpu_h if limits and gpu_h else None,
        mean_workers=float((workers * lasts).sum() / lasts.sum()) if lasts.sum() else 0.0,
        least_workers=float(workers.min(initial=np.inf)) if len(times) else 0.0,
        most_workers=float(workers.max(initial=0.0)),
        changes=len(steps),
        added=sum(step for step in steps if step > 0),
        removed=-sum(step for step in steps if step < 0),
        failed_starts=sum(pool.failed_starts for pool in fleet.pools),
        died=sum(pool.died for pool in fleet.pools),
        lost=fleet.lost,
        peak_gpu_h=float(gpus.max(initial=0.0)) * fleet.length_s / HOUR,
        out_of_limits=out_of_limits(attained(measured, good(measured, limits), edges), edges) if limits else None,
        against_oracle=against_oracle(fleet, fleet.oracle, measured.requests.intended_s) if fleet.oracle else None,
    )


def hours(value: float) -> str:
    """Format GPU-hours."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3}f}"
