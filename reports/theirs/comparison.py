"""Runs of several tools in one table: times from sending, which all of them have, and differences of two means."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from foundation.text import listed
from reports.figures.cells import milliseconds, number
from reports.figures.metrics import FORMULAS, LABELS, Statistics
from reports.foreign import markdown_cell
from reports.summary import SCHEMA, ArmSummary, Bound, Summary
from reports.tables.grid import Grid
from reports.theirs.measured import FROM_SENT, Measured

METRICS = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
KEY = ("mean", "p90", "p99")
OTHER_WORK = 0.1
"""Mean lengths that differ by more than this share are other work."""
NOT_PAIRED = "These are not the same requests, so nothing is paired: a difference is that of two means."
TITLE = "Runs compared"


class Change(NamedTuple):
    """The difference of two means relative to the first, with its 95% interval if both have one."""

    value: float
    interval: tuple[float, float] | None

    @property
    def is_noise(self) -> bool:
        """Whether the interval includes zero."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]


def summarize(found: Mapping[str, Measured]) -> Summary:
    """Return the figures of all runs, without paired differences and ranking."""
    arms = {name: measured.arm for name, measured in found.items()}
    return Summary(
        schema=SCHEMA,
        is_valid=not any(arm.notes for arm in arms.values()),
        verdict=" ".join(verdict(found)),
        baseline=next(iter(arms)),
        arms=arms,
        differences={},
        noise_floor={},
        limits=[],
        bound=Bound(None, {}),
        num_blocks=0,
        formulas={name: FORMULAS[name] for name in METRICS},
        is_complete=all(arm.is_complete for arm in arms.values()),
        is_stable=all(arm.stability.is_stable for arm in arms.values()),
    )


def grid(found: Mapping[str, Measured], *, is_whole: bool = True) -> Grid:
    """Return a table with a column per run; what is not known in any is left out."""
    runs, base = list(found.values()), bases(found)
    against = next(iter(found)) if len(set(base.values())) == 1 else "the first of its load"
    rows = [
        ("measured by", [run.tool for run in runs]),
        ("load", ["n/a" if run.load is None else str(run.load) for run in runs]),
        ("requests", [number(run.arm.requests) for run in runs]),
        ("failed requests", [number(run.arm.failed) for run in runs]),
        ("mean prompt (tokens)", [number(run.isl, 1) for run in runs]),
        ("mean answer (tokens)", [number(run.osl, 1) for run in runs]),
    ]
    for metric in METRICS:
        rows += [
            (f"{LABELS[metric]} {statistic} (ms)", [_cell(run.arm, metric, statistic) for run in runs])
            for statistic in (STATISTICS if is_whole else KEY)
        ]
        if metric in FROM_SENT and len(runs) > 1:
            rows.append((f"{LABELS[metric]} mean vs {against}", _changes(found, base, metric)))
    rates: dict[str, Callable[[ArmSummary], float | None]] = {
        "requests/s": lambda arm: arm.throughput.requests_per_s,
        "output tokens/s": lambda arm: arm.throughput.output_tokens_per_s,
    }
    rows += [(label, [number(of(run.arm), 2) for run in runs]) for label, of in rates.items()]
    known = [(label, cells) for label, cells in rows if any(cell not in ("n/a", "-") for cell in cells)]
    return Grid(
        TITLE, list(found), known, "Times in ms; n/a: not known, or too few samples; [95% interval]; ~: may be noise."
    )


def remarks(found: Mapping[str, Measured]) -> list[str]:
    """Say what is not known of each run, or means something else there."""
    lines: dict[str, list[str]] = {}
    for name, run in found.items():
        for text in (*run.arm.remarks, *run.lacks):
            lines.setdefault(text, []).append(name)
    return [
        f"{'each run' if len(names) == len(found) > 1 else listed(names)}: {text}." for text, names in lines.items()
    ]


def bases(found: Mapping[str, Measured]) -> dict[str, str]:
    """Return what each run but the first is compared with: the first that did such work at such a load, or the first."""
    first, *others = found
    names = list(found)
    return {
        name: next((one for one in names[:place] if not _other_work(found[one], found[name])), first)
        for place, name in enumerate(others, 1)
    }


def verdict(found: Mapping[str, Measured]) -> list[str]:
    """Say how the runs differ from those that they are compared with, as far as that can be said."""
    base = bases(found)
    if not base:
        return [f"Only {next(iter(found))} was read; give another file or results folder to compare it."]
    said, apart = [NOT_PAIRED], dict[str, list[str]]()
    for name, other in base.items():
        if what := _other_work(found[other], found[name]):
            apart.setdefault(what, []).append(name)
            continue
        changes = {metric: between(found[other], found[name], metric) for metric in ("ttft", "tpot")}
        said += [_sentence(metric, name, other, change) for metric, change in changes.items() if change]
    return said + [
        f"{listed(names)} had other {what} than {next(iter(found))}, so their times do not compare servers."
        for what, names in apart.items()
    ]


def between(first: Measured, other: Measured, metric: str) -> Change | None:
    """Return the difference of the means of a metric; None if one is not known, or the first is zero."""
    one, two = first.arm.metric(metric), other.arm.metric(metric)
    if not one.mean or two.mean is None:
        return None
    ends, others = _half(one), _half(two)
    interval = None
    if ends and others:
        low = two.mean - one.mean - math.hypot(others[0], ends[1])
        high = two.mean - one.mean + math.hypot(others[1], ends[0])
        interval = low / one.mean, high / one.mean
    return Change(two.mean / one.mean - 1, interval)


def markdown(found: Mapping[str, Measured]) -> str:
    """Return the table, the verdict and the remarks for a pull request."""
    lines = [markdown_cell(text) for text in verdict(found)]
    said = [f"- {markdown_cell(remark)}" for remark in remarks(found)]
    table = grid(found)
    return "\n".join(
        [f"### {TITLE}", "", " ".join(lines), "", *table.markdown(), "", *said, "", f"<sub>{table.note}</sub>"]
    )


def _half(figures: Statistics) -> tuple[float, float] | None:
    """Return how far the interval of a mean reaches below and above it; None without one."""
    interval = figures.intervals.mean if figures.intervals and figures.mean is not None else None
    return (
        None if interval is None or figures.mean is None else (figures.mean - interval[0], interval[1] - figures.mean)
    )


def _cell(arm: ArmSummary, metric: str, statistic: str) -> str:
    figures = arm.metric(metric)
    interval = figures.intervals.mean if statistic == "mean" and figures.intervals else None
    ends = f" [{milliseconds(interval[0])}, {milliseconds(interval[1])}]" if interval else ""
    return f"{milliseconds(figures.at(statistic))}{ends}"


def _changes(found: Mapping[str, Measured], base: Mapping[str, str], metric: str) -> list[str]:
    return ["-", *(_change(between(found[other], found[name], metric)) for name, other in base.items())]


def _change(change: Change | None) -> str:
    if change is None:
        return "n/a"
    if change.interval is None:
        return f"{change.value:+.1%}"
    low, high = change.interval
    return f"{change.value:+.1%} [{low * 100:+.1f}, {high * 100:+.1f}]{' ~' * change.is_noise}"


def _other_work(first: Measured, other: Measured) -> str:
    """Say what else differs; nothing if lengths and load are about equal, or not known."""
    pairs = {"prompts": (first.isl, other.isl), "answers": (first.osl, other.osl)}
    differ = [
        what
        for what, (one, two) in pairs.items()
        if one is not None and two is not None and abs(two - one) > OTHER_WORK * one
    ]
    is_other_load = first.load is not None and other.load is not None and first.load.is_other_than(other.load)
    return listed([*differ, *["load"] * is_other_load])


def _sentence(metric: str, name: str, base: str, change: Change) -> str:
    label = LABELS[metric]
    size = f"{abs(change.value):.1%} {'higher' if change.value > 0 else 'lower'}"
    if change.interval is None:
        return f"{label} of {name} is {size} than of {base}, but it is not known whether that is noise."
    ends = f"95% interval {change.interval[0]:+.1%} to {change.interval[1]:+.1%}"
    if change.is_noise:
        return f"{label} of {name} and {base} may be equal ({ends})."
    return f"{label} of {name} is {size} than of {base} ({ends})."
