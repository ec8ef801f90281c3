"""Which points of a sweep are best: lowest in mean TTFT, then TPOT and E2E, each among the points that tie so far."""

import json
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from reports.differences import judged
from reports.failures import Failures, are_too_many
from reports.points import Point, Series
from reports.records import Floats
from reports.simultaneous import Parts, lowest
from reports.statistics import MAX_BLOCKS
from reports.summary import PAIRED, SMALLEST


class Lowest(NamedTuple):
    """The points that are lowest in one metric."""

    metric: str
    names: list[str]
    values: list[float]


class Best(NamedTuple):
    """The best points, and how they were found."""

    points: list[Point]
    steps: list[Lowest]


def series(table: dict[str, Floats], num_blocks: int) -> Series:
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
    return Series(len(table[PAIRED[0]]), num_blocks, sums, counts)


def best_of(points: Sequence[Point], metrics: Sequence[str] = PAIRED) -> Best:
    """Return the best of the points that are compared; without values to pair, the lowest in the first metric."""
    left, steps = compared(points), list[Lowest]()
    for metric in metrics:
        known = {place: value for place, point in enumerate(left) if (value := _mean(point, metric)) is not None}
        if not known or (len(left) == 1 and steps):
            break
        order = _ties([left[place] for place in known], metric)
        left = [list(map(left.__getitem__, known))[place] for place in order]
        steps.append(Lowest(metric, [point.name for point in left], [_mean(point, metric) or 0.0 for point in left]))
    return Best(left if steps else [], steps)


def compared(points: Sequence[Point]) -> list[Point]:
    """Return the points whose times can be compared: no queue grew, and none failed clearly more requests than another."""
    is_failing = are_too_many(list(map(failures, points)))
    return [point for point, fails in zip(points, is_failing, strict=True) if point.is_stable and not fails]


def failures(point: Point) -> Failures:
    """Return how many requests of a point failed; older folders do not have it."""
    return Failures(point.failed or 0, point.requests or 0)


def by_rest(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Group points that differ in their router mode only."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        rest = {name: value for name, value in point.changes.items() if name != "router_mode"}
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(point)
    return groups


def _mean(point: Point, metric: str) -> float | None:
    value: float | None = getattr(point, metric).mean
    return value


def _ties(points: list[Point], metric: str) -> list[int]:
    """Return the places of the points that tie for the lowest mean, the lowest first."""
    first = min(range(len(points)), key=lambda place: _mean(points[place], metric) or 0.0)
    kept = [point.series for point in points if isinstance(point.series, Series)]
    if len(points) < 2 or len(kept) < len(points) or len({one.requests for one in kept}) > 1:
        return [first]  # their requests cannot be paired
    number = min(one.num_blocks for one in kept)
    parts = {str(place): _parts(one, metric, number) for place, one in enumerate(kept)}
    if number < 2 or not all(one.counts.all() for one in parts.values()):
        return [first]
    ties, _ = lowest(parts, partial(judged, floor_s=None, smallest=SMALLEST))
    return [int(place) for place in ties]


def _parts(one: Series, metric: str, number: int) -> Parts:
    """Merge a point's parts into fewer blocks."""
    place = np.arange(MAX_BLOCKS) * number // MAX_BLOCKS
    sums, counts = (np.bincount(place, values[metric], number) for values in (one.sums, one.counts))
    return Parts(sums.astype(float), counts.astype(float))
