"""Regression gates: `ttft.p90 > +5%` fails a comparison in which an arm is that much worse than the baseline."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from reports.summary import ArmSummary, Summary

METRICS = {
    "ttft": "ttft_sched",
    "ttft_sent": "ttft",
    "tpot": "tpot",
    "itl": "itl",
    "e2e": "e2e_sched",
    "e2e_sent": "e2e",
}
SINGLE: dict[str, Callable[[ArmSummary], float | None]] = {
    "throughput": lambda arm: arm.throughput.requests_per_s,
    "output_throughput": lambda arm: arm.throughput.output_tokens_per_s,
    "hit_share": lambda arm: arm.cache.hit_share,
    "imbalance": lambda arm: arm.imbalance.work_max_over_mean,
    "goodput": lambda arm: arm.goodput.goodput_per_s if arm.goodput else None,
    "attainment": lambda arm: arm.goodput.attainment if arm.goodput else None,
    "failed": lambda arm: float(arm.failed),
}
_FORM = re.compile(r"\s*([a-z_0-9]+)(?:\.(mean|p50|p90|p95|p99|max))?\s*([<>])\s*([+-]?[0-9.]+)\s*(%|ms|s)?\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition under which a comparison fails."""

    text: str
    metric: str
    statistic: str | None
    is_above: bool
    limit: float
    unit: str
    """`%`: change against the baseline; `ms`, `s` or none: the arm's own value."""


def parse(text: str) -> Gate:
    """Read a condition.

    Raises:
        ValueError: it is none.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"fail_if {text!r} is not understood; expected something like 'ttft.p90 > +5%', 'throughput < -3%' or 'e2e.p99 > 8s'"
        )
    metric, statistic, sign, number, unit = match.groups()
    if metric not in METRICS and metric not in SINGLE:
        known = ", ".join([*METRICS, *SINGLE])
        raise ValueError(f"fail_if {text!r}: {metric!r} is no metric; expected one of {known}")
    if (metric in METRICS) != (statistic is not None):
        what = "needs a statistic, such as .mean or .p99" if metric in METRICS else "has one value, so no statistic"
        raise ValueError(f"fail_if {text!r}: {metric} {what}")
    if metric in METRICS and unit is None:
        raise ValueError(f"fail_if {text!r}: the limit needs a unit: % (against the baseline), ms or s")
    return Gate(text.strip(), metric, statistic, sign == ">", float(number), unit or "")


def failures(summary: Summary, gates: list[Gate]) -> list[str]:
    """Say which gates fail, for which arm and with which value; a value that is not known fails."""
    others = [arm for arm in summary.arms if arm != summary.baseline] or [summary.baseline]
    return [text for gate in gates for arm in others if (text := _failure(summary, gate, arm)) is not None]


def _failure(summary: Summary, gate: Gate, arm: str) -> str | None:
    value = _value(summary.arms[arm], gate)
    base = _value(summary.arms[summary.baseline], gate)
    if value is None or (gate.unit == "%" and not base):
        return f"{gate.text}: {arm} has no such value (too few requests?)"
    if gate.unit == "%":
        assert base is not None
        change = (value / base - 1) * 100
        is_over = change > gate.limit if gate.is_above else change < gate.limit
        difference = summary.difference(arm, METRICS.get(gate.metric, ""), gate.statistic or "")
        if not is_over or (difference is not None and difference.verdict == "inconclusive"):
            return None  # what is no more than noise fails nothing
        interval = ""
        if difference is not None:
            scale = difference.relative / difference.mean * 100 if difference.mean else 0.0
            interval = f", 95 % interval {difference.low * scale:+.1f} to {difference.high * scale:+.1f} %"
        return f"{gate.text}: {arm} is at {change:+.1f} %{interval}"
    limit = gate.limit / 1000 if gate.unit == "ms" else gate.limit
    if (value > limit) if gate.is_above else (value < limit):
        return f"{gate.text}: {arm} is at {value:.4g}{' s' if gate.unit else ''}"
    return None


def _value(arm: ArmSummary, gate: Gate) -> float | None:
    if gate.metric in METRICS:
        return arm.metric(METRICS[gate.metric]).at(gate.statistic or "mean")
    return SINGLE[gate.metric](arm)
