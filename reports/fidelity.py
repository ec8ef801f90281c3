"""How close simulated runs come to real ones: the error of every figure, next to how far real runs differ."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType, structs

from reports.figures import metrics
from reports.figures.conditions import Condition, read_condition
from reports.record.records import Floats, Record

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = ("ttft", "itl", "tpot", "e2e")


class Deviation(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, measured and simulated."""

    metric: str
    statistic: str | None
    real: float
    """Mean over the real runs: seconds, a rate, a share or a count."""
    simulated: float
    error: float | None
    """Simulated minus real, as a share of the real one; for shares, the difference; None if the real one is 0."""
    spread: float | None
    """The largest distance of a real run from their mean, in the unit of `error`; None for a single run."""
    error_at_speed: float | None = None
    """The error if the simulated engine is as fast as the real one was in these very runs."""
    name: str
    """Its name in thresholds."""
    is_within_spread: bool
    """Whether real runs differ from each other as much as the simulated one differs from them."""


class Distance(msgspec.Struct, frozen=True):
    """How far apart the distributions of a latency are."""

    ks: float
    """The largest gap between the cumulative shares (0 to 1)."""
    wasserstein: float
    """The mean distance by which values would have to be moved, as a share of the real mean."""


class Speed(msgspec.Struct, frozen=True):
    """How fast an engine was compared to its calibration, by the total time of the same batches."""

    prefill: float
    """For steps with prefill, which are compute-bound."""
    decode: float
    """For the other steps, which are memory-bound."""


@dataclass(frozen=True, slots=True)
class Runs:
    """What an arm is judged by."""

    real: list[Record]
    simulated: list[Record]
    """Runs with the step times that are judged."""
    at_speed: list[Record] = field(default_factory=list)
    """Runs with these times scaled to what the engine's own steps took in the real runs."""
    speed: Speed | UnsetType | None = UNSET
    """Speed of the real engine; None if it did not log its steps, unset for past runs."""


class ArmFidelity(msgspec.Struct, frozen=True):
    """How close the simulated runs of an arm come to its real ones."""

    deviations: list[Deviation]
    distances: dict[str, Distance]
    """Distances by latency."""
    failed: list[str]
    """The thresholds that it misses."""
    speed: Speed | UnsetType | None = UNSET
    """As in `Runs`."""


class BestArm(msgspec.Struct, frozen=True):
    """The arm with the lowest value of a figure."""

    real: str
    simulated: str
    is_clear: bool
    """Whether each real run of it was better than all of the others."""


class Fidelity(msgspec.Struct, frozen=True):
    """What experiment.json keeps of a comparison of real and simulated runs."""

    arms: dict[str, ArmFidelity]
    best: dict[str, BestArm]
    """The best arm by figure, for those of mean TTFT, TPOT and E2E that several arms have."""


def parse(text: str) -> Condition:
    """Read a threshold such as `ttft.p90 > 5%` or `tpot > 3%` (every statistic).

    Raises:
        ValueError: it is not a threshold.
    """
    found, known = read_condition(text), (*LATENCIES, *_SINGLE)
    if (
        found is None
        or not found.is_above
        or found.is_signed
        or found.unit != "%"
        or found.metric not in known
        or found.statistic not in (None, *STATISTICS)
        or (found.statistic and found.metric in _SINGLE)
    ):
        raise ValueError(
            f"fail_if {text!r} is not understood; expected METRIC > N% or METRIC.STATISTIC > N%, where METRIC is one of "
            f"{', '.join(known)} and STATISTIC is one of {', '.join(STATISTICS)}"
        )
    return found


def is_passed(threshold: Condition, deviation: Deviation) -> bool:
    """Return whether a figure is off by more than a threshold, and by more than real runs differ from each other."""
    if deviation.metric != threshold.metric or threshold.statistic not in (None, deviation.statistic):
        return False
    return deviation.error is not None and abs(deviation.error) > threshold.value and not deviation.is_within_spread


def summary(arms: dict[str, Runs], thresholds: Sequence[Condition]) -> Fidelity:
    """Compare the real and simulated runs of each arm."""
    found = {arm: _arm(runs, thresholds) for arm, runs in arms.items()}
    return Fidelity(found, _best(found))


def _arm(runs: Runs, thresholds: Sequence[Condition]) -> ArmFidelity:
    rows = deviations(runs.real, runs.simulated, runs.at_speed)
    failed = [
        f"{row.name} is off by {row.error:+.1%} ({limit.text})"
        for limit in thresholds
        for row in rows
        if is_passed(limit, row)
    ]
    return ArmFidelity(rows, distances(runs.real, runs.simulated), failed, runs.speed)


def deviations(real: Sequence[Record], simulated: Sequence[Record], at_speed: Sequence[Record] = ()) -> list[Deviation]:
    """Compare every figure that both have; the arguments are the fields of `Runs`."""
    found = []
    for name, statistic, of in _figures():
        if any(of(run) is None for run in (*real, *simulated)):
            continue
        measured = [of(run) for run in real]
        row = _deviation(name, statistic, measured, [of(run) for run in simulated])
        if at_speed:
            faster = _deviation(name, statistic, measured, [of(run) for run in at_speed])
            row = structs.replace(row, error_at_speed=faster.error)
        found.append(row)
    return found


def distances(real: Sequence[Record], simulated: Sequence[Record]) -> dict[str, Distance]:
    """Return how far apart the distributions of each latency are."""
    found = {}
    for name in ("ttft", "tpot", "e2e"):
        a, b = (np.sort(np.concatenate([_values(run, name) for run in runs])) for runs in (real, simulated))
        if not len(a) or not len(b):
            continue
        points = np.concatenate([a, b])
        below = [np.searchsorted(values, points, side="right") / len(values) for values in (a, b)]
        shares = np.linspace(0, 1, 1001)
        moved = np.abs(np.quantile(a, shares) - np.quantile(b, shares)).mean()
        found[name] = Distance(ks=float(np.abs(below[0] - below[1]).max()), wasserstein=float(moved / a.mean()))
    return found


def _best(arms: dict[str, ArmFidelity]) -> dict[str, BestArm]:
    best = {}
    for name in ("ttft.mean", "tpot.mean", "e2e.mean"):
        rows = {arm: row for arm, found in arms.items() for row in found.deviations if row.name == name}
        if len(rows) < 2:
            continue
        real = min(rows, key=lambda arm: rows[arm].real)
        simulated = min(rows, key=lambda arm: rows[arm].simulated)
        others = [row for arm, row in rows.items() if arm != real]
        is_clear = all(_reaches(rows[real], 1) < _reaches(row, -1) for row in others)
        best[name] = BestArm(real, simulated, is_clear)
    return best


def _reaches(row: Deviation, sign: int) -> float:
    """Return the highest (or lowest) of the real runs, unbounded if there is only one."""
    return row.real * (1 + sign * (math.inf if row.spread is None else row.spread))


def _deviation(metric: str, statistic: str | None, real: list[Any], simulated: list[Any]) -> Deviation:
    base, value = float(np.mean(real)), float(np.mean(simulated))
    scale = 1.0 if metric == "hit_share" else base
    error = None if not scale else (value - base) / scale
    spread = None if len(real) < 2 or not scale else float(max(abs(one - base) for one in real) / scale)
    return Deviation(
        metric=metric,
        statistic=statistic,
        real=base,
        simulated=value,
        error=error,
        spread=spread,
        name=metric if statistic is None else f"{metric}.{statistic}",
        is_within_spread=error is not None and spread is not None and abs(error) <= spread,
    )


def _figures() -> list[tuple[str, str | None, Callable[[Record], float | None]]]:
    latencies = [(name, statistic) for name in LATENCIES for statistic in STATISTICS]
    return [
        *((name, statistic, partial(_latency, name=name, statistic=statistic)) for name, statistic in latencies),
        *((name, None, of) for name, of in _SINGLE.items()),
    ]


def _latency(run: Record, *, name: str, statistic: str) -> float | None:
    if name == "itl":
        gaps = metrics.TokenGaps(run.gaps)
        if not len(run.gaps) or not gaps.count:
            return None
        return gaps.mean() if statistic == "mean" else gaps.quantiles([int(statistic[1:]) / 100])[0]
    values = _values(run, name)
    if not len(values):
        return None
    return float(values.mean() if statistic == "mean" else np.percentile(values, int(statistic[1:])))


def _values(run: Record, name: str) -> Floats:
    """Return a latency of every request that has one (s)."""
    values = metrics.of_each(run.measured.requests, name)
    return values[~np.isnan(values)]


_SINGLE: dict[str, Callable[[Record], float | None]] = {
    "throughput": lambda run: metrics.throughput(run.measured).requests_per_s,
    "output_throughput": lambda run: metrics.throughput(run.measured).output_tokens_per_s,
    "hit_share": lambda run: metrics.cache(run.measured).hit_share,
    "preemptions": metrics.preemptions,
}
