"""Is one arm better than another, by how much, and is that more than noise?

Requests in the system at the same time share queues and caches, so their latencies are not independent. The
dependence is weak but long-range, so intervals from short blocks are far too narrow (in simulated
A/A pairs they excluded zero in 20 to 30% of the cases instead of 5%). A block here spans at least ten lifetimes
of a request. There may be few such blocks, so the bootstrap's intervals are widened by Student's t.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.figures.metrics import TokenGaps
from reports.record.records import Floats

RESAMPLES = 1000
GRID = 512
GAPS_GRID = 64
FINEST = 1e-6
"""The share of a quantile to which a grid is narrowed at most."""
LIFETIMES_PER_BLOCK = 10
MIN_BLOCKS, MAX_BLOCKS = 5, 40
TAIL = 0.025
"""The chance that a value is beyond one end of a 95% interval."""
POWER = 0.9
"""The chance that a recommended sample finds a difference of the intended size."""

Blocks = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class PairedDifference:
    """A figure of this arm minus that of the first arm, paired by request, with a 95% confidence interval."""

    mean: float
    """The difference."""
    low: float
    high: float
    relative: float
    """The difference relative to the first arm's figure."""
    count: int
    """The number of pairs."""
    num_blocks: int
    detectable: float
    """The smallest difference that a sample of this size and noise finds with a 90% chance, also relative."""
    base: float
    """The first arm's figure."""

    @property
    def is_noise(self) -> bool:
        """True if the interval includes zero."""
        return self.low <= 0 <= self.high

    @property
    def is_exact(self) -> bool:
        """True if there certainly is no difference, because every pair is equal."""
        return self.low == self.high == 0

    def shares(self) -> tuple[float, float]:
        """Return the interval relative to the first arm's figure."""
        scale = 1 / self.base if self.base else 0.0
        return self.low * scale, self.high * scale

    def count_to_find(self, relative: float) -> int:
        """Return how many pairs are needed to find a relative difference with a 90% chance."""
        return math.ceil(self.count * (self.detectable / relative) ** 2)


def blocks_of(intended_s: Floats, e2e_s: Floats) -> Blocks:
    """Number the block of each request, shape (requests,): equal shares of the requests in order of arrival.

    Each block spans ten times the 90th percentile of the requests' lifetimes, if that leaves 5 to 40 blocks.
    """
    known = e2e_s[~np.isnan(e2e_s)]
    count = len(intended_s)
    span = float(np.ptp(intended_s)) if count else 0.0
    lifetime = float(np.percentile(known, 90)) if len(known) else 0.0
    number = MAX_BLOCKS if lifetime <= 0 else int(span / (LIFETIMES_PER_BLOCK * lifetime))
    number = max(min(number, MAX_BLOCKS, count), min(MIN_BLOCKS, count), 1)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(intended_s, kind="stable")] = np.arange(count)
    blocks: Blocks = (ranks * number // max(count, 1)).astype(np.uint16)
    return blocks


def paired_difference(
    baseline: Floats, other: Floats, blocks: Blocks, *, share: float | None = None, seed: int = 0
) -> PairedDifference | None:
    """Compare two arms request by request; None if there are fewer than two pairs or two blocks.

    Args:
        baseline: the first arm's values, NaN where one is missing, shape (requests,).
        other: the other arm's values for the same requests.
        blocks: each request's block.
        share: compare this quantile (0..1) instead of the mean.
        seed: the seed of the resampling.
    """
    both = ~(np.isnan(baseline) | np.isnan(other))
    before, after = baseline[both], other[both]
    used, place = _used(blocks[both])
    if len(before) < 2 or used < 2:
        return None
    weights = resamples(used, seed)
    if share is None:
        base, value = float(before.mean()), float((after - before).mean())
        sums = np.bincount(place, weights=after - before)
        resampled = (weights @ sums) / (weights @ np.bincount(place))
    else:
        base = float(np.quantile(before, share))
        value = float(np.quantile(after, share)) - base
        later, earlier = (_quantiles(_sorted(values, place), weights, share) for values in (after, before))
        resampled = later - earlier
    low, high = _interval(value, resampled, used)
    low = max(low, -base)  # no time is negative, so none is lower by more than the whole of the other
    detectable = (student_t(used - 1) + NormalDist().inv_cdf(POWER)) * standard_error(resampled, used)
    scale = 1 / base if base else 0.0
    return PairedDifference(value, low, high, value * scale, len(before), used, detectable * abs(scale), base)


def quantile_interval(values: Floats, blocks: Blocks, share: float, *, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of a quantile of times, or None if there are fewer than two blocks.

    A request that failed has an infinite time. The upper end is infinite if more than one in 40 resamples are.
    """
    (found,) = quantile_intervals(values, blocks, [share], seed=seed)
    return found


def quantile_intervals(
    values: Floats, blocks: Blocks, shares: Sequence[float], *, seed: int = 0
) -> list[tuple[float, float] | None]:
    """Return the interval of each of several quantiles."""
    known = ~np.isnan(values)
    values = values[known]
    used, place = _used(blocks[known])
    if used < 2:
        return [None] * len(shares)
    groups = _sorted(values, place)
    return [_quantile_interval(_quantile(values, share), groups, share, seed) for share in shares]


def _quantile_interval(value: float, groups: Sequence[Floats], share: float, seed: int) -> tuple[float, float] | None:
    if not math.isfinite(value):
        return None
    resampled = _quantiles(groups, resamples(len(groups), seed), share)
    is_finite = np.isfinite(resampled)
    low, high = _of_times(_interval(value, resampled[is_finite], len(groups)))
    return low, high if is_finite.mean() >= 1 - TAIL else math.inf


def _used(blocks: Blocks) -> tuple[int, Blocks]:
    """Return how many blocks there are, and each one's place among them."""
    is_used = np.bincount(blocks) > 0
    return int(is_used.sum()), (np.cumsum(is_used) - 1).astype(np.uint16)[blocks]


def _sorted(values: Floats, place: Blocks) -> list[Floats]:
    """Return the values of each block, in order."""
    order = np.argsort(place, kind="stable")  # a radix sort of 16 bits
    return [np.sort(group) for group in np.split(values[order], np.cumsum(np.bincount(place))[:-1])]


def gaps_interval(rows: Floats, blocks: Blocks, share: float | None, *, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of a quantile of the times between tokens, or of their mean (None).

    Args:
        rows: the times, as in `Record`.
        blocks: each row's block.
        share: the quantile (0..1).
        seed: the seed of the resampling.
    """
    used = np.unique(blocks[rows[:, 3] * rows[:, 4] > 0])
    if len(used) < 2:
        return None
    whole, groups = TokenGaps(rows), [TokenGaps(rows[blocks == block]) for block in used]
    weights, sizes = resamples(len(used), seed), np.array([group.count for group in groups], float)
    if share is None:
        sums = np.array([group.mean() for group in groups]) * sizes
        return _of_times(_interval(whole.mean(), (weights @ sums) / (weights @ sizes), len(used)))
    value = float(whole.quantiles([share])[0])
    return _of_times(_interval(value, _gap_quantiles(groups, sizes, weights, share), len(used)))


def mean_interval(values: Floats, blocks: Blocks, *, seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of the mean of times, or None if there are fewer than two blocks."""
    known = ~np.isnan(values)
    used, place = _used(blocks[known])
    if used < 2:
        return None
    weights = resamples(used, seed)
    resampled = (weights @ np.bincount(place, weights=values[known])) / (weights @ np.bincount(place))
    return _of_times(_interval(float(values[known].mean()), resampled, used))


def half_interval(values: Sequence[float]) -> float | None:
    """Return half the width of the 95% interval of a mean over repeats; None for fewer than two repeats."""
    if len(values) < 2:
        return None
    return student_t(len(values) - 1) / math.sqrt(len(values)) * stdev(values)


def student_t(freedom: int, share: float = 0.975) -> float:
    """Return a quantile of Student's t (Hill's expansion, accurate to 0.1% from 4 degrees of freedom on)."""
    z = NormalDist().inv_cdf(share)
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        a = 2 * share - 1
        return a * math.sqrt(2 / (1 - a * a))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom ** (power + 1) for power, term in enumerate(terms))


@functools.cache
def resamples(number: int, seed: int) -> npt.NDArray[np.float64]:
    """Return how often each block is drawn in each resample, shape (resamples, blocks)."""
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(number, np.full(number, 1 / number), RESAMPLES).astype(float)
    drawn.flags.writeable = False  # it is shared
    return drawn


def _quantiles(groups: Sequence[Floats], weights: Floats, share: float) -> Floats:
    """Return the quantile of each resample, to one of 512 values.

    It is between the lowest and the highest of the blocks' own quantiles. Within each resample, values up to a point
    are counted as the weighted sum of the blocks' counts, so no request is resampled individually.
    """
    own = [group[max(math.ceil(share * len(group)) - 1, 0)] for group in groups]
    low, high = min(own), max(own)
    inside = [group[np.searchsorted(group, low) : np.searchsorted(group, high, side="right")] for group in groups]
    between = np.unique(np.concatenate(inside))
    grid = between[np.unique(np.linspace(0, len(between) - 1, GRID).astype(int))]
    counts = np.array([np.searchsorted(group, grid, side="right") for group in groups], float)
    return _picked(grid, counts, np.array([len(group) for group in groups], float), weights, share)


def _gap_quantiles(groups: Sequence[TokenGaps], sizes: Floats, weights: Floats, share: float) -> Floats:
    """Return the quantile of each resample, on a grid that is narrowed until they spread over enough of it.

    blocks' own quantiles   |: :                                                      |  one block stalled
    resamples' quantiles    |::|
                            |::|                                                         the next grid
    """
    own = [float(group.quantiles([share])[0]) for group in groups]
    low, high = min(own), max(own)
    while True:
        grid, step = np.linspace(low, high, GAPS_GRID, retstep=True)
        counts = np.array([group.counts_below(grid) for group in groups])
        picked = _picked(grid, counts, sizes, weights, share)
        if np.ptp(picked) > (high - low) / 8 or step <= FINEST * high:
            return picked
        low, high = max(low, float(picked.min() - step)), float(picked.max())


def _picked(grid: Floats, counts: Floats, sizes: Floats, weights: Floats, share: float) -> Floats:
    """Return each resample's quantile: the first value of the grid up to which enough of the blocks' values are.

    Args:
        grid: values in order; the last is no less than any block's own quantile.
        counts: how many of each block's values are at most each of these, shape (blocks, values).
        sizes: the number of each block's values.
        weights: how often each block is drawn, shape (resamples, blocks).
        share: the quantile (0..1).
    """
    reached = weights @ counts >= (share * (weights @ sizes))[:, None] - 1e-9
    reached[:, -1] = True
    picked: Floats = grid[reached.argmax(axis=1)]
    return picked


def _quantile(values: Floats, share: float) -> float:
    """Return a quantile, linear between two values; if any is infinite, the upper of the two."""
    if np.isfinite(values).all():
        return float(np.quantile(values, share))
    return float(np.sort(values)[math.ceil((len(values) - 1) * share)])


def _interval(value: float, resampled: Floats, number: int) -> tuple[float, float]:
    """Return value and standard error of the bootstrap as an interval by Student's t.

    With few blocks, the bootstrap's own percentiles are too close together: there are few ways to draw five blocks.
    """
    half = student_t(number - 1) * standard_error(resampled, number)
    return value - half, value + half


def _of_times(interval: tuple[float, float]) -> tuple[float, float]:
    """Cut off the part below zero, which a symmetric interval can reach if few blocks differ a lot.

    No time is negative, so what is left contains the true value as often as the whole.
    """
    low, high = interval
    return max(low, 0.0), high


def standard_error(resampled: Floats, number: int) -> float:
    """Return the standard error, corrected because drawing with replacement makes the spread of the resamples too small."""
    return float(resampled.std()) * math.sqrt(number / (number - 1))
