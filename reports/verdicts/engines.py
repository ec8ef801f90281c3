"""Which engine is faster, if that is decided: simulated times of each are off by as much as published ones say."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from foundation.text import listed
from reports.figures.outcomes import format_ms, percent

METRICS = {"ttft": "mean TTFT", "tpot": "mean TPOT"}


class EngineError(msgspec.Struct, frozen=True):
    """How far mean times of a simulated engine are known to be off, as shares of real ones; None: not known."""

    engine: str
    ttft: float | None = None
    tpot: float | None = None


class Mean(msgspec.Struct, frozen=True, order=True):
    """A simulated mean (s), and how far it is known to be off, as a share."""

    value: float
    engine: str
    error: float | None

    def __str__(self) -> str:
        off = "an unknown share" if self.error is None else percent(self.error)
        return f"{self.engine}'s {format_ms(self.value)} ms is off by {off}"

    def may_exceed(self, other: "Mean") -> bool:
        """Return whether it may really be more than a larger one, given their errors."""
        if self.error is None or other.error is None:
            return True
        return self.value * (1 + self.error) >= other.value * (1 - other.error)


def engine_errors(manifest: Mapping[str, Any]) -> dict[str, EngineError]:
    """Return the error of each arm's engine, if arms differ by engine, from an experiment's manifest."""
    return msgspec.convert(manifest.get("engine_errors", {}), dict[str, EngineError])


def between_engines(errors: Mapping[str, EngineError], means: Mapping[str, Mapping[str, float | None]]) -> str:
    """Say in which means the engines are too near each other for their errors; nothing if in none.

    Args:
        errors: of the engine of each arm; empty if all have the same engine.
        means: the means of each arm by metric (`METRICS`), in s; None if unknown.
    """
    open_ = [
        f"{label} ({'; '.join(map(str, near))})"
        for metric, label in METRICS.items()
        if len(near := _near(_best(metric, errors, means))) > 1
    ]
    return f"Which engine is faster is not decided in {listed(open_, 'or')}." if open_ else ""


def _best(
    metric: str, errors: Mapping[str, EngineError], means: Mapping[str, Mapping[str, float | None]]
) -> list[Mean]:
    """Return the lowest mean of each engine, lowest first."""
    found: dict[str, Mean] = {}
    for arm, error in errors.items():
        value = means.get(arm, {}).get(metric)
        if value is not None:
            mean = Mean(value, error.engine, getattr(error, metric))
            found[error.engine] = min(mean, found.get(error.engine, mean), key=lambda one: one.value)
    return sorted(found.values(), key=lambda one: one.value)


def _near(means: Sequence[Mean]) -> list[Mean]:
    """Return the lowest and those that may really be lower."""
    return [mean for mean in means if means[0].may_exceed(mean)]
