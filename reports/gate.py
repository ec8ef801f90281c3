"""Gates: `ttft.p99 > 2s` fails arms beyond a limit, and `ttft.p90 > +5%` arms that much worse than the baseline.

Limits apply to every arm, the baseline too, and comparisons to all others. What cannot be judged fails by name.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foundation.text import instead_of
from reports.capacity.answer import PlanAnswer
from reports.figures.conditions import METRICS, Condition, read_condition
from reports.figures.outcomes import percent
from reports.summary import NOISE_FLOOR, ArmSummary, Summary
from reports.sweep.best_point import interval_between, point_failures
from reports.sweep.points import AnyPoint, FoundLoad, Impossible, Point, SearchResult, Sweep
from reports.verdicts.failures import Failures
from reports.verdicts.gates import GateResult, GateState

SHARES = ("attainment", "hit_share", "failed")
"""Metrics that can be limited in %: a sign makes it a change against the baseline, as % always is of the others."""
WITH_LIMITS = ("attainment", "goodput")
SINGLE: dict[str, Callable[[ArmSummary | Point], float | None]] = {
    "throughput": lambda arm: arm.throughput.requests_per_s,
    "output_throughput": lambda arm: arm.throughput.output_tokens_per_s,
    "hit_share": lambda arm: arm.cache.hit_share,
    "imbalance": lambda arm: arm.imbalance.work_max_over_mean,
    "goodput": lambda arm: arm.goodput.goodput_per_s if arm.goodput else None,
    "attainment": lambda arm: arm.goodput.attainment if arm.goodput else None,
    "failed": lambda arm: arm.failed,
}


@dataclass(frozen=True, slots=True)
class GateKind:
    """What the gates of a command can be on."""

    example: str
    latencies: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ("mean", "p50", "p90", "p95", "p99", "max")
    single: tuple[str, ...] = ()
    compares: bool = True
    latencies_by: str = ""
    """What limits latencies, if gates do not."""


RUNS = GateKind("'ttft.p99 > 2s', 'ttft.p90 > +5%', 'throughput < -3%' or 'failed > 0'", (*METRICS,), single=(*SINGLE,))
POINTS = GateKind(
    "'ttft.p99 > 2s', 'ttft.p90 > +5%', 'failed > 0' or, with --find, 'found < 2'",
    tuple(name for name in METRICS if name != "e2e_sent"),
    ("mean", "p50", "p90", "p99"),
    (*SINGLE, "found"),
)
PLANS = GateKind(
    "'gpus > 16' or 'cost > 40'",
    single=("gpus", "cost"),
    compares=False,
    latencies_by="a plan is only made of layouts within the limits on latencies; set them with --slo",
)


def parse_gate(text: str, of: GateKind = RUNS) -> Condition:
    """Parse a condition under which a command fails.

    Raises:
        ValueError: it is not such a condition.
    """
    found = read_condition(text)
    if found is None or found.sign == "<=":
        raise ValueError(f"fail_if {text!r} is not understood; expected something like {of.example}")
    metric, known = found.metric, (*of.latencies, *of.single)
    if metric in METRICS and of.latencies_by:
        raise ValueError(f"fail_if {text!r}: {of.latencies_by}")
    if metric not in known:
        raise ValueError(f"fail_if {text!r}: {metric!r} is not a metric; {instead_of(metric, known)}")
    if problem := _problem(found, of):
        raise ValueError(f"fail_if {text!r}: {problem}")
    return found


def _problem(gate: Condition, of: GateKind) -> str:
    """Say what is wrong with the statistic or the unit of a condition; nothing if they fit the metric."""
    if is_comparison(gate) and not of.compares:
        return "there is no baseline to compare with; expected a limit without a sign or %"
    if gate.metric in of.single:
        if gate.statistic is not None:
            return f"{gate.metric} has a single value, so it takes no statistic"
        return f"{gate.metric} is not a time; expected a number or %" if gate.unit in ("ms", "s") else ""
    if gate.statistic is None:
        return f"{gate.metric} needs a statistic, such as .mean or .p99"
    if gate.statistic not in of.statistics:
        return f"{gate.statistic} is not kept; expected one of {', '.join(of.statistics)}"
    return "" if gate.unit else "the limit needs a unit: % (against the baseline), ms or s"


def is_comparison(gate: Condition) -> bool:
    """Return whether it is about the change against the baseline."""
    return gate.is_signed or (gate.unit == "%" and gate.metric not in SHARES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What there is for gates to judge."""

    num_arms: int
    has_limits: bool
    finds: bool = False
    left_out: Sequence[str] = ()
    is_complete: bool = True

    def lacks(self, gate: Condition) -> str:
        """Say why a gate cannot be judged; nothing if it can."""
        if is_comparison(gate) and self.num_arms < 2:
            return "compares with the first, but there is only one; limit its value instead"
        if gate.metric in WITH_LIMITS and not self.has_limits:
            return "needs runs with limits; set them with --slo or --slo-preset"
        if gate.metric == "found" and not self.finds:
            return "is about what --find finds, or a benchmark with --slo; use one of them"
        return ""


def refuse_idle(gates: Sequence[Condition], basis: Basis) -> None:
    """Refuse gates that could not be judged, before anything is run.

    Raises:
        ValueError: there is one.
    """
    for gate in gates:
        if why := basis.lacks(gate):
            raise ValueError(f"fail_if '{gate}' {why}")


class _Side(NamedTuple):
    """An arm as gates see it."""

    name: str
    value: Callable[[Condition], float | None]
    lacks: str = "too few requests?"
    """Why a value may be missing."""
    point: Point | None = None
    """Of a sweep."""
    is_stable: bool = True
    """Whether no queue grew."""
    failures: Failures = Failures(0, 0)


class _Change(NamedTuple):
    """A difference between two arms, with its 95% interval, over the same requests."""

    base: float
    mean: float
    low: float
    high: float


def of_summary(summary: Summary, gates: Sequence[Condition], left_out: Sequence[str] = ()) -> list[GateResult]:
    """Judge the arms of a comparison; those that were left out fail."""
    sides = [
        _Side(name, _of_arm(arm), is_stable=arm.stability.is_stable, failures=Failures(arm.failed, arm.requests))
        for name, arm in summary.arms.items()
    ]
    base = next(side for side in sides if side.name == summary.baseline)
    others = [side for side in sides if side is not base and not side.name.endswith(NOISE_FLOOR)]

    def judge(gate: Condition) -> list[GateResult]:
        if not is_comparison(gate):
            return [_limited(gate, side) for side in sides]
        return [_compared(gate, side, base, _paired(summary, side.name, gate)) for side in others]

    basis = Basis(
        num_arms=1 + len(others), has_limits=bool(summary.limits), left_out=left_out, is_complete=summary.is_complete
    )
    return _all_judged(gates, basis, judge)


def of_sweep(sweep: Sweep, gates: Sequence[Condition], left_out: Sequence[str] = ()) -> list[GateResult]:
    """Judge each point of a sweep, or each result of a search; those that were left out fail.

    They are compared with the first one or, if the table has several sweeps, with the same settings in the first.
    """
    rows = [(row.changes, _of_row(row)) for row in sweep.points]
    found = list(map(_of_found, sweep.found))

    def judge(gate: Condition) -> list[GateResult]:
        if gate.metric == "found" and found:
            return [_limited(gate, side) for side in found]
        return list(_rows_compared(gate, rows)) if is_comparison(gate) else [_limited(gate, side) for _, side in rows]

    basis = Basis(
        num_arms=len(rows),
        has_limits=bool(sweep.limits),
        finds=bool(found) or any(isinstance(row, SearchResult) for row in sweep.points),
        left_out=left_out,
        is_complete=sweep.is_complete,
    )
    return _all_judged(gates, basis, judge)


def of_plan(answer: PlanAnswer, gates: Sequence[Condition]) -> list[GateResult]:
    """Judge the layout that a plan recommends."""
    best = next((at for at in answer.loads[:1] if at.gpus is not None), None)
    values = {} if best is None else {"gpus": best.gpus, "cost": best.cost}
    side = _Side(
        "the plan" if best is None else best.layout, lambda gate: values.get(gate.metric), "no layout was found"
    )
    basis = Basis(num_arms=1, has_limits=True, is_complete=answer.is_complete)
    return _all_judged(gates, basis, lambda gate: [_limited(gate, side)])


def _all_judged(
    gates: Sequence[Condition], basis: Basis, judge: Callable[[Condition], list[GateResult]]
) -> list[GateResult]:
    """Judge gates; each has at least one result, so that none passes because there was nothing to judge."""
    if not basis.is_complete:
        return [_not_judged(gate, "was interrupted") for gate in gates]
    found = []
    for gate in gates:
        why = basis.lacks(gate)
        found += [_not_judged(gate, why)] if why else judge(gate)
        found += [GateResult("", str(gate), "failed", f"{gate}: left out: {reason}") for reason in basis.left_out]
    return found


def _not_judged(gate: Condition, why: str) -> GateResult:
    return GateResult("", str(gate), "failed", f"{gate}: not judged, because it {why}")


def _of_arm(arm: ArmSummary) -> Callable[[Condition], float | None]:
    def value(gate: Condition) -> float | None:
        if gate.metric not in METRICS:
            return _share_of(gate, SINGLE[gate.metric](arm), arm.requests)
        figures, statistic = arm.metric(METRICS[gate.metric]), gate.statistic or "mean"
        return _worst(gate, figures.at(statistic), figures.with_failures(statistic))

    return value


def _worst(gate: Condition, known: float | None, with_failures: float | None) -> float | None:
    """Return a latency for a gate: for a limit, with failures counted as infinite."""
    if known is None or is_comparison(gate):
        return known
    return math.inf if with_failures is None else max(known, with_failures)


def _rows_compared(gate: Condition, rows: Sequence[tuple[dict[str, Any], _Side]]) -> Iterator[GateResult]:
    """Compare each row with the first, or that of the same settings in the first sweep; each must have a counterpart."""
    sweeps: dict[str | None, dict[str, _Side]] = {}
    for changes, side in rows:
        settings = repr(sorted((name, value) for name, value in changes.items() if name != "sweep"))
        sweeps.setdefault(changes.get("sweep"), {})[settings] = side
    (first, bases), *others = sweeps.items()
    if not others:
        base, *sides = bases.values()
        yield from (_compared(gate, side, base, _between(base, side, gate)) for side in sides)
    for name, its in others:
        for settings, side in its.items():
            before = bases.get(settings)
            yield (
                _compared(gate, side, before, _between(before, side, gate))
                if before
                else _failed(gate, side, f"has no counterpart in {first}")
            )
        missing = (base for settings, base in bases.items() if settings not in its)
        yield from (_failed(gate, base, f"has no counterpart in {name}") for base in missing)


def _between(base: _Side, side: _Side, gate: Condition) -> _Change | None:
    """Return the difference between two points, if they keep what its interval takes."""
    if base.point is None or side.point is None or gate.metric not in METRICS:
        return None
    interval = interval_between(base.point, side.point, METRICS[gate.metric], gate.statistic or "mean")
    at, value = base.value(gate), side.value(gate)
    return None if interval is None or at is None or value is None else _Change(at, value - at, *interval)


def _of_row(row: AnyPoint | SearchResult) -> _Side:
    if isinstance(row, Impossible):
        return _Side(row.name, lambda _: None, f"impossible: {row.reason}")
    if isinstance(row, SearchResult):
        point, found = row.point, row.met
        value = _of_point(point) if point is not None else lambda _: None
        return _Side(
            row.arm, lambda gate: found if gate.metric == "found" else value(gate), "no value meets the limits", point
        )
    if not isinstance(row, Point):
        return _Side(row.name, lambda _: None)
    return _Side(row.name, _of_point(row), point=row, is_stable=row.is_stable, failures=point_failures(row))


def _of_found(found: FoundLoad) -> _Side:
    return _Side(found.line or "the highest load within the limits", lambda _: found.load, "no load tried holds them")


def _of_point(point: Point) -> Callable[[Condition], float | None]:
    def value(gate: Condition) -> float | None:
        if gate.metric in SINGLE:
            return _share_of(gate, SINGLE[gate.metric](point), point.requests)
        name, statistic = METRICS[gate.metric], gate.statistic or "mean"
        known = getattr(point, name)
        return _worst(gate, *(getattr(each, statistic) for each in (known, point.with_failures.get(name, known))))

    return value


def _share_of(gate: Condition, value: float | None, requests: int | None) -> float | None:
    """Return failed requests as a share of all if a limit is one."""
    if gate.metric != "failed" or gate.unit != "%" or gate.is_signed:
        return value
    return value / requests if value is not None and requests else None


def _failed(gate: Condition, side: _Side, why: str) -> GateResult:
    return GateResult(side.name, str(gate), "failed", f"{gate}: {side.name} {why}")


def _not_comparable(one: _Side, other: _Side) -> str:
    """Say why the times of an arm mean nothing beside those of another; nothing if they can be compared."""
    if not one.is_stable:
        return f"{one.name} could not keep up, so its times measure the length of the run; compare at less load"
    if one.failures.are_more(other.failures):
        return f"{one.failures} requests failed in {one.name}, so its times are those of the rest"
    return ""


def _limited(gate: Condition, side: _Side) -> GateResult:
    """Judge a value."""
    value = side.value(gate)
    if value is None:
        return _failed(gate, side, f"has no such value ({side.lacks})")
    is_over = value > gate.value if gate.is_above else value < gate.value
    text = f"{gate}: {side.name} is at {_shown(gate, value)}"
    return GateResult(side.name, str(gate), "failed" if is_over else "passed", text)


def _shown(gate: Condition, value: float) -> str:
    if math.isinf(value):
        return "infinity, because requests failed"
    return percent(value) if gate.unit == "%" else f"{value:.4g}{' s' if gate.unit else ''}"


def _compared(gate: Condition, side: _Side, base: _Side, pair: _Change | None = None) -> GateResult:
    """Judge a change against the baseline; without an interval, nothing is known of noise."""
    if gate.metric in METRICS and (why := _not_comparable(side, base) or _not_comparable(base, side)):
        return _failed(gate, side, f"cannot be compared: {why}")
    value, at = side.value(gate), base.value(gate)
    if value is None:
        return _failed(gate, side, f"has no such value ({side.lacks})")
    if at is None:
        return _failed(gate, side, f"cannot be compared: {base.name} has no such value ({base.lacks})")
    if pair is not None:
        at = pair.base
    if gate.unit == "%" and not at:
        return _failed(gate, side, f"cannot be compared in %: {base.name} is at 0")
    scale = 100 / at if gate.unit == "%" else 1000 if gate.unit == "ms" else 1
    unit = gate.unit if gate.unit in ("%", "") else f" {gate.unit}"
    form = "{:+.1f}".format if gate.unit == "%" else "{:+.4g}".format
    change = (value - at if pair is None else pair.mean) * scale
    is_over = change > gate.number if gate.is_above else change < gate.number
    text = f"{gate}: {side.name} is at {form(change)}{unit}"
    state: GateState = "failed" if is_over else "passed"
    if pair is not None:
        low, high = pair.low * scale, pair.high * scale
        text += f", 95% interval {form(low)} to {form(high)}{unit}"
        if low <= gate.number <= high and low < high and not (is_over and (low > 0 or high < 0)):
            state = "undecided"
            text += ", which may be noise" * is_over
    return GateResult(side.name, str(gate), state, text)


def _paired(summary: Summary, arm: str, gate: Condition) -> _Change | None:
    """Return a paired difference (s), its interval widened to how far two equal runs differ, if that is known."""
    metric, statistic = METRICS.get(gate.metric, ""), gate.statistic or ""
    difference = summary.difference(arm, metric, statistic)
    if difference is None:
        return None
    floor = summary.noise_floor.get(metric, {}).get(statistic) or 0.0
    low, high = min(difference.low, difference.mean - floor), max(difference.high, difference.mean + floor)
    return _Change(difference.base, difference.mean, low, high)
