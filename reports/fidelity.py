"""How close simulated runs come to real ones: errors of every figure, beside how far real runs differ among themselves."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from reports import metrics
from reports.conditions import Condition, read
from reports.records import Floats, Record

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Deviation:
    """One figure, measured and simulated."""

    metric: str
    statistic: str | None
    real: float
    """Mean over the real runs: seconds, a rate, a share or a count."""
    simulated: float
    error: float | None
    """Simulated against real, as a share of the real one; for shares, their difference; None where real is 0."""
    spread: float | None
    """The farthest that one real run is from their mean, in the units of `error`; None for a single run."""

    error_at_speed: float | None = None
    """The error once the simulated engine is as fast as the real one was in these very runs."""

    @property
    def name(self) -> str:
        """How thresholds call it."""
        return self.metric if self.statistic is None else f"{self.metric}.{self.statistic}"

    @property
    def is_within_spread(self) -> bool:
        """Whether real runs differ among themselves as much as the simulated one differs from them."""
        return self.error is not None and self.spread is not None and abs(self.error) <= self.spread


def parse(text: str) -> Condition:
    """Read a threshold such as `ttft.p90 > 5%` or `tpot > 3%` (every statistic).

    Raises:
        ValueError: it is not a threshold.
    """
    found, known = read(text), (*LATENCIES, *_SINGLE)
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
            f"fail_if {text!r} is not understood; expected METRIC > N% or METRIC.STATISTIC > N%, the metric one of "
            f"{', '.join(known)}, the statistic one of {', '.join(STATISTICS)}"
        )
    return found


def is_passed(threshold: Condition, deviation: Deviation) -> bool:
    """Tell whether a figure is off by more than a threshold, and by more than real runs differ among themselves."""
    if deviation.metric != threshold.metric or threshold.statistic not in (None, deviation.statistic):
        return False
    return deviation.error is not None and abs(deviation.error) > threshold.value and not deviation.is_within_spread


def deviations(real: Sequence[Record], simulated: Sequence[Record], at_speed: Sequence[Record] = ()) -> list[Deviation]:
    """Compare every figure that both have.

    Args:
        real: runs of an engine.
        simulated: runs with the step times that are to be judged.
        at_speed: runs with these times scaled to what the engine's own steps took in the real runs.
    """
    found = []
    for name, statistic, of in _figures():
        if all(of(run) is not None for run in (*real, *simulated)):
            measured = [of(run) for run in real]
            row = _deviation(name, statistic, measured, [of(run) for run in simulated])
            if at_speed:
                row = replace(
                    row, error_at_speed=_deviation(name, statistic, measured, [of(run) for run in at_speed]).error
                )
            found.append(row)
    return found


def distances(real: Sequence[Record], simulated: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Return how far the distributions of each latency lie apart.

    `ks` is the largest gap between the cumulative shares (0 to 1); `wasserstein` the mean distance by which values would have
    to be moved, as a share of the real mean.
    """
    found = {}
    for name in ("ttft", "tpot", "e2e"):
        a, b = (np.sort(np.concatenate([_values(run, name) for run in runs])) for runs in (real, simulated))
        if not len(a) or not len(b):
            continue
        points = np.concatenate([a, b])
        below = [np.searchsorted(values, points, side="right") / len(values) for values in (a, b)]
        shares = np.linspace(0, 1, 1001)
        moved = np.abs(np.quantile(a, shares) - np.quantile(b, shares)).mean()
        found[name] = {"ks": float(np.abs(below[0] - below[1]).max()), "wasserstein": float(moved / a.mean())}
    return found


def summary(
    pairs: dict[str, tuple[list[Record], list[Record]]],
    thresholds: Sequence[Condition],
    at_speed: dict[str, list[Record]] | None = None,
) -> dict[str, Any]:
    """Compare real and simulated runs of each arm; `at_speed` as for `deviations`.

    Returns:
        `arms`: for each, `deviations`, `distances` and the texts of the thresholds it fails; `best`: the arm with the
        lowest mean TTFT, TPOT and E2E, real and simulated, and whether each real run of it was better than all of the others.
    """
    arms = {}
    for arm, (real, simulated) in pairs.items():
        rows = deviations(real, simulated, (at_speed or {}).get(arm, ()))
        failed = [
            f"{row.name} is off by {row.error:+.1%} ({limit.text})"
            for limit in thresholds
            for row in rows
            if is_passed(limit, row)
        ]
        arms[arm] = {
            "deviations": [asdict(row) | {"name": row.name, "is_within_spread": row.is_within_spread} for row in rows],
            "distances": distances(real, simulated),
            "failed": failed,
        }
    return {"arms": arms, "best": _best(arms) if len(arms) > 1 else {}}


def _best(arms: dict[str, Any]) -> dict[str, dict[str, Any]]:
    best = {}
    for name in ("ttft.mean", "tpot.mean", "e2e.mean"):
        rows = {arm: row for arm, found in arms.items() for row in found["deviations"] if row["name"] == name}
        found = {side: min(rows, key=lambda arm: rows[arm][side]) for side in ("real", "simulated")}
        others = [row for arm, row in rows.items() if arm != found["real"]]
        best[name] = found | {"is_clear": all(_reaches(rows[found["real"]], 1) < _reaches(row, -1) for row in others)}
    return best


def _reaches(row: dict[str, Any], sign: int) -> float:
    """Return how high (or low) real runs came; a single one tells nothing of that."""
    return float(row["real"] * (1 + sign * (math.inf if row["spread"] is None else row["spread"])))


def _deviation(metric: str, statistic: str | None, real: list[Any], simulated: list[Any]) -> Deviation:
    base, value = float(np.mean(real)), float(np.mean(simulated))
    is_share = metric == "hit_share"
    scale = 1.0 if is_share else base
    error = None if not scale else float((value - base) / scale)
    spread = None if len(real) < 2 or not scale else float(max(abs(one - base) for one in real) / scale)
    return Deviation(metric, statistic, base, value, error, spread)


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
    values = metrics.per_request(run.measured.requests)[name]
    return values[~np.isnan(values)]


_SINGLE: dict[str, Callable[[Record], float | None]] = {
    "throughput": lambda run: metrics.throughput(run.measured).requests_per_s,
    "output_throughput": lambda run: metrics.throughput(run.measured).output_tokens_per_s,
    "hit_share": lambda run: metrics.cache(run.measured).hit_share,
    "preemptions": metrics.preemptions,
}
