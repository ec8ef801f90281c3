"""Regression gates: `ttft.p90 > +5%` fails a comparison in which an arm is that much worse than the baseline."""

import re
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

METRICS = {
    "ttft": "ttft_sched",
    "ttft_sent": "ttft",
    "tpot": "tpot",
    "itl": "itl",
    "e2e": "e2e_sched",
    "e2e_sent": "e2e",
}
SINGLE = {
    "throughput": ("throughput", "requests_per_s"),
    "output_throughput": ("throughput", "output_tokens_per_s"),
    "hit_share": ("cache", "hit_share"),
    "imbalance": ("imbalance", "work_max_over_mean"),
    "goodput": ("goodput", "goodput_per_s"),
    "attainment": ("goodput", "attainment"),
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
    if metric not in METRICS and metric not in SINGLE and metric != "failed":
        known = ", ".join([*METRICS, *SINGLE, "failed"])
        raise ValueError(f"fail_if {text!r}: {metric!r} is no metric; expected one of {known}")
    if (metric in METRICS) != (statistic is not None):
        what = "needs a statistic, such as .mean or .p99" if metric in METRICS else "has one value, so no statistic"
        raise ValueError(f"fail_if {text!r}: {metric} {what}")
    if metric in METRICS and unit is None:
        raise ValueError(f"fail_if {text!r}: the limit needs a unit: % (against the baseline), ms or s")
    return Gate(text.strip(), metric, statistic, sign == ">", float(number), unit or "")


def failures(summary: Json, gates: list[Gate]) -> list[str]:
    """Say which gates fail, for which arm and with which value; a value that is not known fails."""
    arms = summary["arms"]
    others = [arm for arm in arms if arm != summary["baseline"]] or [summary["baseline"]]
    return [text for gate in gates for arm in others if (text := _failure(summary, gate, arm)) is not None]


def _failure(summary: Json, gate: Gate, arm: str) -> str | None:
    value = _value(summary["arms"][arm], gate)
    base = _value(summary["arms"][summary["baseline"]], gate)
    if value is None or (gate.unit == "%" and not base):
        return f"{gate.text}: {arm} has no such value (too few requests?)"
    if gate.unit == "%":
        assert base is not None
        change = (value / base - 1) * 100
        is_over = change > gate.limit if gate.is_above else change < gate.limit
        difference = summary["differences"].get(arm, {}).get(METRICS.get(gate.metric, ""), {}).get(gate.statistic)
        if not is_over:
            return None
        if difference is not None and difference["verdict"] == "inconclusive":
            return None  # as much as this is noise
        interval = ""
        if difference is not None:
            scale = difference["relative"] / difference["mean"] * 100 if difference["mean"] else 0.0
            interval = f", 95 % interval {difference['low'] * scale:+.1f} to {difference['high'] * scale:+.1f} %"
        return f"{gate.text}: {arm} is at {change:+.1f} %{interval}"
    limit = gate.limit / 1000 if gate.unit == "ms" else gate.limit
    if (value > limit) if gate.is_above else (value < limit):
        return f"{gate.text}: {arm} is at {value:.4g}{' s' if gate.unit else ''}"
    return None


def _value(figures: Json, gate: Gate) -> float | None:
    if gate.metric == "failed":
        return float(figures["failed"])
    if gate.metric in METRICS:
        value = figures[METRICS[gate.metric]][gate.statistic]
    else:
        group, name = SINGLE[gate.metric]
        value = figures.get(group, {}).get(name)
    return None if value is None else float(value)
