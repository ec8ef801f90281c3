"""The 95% interval of a figure that is limited, from a sample of requests."""

import numpy as np

from reports.figures.conditions import METRICS, Condition
from reports.figures.metrics import LEAST_SAMPLES, per_request
from reports.figures.outcomes import SHARES
from reports.figures.statistics import Blocks, blocks_of, gaps_interval, mean_interval, quantile_interval
from reports.record.records import Flags, Record

FEW = "too few requests"


def limit_interval(limit: Condition, record: Record, blocks: Blocks | None = None) -> tuple[float, float] | str:
    """Return the interval of the statistic that a limit is on (s), or why there is none; a failed request takes forever.

    Args:
        limit: a limit on a statistic of a run.
        record: the requests that count.
        blocks: each request's block (default: those of `blocks_of`).
    """
    known = per_request(record.requests)
    if blocks is None:
        blocks = blocks_of(record.requests.intended_s, known["e2e_sched"])
    if limit.metric == "itl":
        return _gaps_interval(limit, record, blocks)
    values = known[METRICS[limit.metric]]
    if limit.statistic == "max":
        return "a maximum comes from one request"
    if limit.statistic == "mean":  # of the requests that were answered, as in every table
        return mean_interval(values, blocks) or FEW
    values = np.where(record.requests.succeeded, values, np.inf)
    share = SHARES[limit.statistic]
    if (count := int((~np.isnan(values)).sum())) < LEAST_SAMPLES[round(share * 100)]:
        return f"{count:,} requests are too few"
    return quantile_interval(values, blocks, share) or FEW


def attainment_interval(is_good: Flags, blocks: Blocks) -> tuple[float, float] | None:
    """Return the interval of the share of requests that are within their limits, or None if they are too few.

    If none exceeded its limits, resampling finds none either, but up to 3 in this many may (the rule of three).
    """
    interval = mean_interval(is_good.astype(float), blocks)
    if interval is None:
        return None
    low, high = interval
    return (max(1 - 3 / len(is_good), 0.0) if is_good.all() else low), min(high, 1.0)


def _gaps_interval(limit: Condition, record: Record, blocks: Blocks) -> tuple[float, float] | str:
    """Return the interval of a limit on the gaps between tokens: each belongs to the block in which it begins."""
    if limit.statistic == "max":
        return "a maximum comes from one gap"
    if record.gap_starts_s is None:
        return "of so many gaps only the lengths are kept, not when they began"
    arrivals = record.requests.intended_s
    starts_s = np.array([arrivals[blocks == block].min() for block in range(int(blocks.max(initial=0)) + 1)])
    of_gaps = np.searchsorted(starts_s[1:], record.gap_starts_s, side="right")  # earlier ones are in the first
    share = None if limit.statistic == "mean" else SHARES[limit.statistic]
    return gaps_interval(record.gaps, of_gaps, share) or FEW
