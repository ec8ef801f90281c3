"""Whether limits are met, and by how much."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from reports.figures.conditions import METRICS, Condition
from reports.figures.metrics import LEAST_SAMPLES, Goodput, Statistics, TokenGaps, of_each
from reports.figures.statistics import TAIL, half_interval
from reports.record.records import Record

State = Literal["met", "missed", "unknown"]
SHARES: dict[str | None, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
"""The share of the requests, or gaps, that a limit on each statistic holds for."""

ROUNDING = 1e-9
"""How far a whole number may be off after a multiplication by a share."""


class Outcome(msgspec.Struct, frozen=True):
    """The result for one limit."""

    limit: str
    state: State
    """Unknown if there were too few requests."""
    value: float | None = None
    """The limited value (s; attainment: a share); None if it is unknown or infinite."""
    margin: float | None = None
    """How far the value is inside the limit, as a share of the limit; negative if outside."""
    reason: str = ""
    """Why there is no value."""
    is_share: bool = False
    interval: tuple[float, float] | None = None
    """The value's 95% interval: over repeats, or of a measured load's own sample; None if there is none."""
    is_open: bool = False
    """Whether the interval includes the limit, so that other repeats, or more time, could change the result."""

    @property
    def is_sure(self) -> bool:
        """Whether its interval is known and does not include the limit, or it is missed without any value."""
        if self.value is None:
            return self.state == "missed"
        return self.interval is not None and not self.is_open

    @property
    def headroom(self) -> float | None:
        """The margin made comparable: for a share of requests that is met, the part of the allowed misses that is unused."""
        if not self.is_share or self.value is None or not self.margin or self.margin < 0:
            return self.margin
        return 1 - (1 - self.value) / (1 - self.value / (1 + self.margin))

    def __str__(self) -> str:
        if self.margin is None:
            return f"{'not known' if self.state == 'unknown' else self.state}: {self.reason}"
        doubt = ", which includes the limit" if self.is_open else ""
        if self.is_share:  # its distance to the limit as a share of a share would be one more percentage
            return f"{self.state} with {self._shown()}{doubt}"
        return f"{self.state} by {percent(abs(self.margin))} ({self._shown()}{doubt})"

    def within(self, interval: tuple[float, float], limit: float) -> "Outcome":
        """Return it with the interval of its value, in the unit of the limit (s, or a share)."""
        low, high = interval
        return msgspec.structs.replace(
            self, interval=interval, is_open=low < limit <= high if self.is_share else low <= limit < high
        )

    def over_repeats(self, alone: "Sequence[Outcome]") -> "Outcome":
        """Return it with the interval of its value, from the results for the same limit in each repeat."""
        known = [(one.value, one.margin) for one in alone if one.value is not None and one.margin is not None]
        if self.value is None or self.margin is None or len(known) < max(len(alone), 2):
            return self
        half, of_margin = (half_interval(each) or 0.0 for each in zip(*known, strict=True))
        low, high = max(self.value - half, 0.0), self.value + half
        return msgspec.structs.replace(
            self, interval=(low, min(high, 1.0) if self.is_share else high), is_open=of_margin > abs(self.margin)
        )

    def _shown(self) -> str:
        assert self.value is not None
        form = "{:.2%}".format if self.is_share else format_ms
        unit = "" if self.is_share else " ms"
        if self.interval is None:
            return f"{form(self.value)}{unit}"
        low, high = map(form, self.interval)
        return f"{form(self.value)}{unit} [{low}, {high}]"


def format_ms(seconds: float) -> str:
    """Format a time in ms with four digits, or more for a large one, and without an exponent."""
    return f"{seconds * 1000:,.0f}" if seconds >= 1 else f"{seconds * 1000:.4g}"


def percent(share: float) -> str:
    """Format a share as a percentage with at least two digits, so that a narrow margin is not shown as zero; or as a multiple."""
    return f"{share * 100:.3g}%" if share < 1 else f"{share:.0%}" if share < 10 else f"{share:,.0f} times"


@dataclass(frozen=True, slots=True)
class Exceeding:
    """How many values exceed a limit; those of failed requests do."""

    number: int
    total: int

    @classmethod
    def of(cls, limit: Condition, runs: Sequence[Record]) -> "Exceeding":
        """Count them in all repeats."""
        if limit.metric == "itl":
            gaps = TokenGaps(np.concatenate([run.gaps for run in runs]))
            return cls(gaps.count - round(float(gaps.counts_below(np.array([limit.value]))[0])), gaps.count)
        values = np.concatenate([of_each(run.requests, METRICS[limit.metric]) for run in runs])
        failed = sum(int((~run.requests.succeeded).sum()) for run in runs)
        return cls(int((values > limit.value).sum()) + failed, int((~np.isnan(values)).sum()) + failed)

    def is_certain(self, share: float) -> bool:
        """Return whether fewer than one in 40 samples have so many, if this share of all is within the limit (exact)."""
        numbers = range(self.number)
        return 1 - math.fsum(math.exp(_log_binomial(number, self.total, 1 - share)) for number in numbers) < TAIL


def _log_binomial(number: int, total: int, chance: float) -> float:
    """Return the logarithm of the chance of exactly this many of a total."""
    ways = math.lgamma(total + 1) - math.lgamma(number + 1) - math.lgamma(total - number + 1)
    return ways + number * math.log(chance) + (total - number) * math.log(1 - chance)


def of_run(limit: Condition, statistics: Statistics, runs: Sequence[Record] = ()) -> Outcome:
    """Return whether a statistic of a run is within its limit, with and without failed requests.

    Args:
        limit: a limit on a run.
        statistics: the limited metric.
        runs: the runs; where there are too few values for a percentile, so many may exceed the limit that it is missed.
    """
    assert limit.statistic is not None
    value, adjusted = statistics.at(limit.statistic), statistics.with_failures(limit.statistic)
    if not statistics.count:
        return Outcome(str(limit), "missed", reason="no request has this metric")
    if value is None:
        if runs and (over := Exceeding.of(limit, runs)).is_certain(SHARES[limit.statistic]):
            unit = "gaps" if limit.metric == "itl" else "requests"
            reason = f"{over.number:,} of {over.total:,} {unit} exceed it, too many for a {limit.statistic} within it"
            return Outcome(str(limit), "missed", reason=reason)
        least = LEAST_SAMPLES[int(limit.statistic.removeprefix("p"))]
        return Outcome(
            str(limit), "unknown", reason=f"{statistics.count:,} samples; a {limit.statistic} needs {least:,}"
        )
    if adjusted is None:
        is_any = limit.statistic in ("mean", "max")
        reason = "requests failed, and each counts as infinite" if is_any else "too many requests failed"
        return Outcome(str(limit), "missed", reason=reason)
    worst = max(value, adjusted)
    return Outcome(str(limit), "met" if worst <= limit.value else "missed", value=worst, margin=1 - worst / limit.value)


def of_requests(limits: Iterable[Condition], goodput: Goodput, attainment: float) -> Outcome | None:
    """Return whether enough requests were within the per-request limits; None if there are none."""
    named = [str(limit) for limit in limits if limit.statistic is None]
    if not named:
        return None
    text = f"{' and '.join(named)} in {attainment * 100:.4g}%"
    reached = goodput.attainment or 0.0
    state: State = "met" if reached >= attainment else "missed"
    return Outcome(text, state, value=reached, margin=reached / attainment - 1, is_share=True)


def num_required(limit: Condition, count: int, attainment: float, *, are_infinite: bool = False) -> int:
    """Return how many of this many values must be within a limit for it to be met; of a mean, none need be.

    A percentile between two values is within a limit only if the smaller one is; if the others are infinite, as those
    of failed requests are, only if both are, and then a mean is only if all are.
    """
    if limit.statistic == "mean":
        return count if are_infinite else 0
    if limit.statistic is None:
        return math.ceil(attainment * count - ROUNDING)
    place = (count - 1) * SHARES[limit.statistic]
    return 1 + (math.ceil(place - ROUNDING) if are_infinite else math.floor(place + ROUNDING))


def state_of(outcomes: Iterable[Outcome]) -> State:
    """Return the state of several limits together: one missed limit decides."""
    states = {outcome.state for outcome in outcomes}
    return "missed" if "missed" in states else "unknown" if "unknown" in states else "met"


def binding(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the limit with the largest miss or the smallest margin; unmet ones without a value come first."""
    ranked = sorted(
        outcomes,
        key=lambda outcome: (
            ("missed", "unknown", "met").index(outcome.state),
            float("-inf") if outcome.headroom is None else outcome.headroom,
        ),
    )
    return ranked[0] if ranked else None


STEADY_QUEUE = "steady queue"
"""The limit that a run has in addition to those that are set."""


def steady_queue_told(rows: Iterable[Iterable[str]], way_out: str) -> list[str]:
    """Say what a steady queue is, and the way out, beside a table whose rows name it; empty if none does."""
    if not any(STEADY_QUEUE in cell for cells in rows for cell in cells):
        return []
    return [
        f"{STEADY_QUEUE}: requests arrived faster than they were answered, so more and more of them waited; {way_out}."
    ]


def subject(limit: str) -> str:
    """Return what a limit is on, without its values; per-request limits that count together have several metrics."""
    return " and ".join(part.partition(" <=")[0] for part in limit.split(" and "))


def outcomes_in_words(outcomes: Iterable[Outcome]) -> str:
    """Say of each limit whether it is met, and by how much."""
    return "; ".join(f"{outcome.limit} {outcome}" for outcome in outcomes)
