"""When a run has missed a limit for certain: more values exceed it than may in the whole run, whatever is still to come.

A percentile of n values is within a limit only if all but a few of them are, so one more is enough. A mean is missed once
the values so far add up to more than n times the limit. This bound is exact: no run is cut that would have met its limits.

A run that is not decided by half of its requests is near its limits. It is not cut, because its figures say how near.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from dynabench.virtual.cluster import Cluster
from mocker.timing.choose import SimulatedEngine
from reports.figures.conditions import METRICS, Condition
from reports.figures.metrics import TokenGaps, spread
from reports.figures.outcomes import Outcome, num_required
from reports.record.records import Floats
from workloads import Workload

CHECKS = 100
"""How often a run is checked, at equal numbers of requests that have ended."""

LATEST = 0.5
"""The share of the requests after which a run goes on to its end."""


class DecidedError(Exception):
    """A run has missed limits for certain."""

    def __init__(self, missed: list[Outcome], cluster: Cluster) -> None:
        super().__init__(missed)
        self.missed, self.cluster = missed, cluster


class Cutoff:
    """Ends a run that has missed a limit; call it with the cluster, now and then."""

    def __init__(self, limits: Sequence[Condition], workload: Workload, attainment: float, *, repeats: int) -> None:
        """Prepare for a workload that is simulated `repeats` times, whose values are pooled."""
        lengths = np.array([request.output_length for request in workload])
        self._limits, self._attainment, self._num_requests = limits, attainment, len(workload)
        self._gaps = np.maximum(lengths - 1, 0)
        self._num_gaps, self._num_values = repeats * int(self._gaps.sum()), repeats * len(workload)
        self._of_gaps = [limit for limit in limits if limit.metric == "itl"]
        self._begin(None)

    def _begin(self, cluster: Cluster | None) -> None:
        self._cluster, self._due = cluster, 1
        self._rows_seen: dict[int, tuple[array[float], int]] = {}
        self._gaps_so_far = {str(limit): (0.0, 0.0) for limit in self._of_gaps}

    def __call__(self, cluster: Cluster) -> None:
        """Check whether the run is decided.

        Raises:
            DecidedError: it has missed a limit.
        """
        if cluster is not self._cluster:
            self._begin(cluster)
        if not self._due <= cluster.num_ended <= LATEST * self._num_requests:
            return
        self._due = cluster.num_ended + max(self._num_requests // CHECKS, 1)
        if missed := self._missed(cluster):
            raise DecidedError(missed, cluster)

    def _missed(self, cluster: Cluster) -> list[Outcome]:
        self._count_gaps(cluster)
        values = self._values(cluster) if len(self._of_gaps) < len(self._limits) else {}
        found = []
        for limit in self._limits:
            if limit.metric == "itl":
                beyond, total = self._gaps_so_far[str(limit)]
                reason = self._reason(limit, beyond, total, self._num_gaps, "gaps")
            else:
                of = values[METRICS[limit.metric]]
                beyond, total = int((of > limit.value).sum()), float(np.nansum(of))
                reason = self._reason(limit, beyond, total, self._num_values, "requests")
            if reason:
                when = f"after {cluster.num_ended:,} of {self._num_requests:,} requests"
                found.append(Outcome(str(limit), "missed", reason=f"{when}, {reason}, so the run was cut"))
        return found

    def _reason(self, limit: Condition, beyond: float, total: float, count: int, unit: str) -> str:
        """Say why a limit is missed, if it is."""
        if limit.statistic == "mean":
            return "its sum is too high" if total > limit.value * count else ""
        most = count - num_required(limit, count, self._attainment)
        is_missed = beyond > most + 0.5  # with an engine's noise, gaps are counted in fractions
        return f"{beyond:,.0f} {unit} exceed it and at most {most:,} may" if is_missed else ""

    def _values(self, cluster: Cluster) -> dict[str, Floats]:
        """Return the latencies of the requests that were answered so far; NaN for all others."""
        log = cluster.log
        names = ("intended_s", "first_token_s", "second_token_s", "last_token_s")
        intended, first, second, last = (np.array(getattr(log, name)) for name in names)
        is_over = ~np.isnan(last)
        decoded = np.where(self._gaps > 0, self._gaps, np.nan)
        ttft, e2e = first - intended, last - intended
        found = {"ttft_sched": ttft, "ttft": ttft, "ttst": second - intended, "tpot": (last - first) / decoded}
        found |= {"e2e_sched": e2e, "e2e": e2e}
        return {name: np.where(is_over, value, np.nan) for name, value in found.items()}

    def _count_gaps(self, cluster: Cluster) -> None:
        """Count the gaps between tokens that were logged since the last check."""
        for rank, engine in zip(cluster.ranks, cluster.engines, strict=True) if self._of_gaps else ():
            rows = rank.engine.log.rows
            of, seen = self._rows_seen.get(rank.number, (rows, 0))
            seen = seen if of is rows else 0  # rows that went into bins meanwhile do not count here
            end = len(rows) - 5  # the last row may still grow
            if end > seen:
                self._rows_seen[rank.number] = rows, end
                self._add_gaps(np.array(rows[seen:end]).reshape(-1, 5), engine)

    def _add_gaps(self, rows: Floats, engine: SimulatedEngine) -> None:
        gaps = TokenGaps(spread(rows, engine.noise))
        total = gaps.mean() * gaps.count
        for limit in self._of_gaps:
            beyond, so_far = self._gaps_so_far[str(limit)]
            beyond += gaps.count - float(gaps.counts_below(np.array([limit.value]))[0])
            self._gaps_so_far[str(limit)] = beyond, so_far + total
