"""When a run has enough results, so that nothing more needs to be sent."""

import math
from typing import NamedTuple

import numpy as np

from dynabench.live.timeline import Timeline
from reports.figures.statistics import student_t
from reports.record.records import Floats
from workloads.pacing import LoadConfig

CHECK_S = 0.25
LIFETIMES = 2.5
"""Requests are sent for at least so many times as long as one takes (p90), or the load is never steady."""
GRACE_S = 2.0
"""When the time is over, requests in flight have so long to end."""
TOO_LATE = "no answer when the time was over"
"""Why a request failed that had taken several times as long as others by then."""
LEAST = 100
"""Fewest measured requests whose means may be precise; a 95th percentile with an interval needs 72."""
BLOCKS = 10
"""Neighbours share queues and batches, so the means of so many equal blocks count, not single requests."""


class Enough(NamedTuple):
    """A run has enough once requests were sent for long enough, or its mean TTFT and E2E latency are precise."""

    least_s: float
    """How long requests count (s), unless they take so long that it would see too few of them."""
    precision: float
    """Less time is enough if the 95% intervals are within this share of the means; 0: it never is."""
    ends_at: float = math.inf
    """When the time is over whatever there is, on the client's clock."""

    def is_reached(self, timeline: Timeline, load: LoadConfig, now_s: float) -> bool:
        """Return whether to send nothing more, at a time of the workload (s)."""
        span = now_s - load.warmup_s
        if load.measure_s is not None and span >= load.measure_s:
            return True
        intended, done, first = (
            np.ma.filled(timeline.noted(name), np.nan) for name in ("intended_s", "done_s", "first_token_s")
        )
        known = np.flatnonzero(~np.isnan(done) & load.are_measured(intended))
        if not len(known):
            return False
        e2e = done[known] - intended[known]
        if span < LIFETIMES * float(np.percentile(e2e, 90)):
            return False
        if span >= self.least_s:
            return True
        order = np.argsort(done[known])
        ttft = (first[known] - intended[known])[order]
        times = (e2e[order], ttft[~np.isnan(ttft)])  # embeddings have no first token
        return len(known) >= LEAST and all(width(values) <= self.precision for values in times if len(values) >= BLOCKS)


def lasting_s(timeline: Timeline) -> float:
    """Return several times as long as an answered request takes; 0 if none was answered."""
    took = np.ma.filled(timeline.noted("done_s") - timeline.noted("intended_s"), np.nan)
    took = took[~np.isnan(took)]
    return LIFETIMES * float(np.percentile(took, 90)) if len(took) else 0.0


def width(values: Floats) -> float:
    """Return half the width of the mean's 95% interval, as a share of the mean, from the means of blocks in order."""
    mean = float(values.mean())
    blocks = np.array([block.mean() for block in np.array_split(values, BLOCKS)])
    half = student_t(BLOCKS - 1) * float(blocks.std(ddof=1)) / math.sqrt(BLOCKS)
    return half / mean if mean > 0 else math.inf
