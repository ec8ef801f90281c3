"""Which points of a sweep are best: lowest in mean TTFT, then TPOT and E2E, each among the points that tie so far."""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from reports.figures.statistics import MAX_BLOCKS, standard_error, student_t
from reports.record.records import Floats
from reports.summary import PAIRED, SHARES, SMALLEST
from reports.sweep.points import Point, PointSeries
from reports.verdicts.differences import judged
from reports.verdicts.failures import Failures, are_too_many
from reports.verdicts.simultaneous import BlockParts, lowest


class Lowest(NamedTuple):
    """The points that are lowest in one metric."""

    metric: str
    names: list[str]
    values: list[float]


class BestPoints(NamedTuple):
    """The best points, and how they were found."""

    points: list[Point]
    steps: list[Lowest]


def series(table: dict[str, Floats], num_blocks: int) -> PointSeries:
    """Add up a point's values by shares of its requests, in the order of the workload, so that points can be paired.

    Args:
        table: a value per request of each metric, NaN where one is missing.
        num_blocks: the blocks of requests that count as independent.
    """
    sums, counts = {}, {}
    for name in PAIRED:
        known = ~np.isnan(table[name])
        place = np.arange(len(known)) * MAX_BLOCKS // max(len(known), 1)
        sums[name] = np.bincount(place, np.where(known, table[name], 0), MAX_BLOCKS).tolist()
        counts[name] = np.bincount(place, known, MAX_BLOCKS).tolist()
    quantiles = {name: _quantiles(table[name], num_blocks) for name in PAIRED}
    return PointSeries(len(table[PAIRED[0]]), num_blocks, sums, counts, quantiles)


def _quantiles(values: Floats, num_blocks: int) -> dict[str, list[float | None]]:
    blocks = [part[~np.isnan(part)] for part in np.array_split(values, num_blocks)]
    return {
        statistic: [float(np.quantile(block, share)) if len(block) else None for block in blocks]
        for statistic, share in SHARES.items()
        if share is not None
    }


def best_of(points: Sequence[Point], metrics: Sequence[str] = PAIRED) -> BestPoints:
    """Return the best of the points that are compared; without values to pair, the lowest in the first metric."""
    left, steps = compared(points), list[Lowest]()
    for metric in metrics:
        means = [getattr(point, metric).mean for point in left]
        known = [(point, mean) for point, mean in zip(left, means, strict=True) if mean is not None]
        if not known or (len(left) == 1 and steps):
            break
        known = [known[place] for place in _ties(known, metric)]
        left = [point for point, _ in known]
        steps.append(Lowest(metric, [point.name for point in left], [mean for _, mean in known]))
    return BestPoints(left if steps else [], steps)


def compared(points: Sequence[Point]) -> list[Point]:
    """Return the points whose times can be compared: no queue grew, and none failed clearly more requests than another."""
    is_failing = are_too_many(list(map(point_failures, points)))
    return [point for point, fails in zip(points, is_failing, strict=True) if point.is_stable and not fails]


def point_failures(point: Point) -> Failures:
    """Return how many requests of a point failed; folders of older versions do not say, so nothing is held against them."""
    if point.failed is None or point.requests is None:
        return Failures(0, 0)
    return Failures(point.failed, point.requests)


def interval_between(base: Point, other: Point, metric: str, statistic: str) -> tuple[float, float] | None:
    """Return the 95% interval of a figure's difference to that of another point (s); None if they cannot be paired.

    For percentiles, it is as wide as the differences between the blocks' own percentiles tell (batch quantiles).
    """
    first, second = base.series, other.series
    if not (isinstance(first, PointSeries) and isinstance(second, PointSeries)) or first.requests != second.requests:
        return None
    at, value = (getattr(getattr(point, metric), statistic) for point in (base, other))
    error = _error_between(first, second, metric, statistic)
    if at is None or value is None or error is None:
        return None
    half = student_t(min(first.num_blocks, second.num_blocks) - 1) * error
    return max(value - at - half, -at), value - at + half


def _error_between(first: PointSeries, second: PointSeries, metric: str, statistic: str) -> float | None:
    """Return the standard error of a difference."""
    number = min(first.num_blocks, second.num_blocks)
    if number < 2 or metric not in first.sums:
        return None
    if statistic == "mean":
        one, other = (_parts(each, metric, number) for each in (first, second))
        if not (one.counts.all() and other.counts.all()):
            return None
        return standard_error(other.resampled() - one.resampled(), number)
    own = [each.quantiles.get(metric, {}).get(statistic, []) for each in (first, second)]
    if any(len(each) < 2 or None in each for each in own):
        return None
    before, after = (np.array(each, float) for each in own)
    if len(before) == len(after):
        return float((after - before).std(ddof=1)) / math.sqrt(number)
    return math.hypot(*(float(each.std(ddof=1)) / math.sqrt(len(each)) for each in (before, after)))


LOADS = (
    *(
        "concurrency",
        "max_concurrency",
        "session_concurrency",
        "rate",
        "rate_scale",
        "rate_to",
        "rate_profile",
        "burstiness",
    ),
    *("arrival", "thin", "isl_scale", "osl_scale", "cap_isl", "max_requests", "start_s", "duration_s"),
)
"""Settings of what is sent, by their names: latencies at different ones say nothing about the deployment."""


def by_load(points: Sequence[Point]) -> list[list[Point]]:
    """Group points that are sent the same."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        load = {name: value for name, value in point.changes.items() if name.rpartition(".")[2] in LOADS}
        groups.setdefault(json.dumps(load, sort_keys=True), []).append(point)
    return list(groups.values())


def by_rest(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Group points that differ in their router mode only."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        rest = {name: value for name, value in point.changes.items() if name != "router_mode"}
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(point)
    return groups


def _ties(points: list[tuple[Point, float]], metric: str) -> list[int]:
    """Return the places of the points, given with their means, that tie for the lowest mean, the lowest first."""
    first = min(range(len(points)), key=lambda place: points[place][1])
    kept = [point.series for point, _ in points if isinstance(point.series, PointSeries)]
    if len(points) < 2 or len(kept) < len(points) or len({one.requests for one in kept}) > 1:
        return [first]  # their requests cannot be paired
    number = min(one.num_blocks for one in kept)
    parts = {str(place): _parts(one, metric, number) for place, one in enumerate(kept)}
    if number < 2 or not all(one.counts.all() for one in parts.values()):
        return [first]
    ties, _ = lowest(parts, partial(judged, floor_s=None, smallest=SMALLEST))
    return [int(place) for place in ties]


def _parts(one: PointSeries, metric: str, number: int) -> BlockParts:
    """Merge a point's parts into fewer blocks."""
    place = np.arange(MAX_BLOCKS) * number // MAX_BLOCKS
    sums, counts = (np.bincount(place, values[metric], number) for values in (one.sums, one.counts))
    return BlockParts(sums.astype(float), counts.astype(float))
