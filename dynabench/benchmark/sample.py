"""What a load's requests are enough for: a steady state, a point at all, intervals, the limits."""

import math
from collections.abc import Sequence

import numpy as np

from dynabench.experiment.settings import ATTAINMENT
from dynabench.live.enough import LIFETIMES
from reports.figures.conditions import Condition
from reports.figures.limit_intervals import attainment_interval, limit_interval
from reports.figures.metrics import LEAST_SAMPLES, per_request
from reports.figures.outcomes import SHARES, Exceeding, Outcome
from reports.figures.slo import good_requests
from reports.figures.statistics import blocks_of
from reports.record.records import Record
from reports.sweep.points import Point

STEADY = 1
"""Requests that are sent for less than so many times as long as one takes show how a load begins, not how it is. They count for
at least `LIFETIMES`; the last of a stream is sent up to one such time before the end, and some take longer."""


def unsteady(run: Record) -> str:
    """Say that requests counted for too short to see a steady state; nothing if they did not."""
    requests = run.measured.requests
    if not len(requests):
        return f"all {len(run.requests):,} requests were sent before they count: use a longer workload"
    p90 = lifetimes_s(run) / LIFETIMES
    span = float(np.ptp(requests.intended_s))
    if not 0 < span < STEADY * p90:
        return ""
    return (
        f"requests counted for {span:.3g} s, and one takes {p90:.3g} s (p90): use --duration-s {math.ceil(LIFETIMES * p90)}, or a "
        "longer workload"
    )


def is_enough(run: Record) -> bool:
    """Return whether a run that was cut short has enough answers for a point, or shows why it can have none."""
    if run.notes and len(run.requests):
        return True
    requests = run.measured.requests
    return int(requests.succeeded.sum()) > 1 and float(np.ptp(requests.intended_s)) >= lifetimes_s(run)


def with_intervals(outcomes: Sequence[Outcome], limits: Sequence[Condition], run: Record) -> list[Outcome]:
    """Return outcomes with the intervals of their values, where the run has enough requests for them."""
    blocks = blocks_of(run.requests.intended_s, per_request(run.requests)["e2e_sched"])
    by_text = {str(limit): limit for limit in limits if limit.statistic is not None}
    each = [limit for limit in limits if limit.statistic is None]

    def of(outcome: Outcome) -> Outcome:
        if outcome.value is None:
            return outcome
        if outcome.is_share:
            share = attainment_interval(good_requests(run, each), blocks)
            return outcome if share is None else outcome.within(share, ATTAINMENT)
        limit = by_text[outcome.limit]
        interval = limit_interval(limit, run, blocks)
        return outcome if isinstance(interval, str) else outcome.within(interval, limit.value)

    return list(map(of, outcomes))


def samples_lacking(point: Point, limits: Sequence[Condition], runs: Sequence[Record]) -> float:
    """Return how many times as many samples as in these runs the limits need that are not known; 0 if more decide nothing."""
    if not point.outcomes or point.state != "unknown":
        return 0.0
    unknown = {outcome.limit for outcome in point.outcomes if outcome.state == "unknown"}
    return max(
        LEAST_SAMPLES[round(100 * SHARES[limit.statistic])] / max(Exceeding.of(limit, runs).total, 1)
        for limit in limits
        if str(limit) in unknown
    )


def lifetimes_s(run: Record) -> float:
    """Return several times as long as a request takes, 0 if none was answered."""
    requests = run.measured.requests
    took = np.asarray((requests.done_s - requests.intended_s)[requests.succeeded])
    return LIFETIMES * float(np.percentile(took, 90)) if len(took) else 0.0
