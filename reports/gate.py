"""Regression gates: `ttft.p90 > +5%` fails a comparison in which an arm is that much worse than the baseline."""

from collections.abc import Callable

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
    """Read a condition under which a comparison fails; in %, it is the change against the baseline.

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
        raise ValueError(f"fail_if {text!r}: {metric!r} is no metric; expected one of {', '.join([*METRICS, *SINGLE])}")
    if (metric in METRICS) != (found.statistic is not None):
        what = "needs a statistic, such as .mean or .p99" if metric in METRICS else "has one value, so no statistic"
        raise ValueError(f"fail_if {text!r}: {metric} {what}")
    if metric in METRICS and not found.unit:
        raise ValueError(f"fail_if {text!r}: the limit needs a unit: % (against the baseline), ms or s")
    return found


def failures(summary: Summary, gates: list[Condition]) -> list[str]:
    """Say which gates fail, for which arm and with which value; a value that is not known fails."""
    others = [arm for arm in summary.arms if arm != summary.baseline] or [summary.baseline]
    return [text for gate in gates for arm in others if (text := _failure(summary, gate, arm)) is not None]


def _failure(summary: Summary, gate: Condition, arm: str) -> str | None:
    value = _value(summary.arms[arm], gate)
    base = _value(summary.arms[summary.baseline], gate)
    if value is None or (gate.unit == "%" and not base):
        return f"{gate.text}: {arm} has no such value (too few requests?)"
    if gate.unit == "%":
        assert base is not None
        change = (value / base - 1) * 100
        is_over = change > gate.number if gate.is_above else change < gate.number
        difference = summary.difference(arm, METRICS.get(gate.metric, ""), gate.statistic or "")
        if not is_over or (difference is not None and difference.verdict == "inconclusive"):
            return None  # what is no more than noise fails nothing
        interval = ""
        if difference is not None:
            scale = difference.relative / difference.mean * 100 if difference.mean else 0.0
            interval = f", 95% interval {difference.low * scale:+.1f} to {difference.high * scale:+.1f}%"
        return f"{gate.text}: {arm} is at {change:+.1f}%{interval}"
    if (value > gate.value) if gate.is_above else (value < gate.value):
        return f"{gate.text}: {arm} is at {value:.4g}{' s' if gate.unit else ''}"
    return None


def _value(arm: ArmSummary, gate: Condition) -> float | None:
    if gate.metric in METRICS:
        return arm.metric(METRICS[gate.metric]).at(gate.statistic or "mean")
    return SINGLE[gate.metric](arm)
