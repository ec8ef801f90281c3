"""Gates: `ttft.p99 > 2s` fails arms beyond a limit, and `ttft.p90 > +5%` arms that much worse than the baseline.

Limits apply to every arm, the baseline too, and comparisons to all others. What cannot be judged fails by name.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foundation.text import instead_of
from reports.capacity import Answer
from reports.conditions import METRICS, Condition, read
from reports.outcomes import percent
from reports.points import AnyPoint, Found, Impossible, Point, Sweep
from reports.summary import NOISE_FLOOR, ArmSummary, Difference, Summary

State = Literal["passed", "failed", "undecided"]
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
class Kind:
    """What the gates of a command can be on."""

    example: str
    latencies: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ("mean", "p50", "p90", "p95", "p99", "max")
    single: tuple[str, ...] = ()
    compares: bool = True


RUNS = Kind("'ttft.p99 > 2s', 'ttft.p90 > +5%', 'throughput < -3%' or 'failed > 0'", (*METRICS,), single=(*SINGLE,))
POINTS = Kind(
    "'ttft.p99 > 2s', 'ttft.p90 > +5%', 'failed > 0' or, with --find, 'found < 2'",
    tuple(name for name in METRICS if name != "e2e_sent"),
    ("mean", "p50", "p90", "p99"),
    (*SINGLE, "found"),
)
PLANS = Kind("'gpus > 16' or 'cost > 40'", single=("gpus", "cost"), compares=False)


def parse(text: str, of: Kind = RUNS) -> Condition:
    """Parse a condition under which a command fails.

    Raises:
        ValueError: it is not such a condition.
    """
    found = read(text)
    if found is None or found.sign == "<=":
        raise ValueError(f"fail_if {text!r} is not understood; expected something like {of.example}")
    metric, known = found.metric, (*of.latencies, *of.single)
    if metric not in known:
        raise ValueError(f"fail_if {text!r}: {metric!r} is not a metric; {instead_of(metric, known)}")
    if problem := _problem(found, of):
        raise ValueError(f"fail_if {text!r}: {problem}")
    return found


def _problem(gate: Condition, of: Kind) -> str:
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


def refuse_idle(gates: Sequence[Condition], *, num_arms: int, has_limits: bool, finds: bool = False) -> None:
    """Refuse gates that could not be judged, before anything is run.

    Raises:
        ValueError: there is one.
    """
    for gate in gates:
        if is_comparison(gate) and num_arms < 2:
            raise ValueError(
                f"fail_if '{gate}' compares arms with the first, but there is only one; limit its value instead"
            )
        if gate.metric in WITH_LIMITS and not has_limits:
            raise ValueError(f"fail_if '{gate}' needs limits; set them with --slo or --slo-preset")
        if gate.metric == "found" and not finds:
            raise ValueError(f"fail_if '{gate}' is about what --find finds; use --find")


class Result(NamedTuple):
    """The result of a gate, or of another check, for an arm."""

    arm: str
    check: str
    state: State
    """Undecided: the 95% interval includes the limit, so that noise decides; the gate does not fail then."""
    text: str


class _Side(NamedTuple):
    """An arm as gates see it."""

    name: str
    value: Callable[[Condition], float | None]
    lacks: str = "too few requests?"
    """Why a value may be missing."""


Differ = Callable[[str, Condition], Difference | None]


def of_summary(summary: Summary, gates: Sequence[Condition], left_out: Sequence[str] = ()) -> list[Result]:
    """Judge the arms of a comparison; those that were left out fail."""
    if not summary.is_complete:
        return _interrupted(gates)
    sides = [_Side(name, _of_arm(arm)) for name, arm in summary.arms.items()]
    base = next(side for side in sides if side.name == summary.baseline)

    def difference(arm: str, gate: Condition) -> Difference | None:
        return summary.difference(arm, METRICS.get(gate.metric, ""), gate.statistic or "")

    found = []
    for gate in gates:
        others = [side for side in sides if side is not base and not side.name.endswith(NOISE_FLOOR)]
        found += [_judged(gate, side, base, difference) for side in (others if is_comparison(gate) else sides)]
        if is_comparison(gate) and not others:
            found.append(_failed(gate, base, "is the only arm, so there is nothing to compare it with"))
        found += [Result("", str(gate), "failed", f"{gate}: left out: {reason}") for reason in left_out]
    return found


def of_sweep(sweep: Sweep, gates: Sequence[Condition]) -> list[Result]:
    """Judge each point of a sweep, or each result of a search.

    They are compared with the first one or, if the table has several sweeps, with the same settings in the first.
    """
    if not sweep.is_complete:
        return _interrupted(gates)
    return [
        _failed(gate, side, "has no counterpart in the first sweep") if base is None else _judged(gate, side, base)
        for gate in gates
        for side, base in _pairs(sweep.points)
        if side is not base or not is_comparison(gate)
    ]


def of_plan(answer: Answer, gates: Sequence[Condition]) -> list[Result]:
    """Judge the layout that a plan recommends."""
    if not answer.is_complete:
        return _interrupted(gates)
    best = next((at for at in answer.loads[:1] if at.gpus is not None), None)
    values = {} if best is None else {"gpus": best.gpus, "cost": best.cost}
    side = _Side(
        "the plan" if best is None else best.layout, lambda gate: values.get(gate.metric), "no layout was found"
    )
    return [_judged(gate, side, side) for gate in gates]


def _interrupted(gates: Sequence[Condition]) -> list[Result]:
    """Let gates fail whose results are incomplete."""
    return [Result("", str(gate), "failed", f"{gate}: not judged, because it was interrupted") for gate in gates]


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


def _pairs(rows: list[AnyPoint] | list[Found]) -> Iterator[tuple[_Side, _Side | None]]:
    """Yield each row and the one that it is compared with."""
    sides = [_of_row(row) for row in rows]
    first: dict[str, _Side] = {}
    for row, side in zip(rows, sides, strict=True):
        sweep = row.changes.get("sweep")
        if sweep is None:
            yield side, sides[0]
            continue
        others = repr(sorted((name, value) for name, value in row.changes.items() if name != "sweep"))
        if sweep == rows[0].changes["sweep"]:
            first[others] = side
        yield side, first.get(others)


def _of_row(row: AnyPoint | Found) -> _Side:
    if isinstance(row, Impossible):
        return _Side(row.name, lambda _: None, f"impossible: {row.reason}")
    if isinstance(row, Found):
        point, found = row.point, row.met
        value = _of_point(point) if point is not None else lambda _: None
        return _Side(
            row.arm, lambda gate: found if gate.metric == "found" else value(gate), "no value meets the limits"
        )
    return _Side(row.name, _of_point(row) if isinstance(row, Point) else lambda _: None)


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


def _failed(gate: Condition, side: _Side, why: str) -> Result:
    return Result(side.name, str(gate), "failed", f"{gate}: {side.name} {why}")


def _judged(gate: Condition, side: _Side, base: _Side, difference: Differ = lambda *_: None) -> Result:
    value = side.value(gate)
    if value is None:
        return _failed(gate, side, f"has no such value ({side.lacks})")
    if is_comparison(gate):
        return _compared(gate, side, value, base, difference(side.name, gate))
    is_over = value > gate.value if gate.is_above else value < gate.value
    return Result(
        side.name, str(gate), "failed" if is_over else "passed", f"{gate}: {side.name} is at {_shown(gate, value)}"
    )


def _shown(gate: Condition, value: float) -> str:
    if math.isinf(value):
        return "infinity, because requests failed"
    return percent(value) if gate.unit == "%" else f"{value:.4g}{' s' if gate.unit else ''}"


def _compared(gate: Condition, side: _Side, value: float, base: _Side, difference: Difference | None) -> Result:
    """Judge a change against the baseline, which noise alone does not fail."""
    at = base.value(gate)
    if at is None:
        return _failed(gate, side, f"cannot be compared: {base.name} has no such value ({base.lacks})")
    if gate.unit == "%" and not at:
        return _failed(gate, side, f"cannot be compared in %: {base.name} is at 0")
    scale = {"%": 100 / (at or 1), "ms": 1000}.get(gate.unit, 1)
    unit = gate.unit if gate.unit in ("%", "") else f" {gate.unit}"
    form = "{:+.1f}".format if gate.unit == "%" else "{:+.4g}".format
    change = (value - at) * scale
    is_over = change > gate.number if gate.is_above else change < gate.number
    text = f"{gate}: {side.name} is at {form(change)}{unit}"
    if difference is None:
        return Result(side.name, str(gate), "failed" if is_over else "passed", text)
    low, high = difference.low * scale, difference.high * scale
    is_noise = difference.verdict == "inconclusive"
    noise = ", which may be noise" * (is_over and is_noise)
    text += f", 95% interval {form(low)} to {form(high)}{unit}{noise}"
    if is_over and not is_noise:
        return Result(side.name, str(gate), "failed", text)
    is_open = low <= gate.number <= high or is_over
    return Result(side.name, str(gate), "undecided" if is_open else "passed", text)
