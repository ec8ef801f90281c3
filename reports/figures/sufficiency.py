"""Is there enough data to judge by? Few requests per worker, cold caches, and a load that never settles are said by name."""

import math

import numpy as np

from reports.figures.stability import lifetimes, ramp, stability
from reports.record.records import Floats, Record

FEW_PER_WORKER = 30
"""With fewer requests for each worker, single placements decide which mode looks better."""
LIFETIMES = 5
"""Requests must arrive for at least so many times the lifetime of one, or the system mostly fills and empties."""
WINDOWS = 12
LEAST = 10
"""The fewest requests of a window."""
RISE = 0.05
"""A hit share that still rises by more than this shows caches that are still filling."""
SURE = 3
"""How many standard errors a rise must be to count."""


def remarks(run: Record) -> list[str]:
    """Say what a run is too short for, with the way out."""
    if not len(run.requests):
        return []
    return [*_few(run), *_short(run), *_cold(run)]


def _few(run: Record) -> list[str]:
    """Say how few requests each worker had; nothing if the number of workers changed, or is not known."""
    is_known = bool(run.pools or run.requests.worker.count())
    if not is_known or (run.fleet is not None and run.fleet.is_shown):
        return []
    workers = max((pool.workers for pool in run.pools), default=run.num_workers)
    each = len(run.requests) / max(workers, 1)
    if each >= FEW_PER_WORKER:
        return []
    who = "its worker" if workers == 1 else f"each of {workers:,} workers"
    return [
        f"{who} had {each:.3g} request{'s' * (each != 1)} on average, so single placements decide its figures: use at least "
        f"{FEW_PER_WORKER * workers:,} requests ({FEW_PER_WORKER} for each worker), with a longer trace or a larger --max-requests"
    ]


def _short(run: Record) -> list[str]:
    """Say that the load was never steady: the run is short, or requests in flight became more and more."""
    span, lifetime = float(np.ptp(run.requests.intended_s)), float(np.percentile(lifetimes(run.requests), 90))
    if 0 < span < LIFETIMES * lifetime:
        return [
            f"requests arrived for {span:.3g} s, and one takes {lifetime:.3g} s (p90), so the load was never steady: "
            f"{_way_out(run, span, LIFETIMES * lifetime)}"
        ]
    ends = ramp(run)
    if ends is None:
        return []
    return [
        f"requests in flight kept growing, from {ends[0]:.3g} to {ends[1]:.3g}, although arrivals did not, so the load never "
        "became steady: use a longer trace, or start measuring later (--warmup-s)"
    ]


def _way_out(run: Record, span: float, least_s: float) -> str:
    """Say what lets requests arrive for so long (s), if anything does: in a closed loop, more of them."""
    if streams := int(run.facts.get("streams", 0)):
        # The first of each stream are sent at once, and the others at the pace of the answers.
        count = streams + math.ceil(max(len(run.requests) - streams, 1) * least_s / span)
        return f"use at least {count:,} requests, with a longer trace or a larger --max-requests"
    if not (queue := stability(run)).is_stable:
        return (
            f"{queue.start:.0f} requests waited at the start and {queue.end:.0f} at the end, and they would become more in a "
            "longer trace: use more workers, or less load (--rate-scale)"
        )
    return f"use a trace of at least {least_s:.3g} s ({LIFETIMES} times that)"


def _cold(run: Record) -> list[str]:
    """Say that caches were still filling: the hit share rose clearly from the middle third of the requests to the last."""
    requests = run.requests
    order = np.argsort(requests.intended_s, kind="stable")
    order = order[requests.succeeded[order]]
    if requests.cached_tokens[order].mask.any() or len(order) < LEAST * WINDOWS:
        return []
    parts = np.array_split(order, WINDOWS)
    hits: Floats = np.array(
        [requests.cached_tokens.data[part].sum() / max(requests.isl[part].sum(), 1) for part in parts]
    )
    first, middle, last = np.split(hits, 3)
    rise = float(last.mean() - middle.mean())
    error = float(np.sqrt((middle.var(ddof=1) + last.var(ddof=1)) / len(last)))
    if rise <= max(RISE, SURE * error):
        return []
    return [
        f"its caches were still cold: the hit share was {first.mean():.1%} in the first third of the requests, "
        f"{middle.mean():.1%} in the second and {last.mean():.1%} in the last, so a longer run has more hits: use a longer "
        "trace, or start measuring later (--warmup-s)"
    ]
