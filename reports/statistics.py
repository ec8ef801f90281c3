"""Is one arm better than another, by how much, and is that more than noise?"""

from dataclasses import dataclass

import numpy as np

from reports.records import Floats

RESAMPLES = 2000


@dataclass(frozen=True)
class PairedDifference:
    """Mean difference of paired values (this arm minus the first), with a 95 % confidence interval."""

    mean: float
    low: float
    high: float
    relative: float
    """Of the first arm's mean."""
    count: int

    @property
    def is_noise(self) -> bool:
        """True if the interval holds zero."""
        return self.low <= 0 <= self.high


def paired_difference(baseline: Floats, other: Floats, *, seed: int = 0) -> PairedDifference | None:
    """Compare two arms request by request; None if fewer than two pairs have values.

    Requests that follow each other share queues and caches, so whole blocks of neighbours are resampled
    (non-overlapping block bootstrap, about sqrt(n) requests a block).
    """
    both = ~(np.isnan(baseline) | np.isnan(other))
    before, after = baseline[both], other[both]
    if len(before) < 2:
        return None
    difference = after - before
    length = max(1, round(len(difference) ** 0.5))
    starts = np.arange(0, len(difference), length)
    sums = np.add.reduceat(difference, starts)
    sizes = np.diff(np.append(starts, len(difference)))
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(starts), (RESAMPLES, len(starts)))
    means = sums[picks].sum(axis=1) / sizes[picks].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    mean = float(difference.mean())
    return PairedDifference(
        mean, float(low), float(high), mean / float(before.mean()) if before.mean() else 0.0, len(difference)
    )
