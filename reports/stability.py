"""Did the queue settle, or did it grow as long as the run lasted?"""

from dataclasses import dataclass

import numpy as np

from reports.records import ArmResult, Floats

WINDOWS = 12
SETTLING = 2
"""Windows at the start that only fill an empty system."""


@dataclass(frozen=True)
class Stability:
    """How the number of requests in the system went over the time in which requests arrived."""

    is_stable: bool
    start: float
    """Requests in the system once it had filled, by the fitted line."""
    end: float


def stability(run: ArmResult) -> Stability:
    """Fit a line to the number of requests in the system; unstable if it grew by more than half, beyond doubt.

    Means over a queue that grows measure the run's length. "Beyond doubt" is a t value over 4, windows being few and
    neighbours alike.
    """
    c = run.columns
    start = c["intended_s"]
    if len(start) < 10 * WINDOWS or float(np.ptp(start)) <= 0:
        return Stability(True, 0.0, 0.0)
    edges = np.linspace(float(start.min()), float(start.max()), WINDOWS + 1)
    number = in_system(run, edges)[SETTLING:]
    time = np.arange(len(number)) - (len(number) - 1) / 2
    slope = float((time * number).sum() / (time * time).sum())
    residual = number - number.mean() - slope * time
    error = float(np.sqrt((residual**2).sum() / (len(number) - 2) / (time * time).sum()))
    first, last = (float(number.mean() + slope * place) for place in (time[0], time[-1]))
    grows = slope > 0 and slope > 4 * error and last > 1.5 * max(first, 1.0) and last - first > 4
    return Stability(not grows, first, last)


def in_system(run: ArmResult, edges: Floats) -> Floats:
    """Return the mean number of requests sent and not ended within each window between edges (s)."""
    c = run.columns
    start = np.sort(c["intended_s"])
    stop = np.sort(np.where(c["done_s"] >= 0, c["done_s"], c["sent_s"]))
    begun = _integral(start, edges)
    ended = _integral(stop, edges)
    result: Floats = np.diff(begun - ended) / np.diff(edges)
    return result


def _integral(times: Floats, edges: Floats) -> Floats:
    """Integrate, up to each edge, the number of times that have passed."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    count = np.searchsorted(times, edges)
    result: Floats = count * edges - sums[count]
    return result
