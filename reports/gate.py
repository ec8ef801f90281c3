"""Regression gates: `ttft.p90 > +5%` fails a comparison in which an arm is that much worse than the baseline."""

from collections.abc import Callable
from typing import NamedTuple

from foundation.text import instead_of
from reports.conditions import METRICS, Condition, read
from reports.summary import ArmSummary, Summary

SINGLE: dict[str, Callable[[ArmSummary], float | None]] = {
    "throughput": lambda arm: arm.throughput.requests_per_s,
    "output_throughput": lambda arm: arm.throughput.output_tokens_per_s,
    "hit_share": lambda arm: arm.cache.hit_share,
    "imbalance": lambda arm: arm.imbalance.work_max_over_mean,
    "goodput": lambda arm: arm.goodput.goodput_per_s if arm.goodput else None,
    "attainment": lambda arm: arm.goodput.attainment if arm.goodput else None,
    "failed": lambda arm: float(arm.failed),
}


def parse(text: str) -> Condition:
    """Parse a condition under which a comparison fails; a value in % is the change against the baseline.

    Raises:
        ValueError: it is not such a condition.
    """
    found = read(text)
    if found is None or found.sign == "<=":
        raise ValueError(
            f"fail_if {text!r} is not understood; expected something like 'ttft.p90 > +5%', 'throughput < -3%' or 'e2e.p99 > 8s'"
        )
    metric = found.metric
    if metric not in METRICS and metric not in SINGLE:
        raise ValueError(f"fail_if {text!r}: {metric!r} is not a metric; {instead_of(metric, [*METRICS, *SINGLE])}")
    if (metric in METRICS) != (found.statistic is not None):
        what = (
            "needs a statistic, such as .mean or .p99"
            if metric in METRICS
            else "has a single value, so it takes no statistic"
        )
        raise ValueError(f"fail_if {text!r}: {metric} {what}")
    if metric in METRICS and not found.unit:
        raise ValueError(f"fail_if {text!r}: the limit needs a unit: % (against the baseline), ms or s")
    return found


class Result(NamedTuple):
    """The result of a gate for an arm."""

    has_failed: bool
    text: str
    is_open: bool = False
    """Whether the 95% interval includes the limit, so that noise decides; the gate does not fail then."""

    @property
    def word(self) -> str:
        """The result in words."""
        return "failed" if self.has_failed else "undecided" if self.is_open else "passed"


def results(summary: Summary, gates: list[Condition]) -> list[Result]:
    """Return the result of each gate for each arm, with its value; an unknown value fails."""
    others = [arm for arm in summary.arms if arm != summary.baseline] or [summary.baseline]
    return [_result(summary, gate, arm) for gate in gates for arm in others]


def _result(summary: Summary, gate: Condition, arm: str) -> Result:
    value = _value(summary.arms[arm], gate)
    base = _value(summary.arms[summary.baseline], gate)
    if value is None or (gate.unit == "%" and not base):
        return Result(True, f"{gate.text}: {arm} has no such value (too few requests?)")
    if gate.unit != "%":
        has_failed = value > gate.value if gate.is_above else value < gate.value
        return Result(has_failed, f"{gate.text}: {arm} is at {value:.4g}{' s' if gate.unit else ''}")
    assert base is not None
    change = (value / base - 1) * 100
    is_over = change > gate.number if gate.is_above else change < gate.number
    text = f"{gate.text}: {arm} is at {change:+.1f}%"
    difference = summary.difference(arm, METRICS.get(gate.metric, ""), gate.statistic or "")
    if difference is None:
        return Result(is_over, text)
    low, high = difference.shares()
    is_noise = difference.verdict == "inconclusive"  # noise alone does not fail a gate
    has_failed, is_open = is_over and not is_noise, low * 100 <= gate.number <= high * 100 or (is_over and is_noise)
    noise = ", which may be noise" * (is_over and is_noise)
    return Result(has_failed, f"{text}, 95% interval {low * 100:+.1f} to {high * 100:+.1f}%{noise}", is_open)


def _value(arm: ArmSummary, gate: Condition) -> float | None:
    if gate.metric in METRICS:
        return arm.metric(METRICS[gate.metric]).at(gate.statistic or "mean")
    return SINGLE[gate.metric](arm)
