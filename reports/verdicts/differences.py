"""How arms differ from the first, request by request, and whether that is more than noise."""

from dataclasses import asdict

from reports.figures.statistics import Blocks, PairedDifference, paired_difference
from reports.record.records import Floats
from reports.summary import NOISE_FLOOR, PAIRED, SHARES, Difference, Verdict

Table = dict[str, Floats]
"""A value per request of each metric, NaN where one is missing."""


def differences(
    baseline: Table,
    other: Table,
    blocks: Blocks,
    floor: dict[str, dict[str, float | None]],
    *,
    smallest: float,
    is_stable: bool,
) -> dict[str, dict[str, Difference | None]]:
    """Compare an arm with the first, by metric and statistic."""
    return {
        name: {
            statistic: None
            if pair is None
            else judged(pair, floor.get(name, {}).get(statistic), smallest=smallest, is_stable=is_stable)
            for statistic, share in SHARES.items()
            for pair in [paired_difference(baseline[name], other[name], blocks, share=share)]
        }
        for name in PAIRED
    }


def judged(
    difference: PairedDifference, floor_s: float | None, *, smallest: float, is_stable: bool = True
) -> Difference:
    """Add the verdict on a difference.

    Args:
        difference: the difference.
        floor_s: how far two equal runs differ (s), if that was measured.
        smallest: the relative difference below which two arms are equal in practice.
        is_stable: whether both arms kept up.
    """
    is_noise = difference.is_noise or (floor_s is not None and abs(difference.mean) <= floor_s)
    most = max(map(abs, difference.shares())) if is_noise else abs(difference.relative)
    word: Verdict = "better" if difference.mean < 0 else "worse"
    if not is_stable:
        word = "unstable"
    elif difference.is_exact or most < smallest:
        word = "equal"
    elif is_noise:
        word = "inconclusive"
    return Difference(**asdict(difference), verdict=word)


def noise_floor(first: str, tables: dict[str, Table], blocks: Blocks) -> dict[str, dict[str, float | None]]:
    """Return how much the first arm differs from its own repeat, per metric and statistic (s)."""
    again = tables.get(first + NOISE_FLOOR)
    if again is None:
        return {}
    pairs = {
        name: {
            statistic: paired_difference(tables[first][name], again[name], blocks, share=share)
            for statistic, share in SHARES.items()
        }
        for name in PAIRED
    }
    return {
        name: {statistic: None if pair is None else abs(pair.mean) for statistic, pair in statistics.items()}
        for name, statistics in pairs.items()
    }
