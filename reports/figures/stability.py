"""Did the queue settle, or did it grow throughout the run?"""

from dataclasses import dataclass

import numpy as np

from reports.record.records import Floats, Record, Requests

WINDOWS = 12
SETTLING = 2
"""Windows at the start that only fill an empty system."""


@dataclass(frozen=True)
class Stability:
    """How the number of waiting requests changed while requests arrived."""

    is_stable: bool
    start: float
    """Requests that waited once the system had filled, by the fitted line."""
    end: float


def stability(run: Record) -> Stability:
    """Return whether the number of waiting requests grew, and grew faster than the arrivals.

    A system that fills up is not a queue: a request that a worker has started does not wait. If start times are unknown, all in the
    system count. Lines are fitted to the number per window and to the number per arrival (by Little's law, a time). Both
    must clearly grow by more than half. Clearly means a t value over 4, because windows are few and neighbours correlate.
    Means over a growing queue measure the run's length; a trace that gets busier is not such a queue.
    """
    edges = _windows(run.requests)
    if edges is None:
        return Stability(True, 0.0, 0.0)
    grows, first, last = _growth(run.requests, edges, waiting(run.requests, edges))
    return Stability(not grows, first, last)


def ramp(run: Record) -> tuple[float, float] | None:
    """Return how many requests were in flight at first and at last, if they became more although no queue grew; else None.

    Their number must grow, and faster than the arrivals, as `stability` requires of the requests that wait.
    """
    edges = _windows(run.requests)
    if edges is None or not stability(run).is_stable:
        return None
    grows, first, last = _growth(run.requests, edges, in_system(run.requests, edges))
    return (first, last) if grows else None


def _windows(requests: Requests) -> Floats | None:
    """Return the edges of equal windows of the time in which requests arrive (s); None for too few, or all at once."""
    start = requests.intended_s
    if len(start) < 10 * WINDOWS or float(np.ptp(start)) <= 0:
        return None
    return np.linspace(float(start.min()), float(start.max()), WINDOWS + 1)


def _growth(requests: Requests, edges: Floats, number: Floats) -> tuple[bool, float, float]:
    """Return whether a number of requests grows, and faster than the arrivals; and the ends of its fitted line, at least 0."""
    number = number[SETTLING:]
    arrivals = np.histogram(requests.intended_s, edges)[0][SETTLING:].astype(float)
    smooth = np.convolve(np.pad(arrivals, 1, mode="edge"), np.full(3, 1 / 3), mode="valid")
    first, last, is_sure = _trend(number)
    grows = is_sure and last > 1.5 * max(first, 1.0) and last - first > 4
    if grows and (smooth > 0).all():
        early, late, is_sure = _trend(number / smooth)
        grows = is_sure and late > 1.5 * max(early, 1e-9)
    return grows, max(first, 0.0), max(last, 0.0)


def _trend(values: Floats) -> tuple[float, float, bool]:
    """Return the ends of the fitted line, and whether it clearly rises."""
    time = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float((time * values).sum() / (time * time).sum())
    residual = values - values.mean() - slope * time
    error = float(np.sqrt((residual**2).sum() / (len(values) - 2) / (time * time).sum()))
    mean = float(values.mean())
    return mean + slope * float(time[0]), mean + slope * float(time[-1]), slope > 4 * error and slope > 0


def in_system(requests: Requests, edges: Floats) -> Floats:
    """Return the mean number of requests in flight within each window between edges (s)."""
    return _between(requests.intended_s, _ends(requests), edges)


def waiting(requests: Requests, edges: Floats) -> Floats:
    """Return the mean number of requests that wait for a worker to start on them, within each window between edges (s)."""
    number = _between(
        requests.intended_s, np.where(requests.admitted_s.mask, _ends(requests), requests.admitted_s.data), edges
    )
    is_apart = ~(requests.prefill_end_s.mask | requests.decode_start_s.mask)
    return number + _between(requests.prefill_end_s.data[is_apart], requests.decode_start_s.data[is_apart], edges)


def lifetimes(requests: Requests) -> Floats:
    """Return how long each request was in the system (s)."""
    return _ends(requests) - requests.intended_s


def _ends(requests: Requests) -> Floats:
    """Return when each request left; one that never ended left when it was sent (s)."""
    sent = np.where(requests.sent_s.mask, requests.intended_s, requests.sent_s.data)
    return np.where(requests.done_s.mask, sent, requests.done_s.data)


def _between(start: Floats, stop: Floats, edges: Floats) -> Floats:
    """Return the mean number of spans of time within each window between edges (s)."""
    begun, ended = _integral(np.sort(start), edges), _integral(np.sort(stop), edges)
    result: Floats = np.diff(begun - ended) / np.diff(edges)
    return result


def _integral(times: Floats, edges: Floats) -> Floats:
    """Integrate, up to each edge, the number of times that have passed."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    count = np.searchsorted(times, edges)
    result: Floats = count * edges - sums[count]
    return result
