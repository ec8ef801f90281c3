"""Times between tokens in bins of nearly equal relative width, for runs with more rows of them than should be kept.

    ... 1/2 s ... 128 bins of 1/256 s ... 1 s ... 128 bins of 1/128 s ... 2 s ...

Of each bin, the number of its gaps and their sum are kept. So counts, the mean and the longest gap are exact, and a percentile
is off by less than the width of a bin.
"""

import numpy as np

from reports.figures.metrics import steps_up_to
from reports.record.records import Floats, Ints

PER_DOUBLING = 128
GAP_ERROR = 1 / PER_DOUBLING
"""The width of a bin relative to its gaps is at most this."""
LOWEST, HIGHEST = -40, 41
"""Powers of two (s); shorter gaps are in the first bin, and longer ones in the last."""
SIZE = (HIGHEST - LOWEST) * PER_DOUBLING


class GapBins:
    """The gaps of rows (first, slope, curve, steps, tokens): see `Record`."""

    def __init__(self) -> None:
        self._counts, self._sums_s = np.zeros(SIZE), np.zeros(SIZE)
        self._longest_s = 0.0

    def add(self, rows: Floats) -> None:
        """Put the gaps of rows into their bins; within a row they rise, or are as good as equal."""
        if not len(rows):
            return
        steps = rows[:, 3]
        mean, last = _sums_s(rows, steps) / steps, rows[:, 0] + (steps - 1) * (rows[:, 1] + (steps - 1) * rows[:, 2])
        rises = last > rows[:, 0]
        lowest, highest = _bins(np.where(rises, rows[:, 0], mean)), _bins(np.where(rises, last, mean))
        counts = highest - lowest + 1  # of bins, for each row
        row, bins = np.repeat(rows, counts, axis=0), np.arange(counts.sum()) + np.repeat(lowest, counts)
        bins -= np.repeat(np.cumsum(counts) - counts, counts)
        begin = np.where(bins > np.repeat(lowest, counts), steps_up_to(row, _below(bins)), 0.0)
        end = np.where(bins < np.repeat(highest, counts), steps_up_to(row, _below(bins + 1)), row[:, 3])
        self._counts += np.bincount(bins, (end - begin) * row[:, 4], SIZE)
        self._sums_s += np.bincount(bins, (_sums_s(row, end) - _sums_s(row, begin)) * row[:, 4], SIZE)
        self._longest_s = max(self._longest_s, float(np.maximum(rows[:, 0], last).max()))

    def rows(self) -> Floats:
        """Return a row for each bin that has gaps, all of its mean length, and the longest gap in its own row."""
        used = np.flatnonzero(self._counts > 0)
        counts, sums_s = self._counts[used], self._sums_s[used]
        is_last = used == used[-1:]
        rest = counts - (is_last & (counts > 1))
        means_s = np.where(is_last & (counts > 1), sums_s - self._longest_s, sums_s) / rest
        found = np.zeros((len(used) + 1, 5))
        found[:-1, 0], found[:-1, 3], found[:-1, 4] = means_s, 1, rest
        found[-1] = self._longest_s, 0, 0, 1, 1
        return found if (counts[-1:] > 1).any() else found[:-1]


def _bins(gaps_s: Floats) -> Ints:
    """Return the bins of gaps."""
    share, power = np.frexp(gaps_s)
    bins = (power - LOWEST) * PER_DOUBLING + ((share - 0.5) * (2 * PER_DOUBLING)).astype(np.int64)
    return np.where(gaps_s > 0, np.clip(bins, 0, SIZE - 1), 0)


def _below(bins: Ints) -> Floats:
    """Return the longest gap that is shorter than those in a bin."""
    edges: Floats = np.ldexp(0.5 + bins % PER_DOUBLING / (2 * PER_DOUBLING), bins // PER_DOUBLING + LOWEST)
    return np.nextafter(edges, 0.0)


def _sums_s(rows: Floats, steps: Floats) -> Floats:
    """Return the sum of the gaps in each row's first steps, of one of its tokens each."""
    first, slope, curve = rows[:, 0], rows[:, 1], rows[:, 2]
    sums: Floats = steps * (first + (steps - 1) * (slope / 2 + curve * (2 * steps - 1) / 6))
    return sums
