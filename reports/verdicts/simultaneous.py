"""Which of several arms have the lowest mean, and which tie with it?

Of many equal arms, one always looks best. An arm is worse than the lowest only if their difference is larger than any
two of the arms would show by chance, in 95 of 100 experiments on equal arms: the critical value is that of the largest
studentized difference of all pairs (Tukey's range, but with a standard error for each pair, and with the correlations of
the block bootstrap; as in Westfall and Young, Resampling-Based Multiple Testing, 1993). Arms that
are worse leave, and the rest are compared again, as in the model confidence set (Hansen, Lunde and Nason, Econometrica
79, 2011). The arms that are truly lowest are all among those left in at least 95 of 100 experiments. Only the first
comparison gives intervals that hold for all arms together, so these are kept; one of an arm that leaves later may
include zero.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from reports.figures.statistics import POWER, Blocks, PairedDifference, resamples, standard_error, student_t
from reports.record.records import Floats
from reports.summary import Difference

DRAWS = 4000
AT_ONCE = 1_000_000
"""The most pairs that are drawn at once, so that those of many arms fit into memory."""
MANY = 32
"""With more arms than this, those that are worse by any standard leave first."""
Matrix = npt.NDArray[np.float64]
TINY = 1e-12
"""A variance that is this small, compared with those of the two arms, is that of equal arms."""


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The values of an arm, added up within each block of requests, and their number in each."""

    sums: Floats
    counts: Floats

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return float(self.sums.sum() / self.counts.sum())

    def resampled(self) -> Floats:
        """Return the mean of each resample of blocks; those of several arms draw the same blocks."""
        weights = resamples(len(self.sums), 0)
        means: Floats = (weights @ self.sums) / (weights @ self.counts)
        return means


def parts_of(values: Mapping[str, Floats], blocks: Blocks) -> dict[str, BlockParts]:
    """Add up each arm's values within blocks, of the requests that have one in every arm; {} if those are too few."""
    common = ~np.isnan(np.array(list(values.values()))).any(axis=0)
    used, place = np.unique(blocks[common], return_inverse=True)
    if common.sum() < 2 or len(used) < 2:
        return {}
    counts = np.bincount(place).astype(float)
    return {arm: BlockParts(np.bincount(place, its[common]).astype(float), counts) for arm, its in values.items()}


def lowest(
    arms: Mapping[str, BlockParts], judge: Callable[[PairedDifference], Difference], *, base: float | None = None
) -> tuple[list[str], dict[str, Difference]]:
    """Return the arm with the lowest mean and those that tie with it, in order; and how every other arm differs from it.

    The intervals hold for all arms together.

    Args:
        arms: the values of each, in the same blocks of requests.
        judge: the verdict on a difference.
        base: what differences are relative to, instead of the lowest mean.
    """
    ties = sorted(arms, key=lambda arm: arms[arm].mean)
    best, found = ties[0], dict[str, Difference]()
    rough = _rough_value(len(ties), len(arms[best].sums) - 1)
    while len(ties) > 1:
        quantile = rough or critical_value([arms[arm] for arm in ties])
        now = {arm: judge(_difference(arms[best], arms[arm], quantile, base)) for arm in ties[1:]}
        left = [arm for arm in ties if arm == best or now[arm].verdict != "worse"]
        is_of_all = len(ties) == len(arms)
        found |= now if is_of_all else {arm: replace(found[arm], verdict="worse") for arm in {*ties} - {*left}}
        if len(left) == len(ties) and not rough:
            break
        ties, rough = left, None
    return ties, found


def _rough_value(number: int, freedom: int) -> float | None:
    """Return a critical value for all pairs (Bonferroni's) that is surely too large; None if the exact one takes no time.

    With few blocks, this far out, Student's t is not accurate enough.
    """
    return 1.1 * student_t(freedom, 1 - 0.05 / (number * (number - 1))) if freedom >= 15 and number > MANY else None


def critical_value(arms: Sequence[BlockParts]) -> float:
    """Return how many standard errors any two of several equal arms are apart at most, in 95% of all cases.

    For two arms this is Student's t, so the interval is that of a single comparison.
    """
    freedom = len(arms[0].sums) - 1
    if len(arms) == 2:
        return student_t(freedom)
    rng = np.random.default_rng(0)
    factor = _factor(np.cov([arm.resampled() for arm in arms]))
    batch = max(min(AT_ONCE // len(arms) ** 2, DRAWS), 1)
    largest = [_largest_gaps(rng, factor, freedom + 1, batch) for _ in range(0, DRAWS, batch)]
    return max(float(np.quantile(np.concatenate(largest), 0.95)), student_t(freedom))


def _factor(covariance: Matrix) -> Matrix:
    """Return a matrix F with F F' = covariance, which equal arms may make singular."""
    values, vectors = np.linalg.eigh(covariance)
    factor: Matrix = vectors * np.sqrt(np.maximum(values, 0.0))
    return factor


def _largest_gaps(rng: np.random.Generator, factor: Matrix, blocks: int, draws: int) -> Floats:
    """Draw experiments on arms with equal means, and return the largest studentized difference in each.

    Each pair has its own standard error, estimated from as many blocks as in the real experiment.
    """
    values = factor @ rng.standard_normal((draws, len(factor), blocks))
    means = values.mean(axis=2)
    values -= means[:, :, None]
    covariance = values @ values.transpose(0, 2, 1) / (blocks - 1) / blocks
    own = np.diagonal(covariance, axis1=1, axis2=2)
    both = own[:, :, None] + own[:, None, :]
    variance = both - 2 * covariance
    is_equal = variance <= TINY * both
    gaps = np.abs(means[:, :, None] - means[:, None, :]) / np.sqrt(np.where(is_equal, 1, variance))
    largest: Floats = np.where(is_equal, 0, gaps).max(axis=(1, 2))
    return largest


def _difference(first: BlockParts, other: BlockParts, quantile: float, base: float | None) -> PairedDifference:
    """Return an arm's mean minus the first's, with an interval of so many standard errors."""
    number = len(first.sums)
    value = other.mean - first.mean
    error = standard_error(other.resampled() - first.resampled(), number)
    base = first.mean if base is None else base
    scale = 1 / base if base else 0.0
    return PairedDifference(
        mean=value,
        low=value - quantile * error,
        high=value + quantile * error,
        relative=value * scale,
        count=int(min(first.counts.sum(), other.counts.sum())),
        num_blocks=number,
        detectable=(quantile + NormalDist().inv_cdf(POWER)) * error * math.fabs(scale),
        base=base,
    )
