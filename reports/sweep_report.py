"""What a sweep found: one table, one report."""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from matplotlib import pyplot as plt

from foundation.files import replace_text
from foundation.settings import short
from reports import drawing, page
from reports.drawing import STYLE, Chart, Drawn, Panel, colour, logarithmic, mark, new
from reports.folder import ReportError
from reports.foreign import csv_cell
from reports.grid import Grid
from reports.metrics import FORMULAS, LABELS, TTST_FORMULA
from reports.points import Highest, Point, Sweep
from reports.split import LABELS as PARTS
from reports.tables import milliseconds, number, share, split_note

Manifest = dict[str, Any]
SCHEMA = "dynabench.sweep/1"
ONLY_WIDE = ["offered/s", "TTFT p99", "req/s", "tok/s", "imbalance", "goodput", "missed at"]
"""Columns that a narrow terminal leaves out."""


def write(
    out: Path, manifest: Manifest, rows: list[Point] | list[Highest], points: list[Point], *, is_complete: bool
) -> Sweep:
    """Write the table and report of a sweep into its folder; return what they say.

    Raises:
        ReportError: there is no room for them; the points are kept.
    """
    try:
        return _write(out, manifest, rows, points, is_complete=is_complete)
    except OSError as error:
        raise ReportError(
            f"{out}: the report cannot be written ({error.strerror or error}); the points are kept: make room and run "
            "the same command again"
        ) from error


def _write(
    out: Path, manifest: Manifest, rows: list[Point] | list[Highest], points: list[Point], *, is_complete: bool
) -> Sweep:
    is_search = bool(manifest["sweep"]["find"])
    table = _searched(cast(list[Highest], rows)) if is_search else _gridded(cast(list[Point], rows), manifest)
    if not is_complete:
        table["verdict"] += " The sweep was interrupted; run the same command again to go on."
    summary = Sweep(
        **table,
        only_wide=ONLY_WIDE,
        schema=SCHEMA,
        is_complete=is_complete,
        limits=manifest["limits"],
        points=rows,
        split=_split(rows),
    )
    groups = _grouped(points, manifest)
    with plt.rc_context(rc=STYLE):
        drawn: list[Drawn] = drawing.draw({name: _chart(name, groups) for name in CHARTS}, out / "charts")
    text = page.render(
        "sweep.html.jinja",
        drawn,
        title=manifest["title"],
        subtitle=manifest["subtitle"],
        step_times=manifest.get("step_times"),
        summary=summary,
        grids=[summary.split] if summary.split else [],
        arm_names=list(groups),
        formulas=FORMULAS | ({"ttst": TTST_FORMULA} if summary.split else {}),
        labels=LABELS,
        command=manifest["command"],
        settings=json.dumps(manifest, indent=2),
    )
    whole = {"experiment": manifest, "summary": msgspec.to_builtins(summary)}
    replace_text(out / "sweep.json", json.dumps(whole, indent=2) + "\n")
    replace_text(out / "report.html", text)
    replace_text(out / "table.csv", _csv(summary))
    return summary


Column = tuple[str, Callable[[Point], str]]
"""A column of the table: its head, and what it shows of a point."""


def _part(name: str, point: Point) -> str:
    """Show a part of the mean TTFT."""
    seconds = point.split.parts.get(name) if point.split else None
    return "-" if seconds is None else milliseconds(seconds)


OFFERED: Column = ("offered/s", lambda point: _hundredths(point.offered_per_s))
TTFT_P99: Column = ("TTFT p99", lambda point: milliseconds(point.ttft_sched.p99))
GOODPUT: Column = ("goodput", lambda point: _hundredths(point.goodput.goodput_per_s if point.goodput else None))
FIGURES: tuple[Column, ...] = (
    OFFERED,
    ("TTFT mean", lambda point: milliseconds(point.ttft_sched.mean)),
    ("TTFT p90", lambda point: milliseconds(point.ttft_sched.p90)),
    TTFT_P99,
    ("TPOT mean", lambda point: milliseconds(point.tpot.mean)),
    ("E2E mean", lambda point: milliseconds(point.e2e_sched.mean)),
    ("req/s", lambda point: _hundredths(point.throughput.requests_per_s)),
    ("tok/s", lambda point: number(point.throughput.output_tokens_per_s)),
    ("hits", lambda point: share(point.cache.hit_share)),
    ("imbalance", lambda point: _hundredths(point.imbalance.work_max_over_mean)),
)
WITH_LIMITS: tuple[Column, ...] = (GOODPUT, ("limits", lambda point: "missed" if point.missed else "met"))
WITHOUT_LIMITS: tuple[Column, ...] = (("stable", lambda point: "yes" if point.is_stable else "no"),)
SPLIT: tuple[Column, ...] = (
    *((label, partial(_part, name)) for name, label in PARTS.items()),
    ("TTFT from sent", lambda point: milliseconds(point.ttft.mean)),
    ("TTST mean", lambda point: milliseconds(point.ttst.mean)),
    ("prefilled by another", lambda point: share(point.split.apart if point.split else None)),
)
AT_HIGHEST: tuple[Column, ...] = (
    OFFERED,
    TTFT_P99,
    ("TPOT p99", lambda point: milliseconds(point.tpot.p99)),
    GOODPUT,
)


def _hundredths(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _gridded(points: list[Point], manifest: Manifest) -> dict[str, Any]:
    """Return the table of every combination."""
    names = dict.fromkeys(name for point in points for name in point.changes)
    axes = [name for name in names if len({str(point.changes.get(name)) for point in points}) > 1] or ["router_mode"]
    columns = (*FIGURES, *(WITH_LIMITS if manifest["limits"] else WITHOUT_LIMITS))
    return {
        "title": "Every combination",
        "columns": [*axes, *(head for head, _ in columns)],
        "num_axes": len(axes),
        "rows": [
            [*(short(point.changes.get(axis, "-")) for axis in axes), *(shown(point) for _, shown in columns)]
            for point in points
        ],
        "verdict": _best(points, axes),
    }


def _split(rows: list[Point] | list[Highest]) -> Grid | None:
    """Lay out where TTFT goes at each point; None where every worker does all."""
    named = [(row.name, row) if isinstance(row, Point) else (row.arm, row.point) for row in rows]
    if not any(point.is_apart for _, point in named if point):
        return None
    lines = [(name, [shown(point) if point else "-" for _, shown in SPLIT]) for name, point in named]
    note = split_note({name: point.split if point else None for name, point in named})
    return Grid("Where does TTFT go? (means in ms)", [head for head, _ in SPLIT], lines, note)


def _best(points: list[Point], axes: list[str]) -> str:
    """Say which mode was best how often, or where there is one only, which point."""
    num_grew = sum(not point.is_stable for point in points)
    text = f"{len(points)} point{'s' * (len(points) != 1)}, {num_grew} of them with a queue that grew."
    if "router_mode" in axes and len(axes) > 1:
        best = [_lowest(group, lambda point: point.e2e_sched.mean) for group in _by_rest(points).values()]
        wins = Counter(str(point.changes["router_mode"]) for point in best if point is not None)
        if wins:
            text += (
                f" Lowest mean E2E latency: {', '.join(f'{mode} in {count}' for mode, count in wins.most_common())}."
            )
    elif (lowest := _lowest(points, lambda point: point.ttft_sched.mean)) is not None:
        text += f" Lowest mean TTFT: {lowest.name} ({milliseconds(lowest.ttft_sched.mean)} ms)."
    return text


def _lowest(points: list[Point], of: Callable[[Point], float | None]) -> Point | None:
    """Return the stable point with the lowest of a figure; None where no stable one has it."""
    known = {place: value for place, point in enumerate(points) if point.is_stable and (value := of(point)) is not None}
    return points[min(known, key=known.__getitem__)] if known else None


def _searched(rows: list[Highest]) -> dict[str, Any]:
    """Return the table of a search."""
    name = rows[0].find if rows else ""
    axes = sorted({axis for row in rows for axis in row.changes}, key=lambda axis: axis != "router_mode")
    return {
        "title": f"Highest {name} that meets the limits",
        "columns": [*axes, f"highest {name}", "missed at", *(head for head, _ in AT_HIGHEST)],
        "num_axes": len(axes),
        "rows": [
            [
                *(short(row.changes.get(axis, "-")) for axis in axes),
                "none" if row.met is None else short(row.met),
                "-" if row.missed_at is None else short(row.missed_at),
                *("-" if row.point is None else shown(row.point) for _, shown in AT_HIGHEST),
            ]
            for row in rows
        ],
        "verdict": _highest(rows, name),
    }


def _highest(rows: list[Highest], name: str) -> str:
    """Say which combination meets the limits farthest."""
    known = sorted((row for row in rows if row.met is not None), key=lambda row: row.met or 0.0)
    if not known:
        return "Nothing meets the limits, not even at the lowest value tried (--low)."
    least, best = known[0], max(known, key=lambda row: row.met or 0.0)
    text = f"{best.arm} meets the limits up to {name} {short(best.met)}, the highest of {len(rows)}."
    if least is not best and best.met and least.met:
        text += f" {least.arm} meets them up to {short(least.met)} ({best.met / least.met - 1:+.0%} between the two)."
    return text


class Axes(NamedTuple):
    """What a chart of points shows on its axes."""

    title: str
    x_label: str
    y_label: str
    x: Callable[[Point], float | None]
    y: Callable[[Point], float | None]
    logarithmic: str
    """Which axis is: x or y."""


CHARTS = {
    "pareto": Axes(
        "Throughput against latency: up and left is better", "TTFT p90 (ms)", "output tokens/s",
        lambda point: _ms(point.ttft_sched.p90), lambda point: point.throughput.output_tokens_per_s, "x",
    ),
    "interactivity": Axes(
        "Throughput against interactivity: up and right is better", "tokens/s of a user (1 / mean TPOT)",
        "output tokens/s of a worker", lambda point: 1 / point.tpot.mean if point.tpot.mean else None,
        lambda point: _per_worker(point), "",
    ),
    "ttft_by_load": Axes(
        "Mean TTFT by load", "offered requests/s", "TTFT mean (ms)",
        lambda point: point.offered_per_s, lambda point: _ms(point.ttft_sched.mean), "y",
    ),
    "e2e_by_load": Axes(
        "Mean E2E latency by load", "offered requests/s", "E2E mean (ms)",
        lambda point: point.offered_per_s, lambda point: _ms(point.e2e_sched.mean), "y",
    ),
}  # fmt: skip


def _chart(name: str, groups: dict[str, list[Point]]) -> Chart:
    """Draw the points, a line per group; hollow ones had a queue that grew."""
    shown = CHARTS[name]
    figure, axes = new(shown.title, shown.x_label, shown.y_label)
    panel = Panel(axes)
    for place, (group, members) in enumerate(groups.items()):
        known = sorted(
            (x, y, point.is_stable)
            for point in members
            if (x := shown.x(point)) is not None and (y := shown.y(point)) is not None
        )
        if known:
            xs, ys, _ = zip(*known, strict=True)
            mark(axes.plot(xs, ys, "-" if len(xs) > 1 else "", color=colour(place), label=group, linewidth=1), place)
            panel.add(group, place, xs, ys)
        for is_stable, face in ((True, colour(place)), (False, "none")):
            spots = [(a, b) for a, b, settled in known if settled is is_stable]
            if spots:
                dots = axes.plot(
                    *zip(*spots, strict=True), "o", color=colour(place), markerfacecolor=face, markersize=4
                )
                mark(dots, place)
    if panel.series and shown.logarithmic == "x":
        axes.set_xscale("log")
        logarithmic(axes.xaxis)
    elif panel.series and shown.logarithmic == "y":
        axes.set_yscale("log")
        logarithmic(axes.yaxis)
    if len(groups) > 1 and panel.series:
        axes.legend(fontsize=8)
    title = f"{shown.title} (hollow: the queue grew)"
    return Chart(figure, title, "A point per combination, a line per router mode.", [panel])


def _grouped(points: list[Point], manifest: Manifest) -> dict[str, list[Point]]:
    """Group points into lines: by router mode, or where there is one only, all together."""
    groups: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.name):
        groups.setdefault(str(point.changes.get("router_mode", "all")), []).append(point)
    order = [mode for mode in manifest["experiment"]["router_mode"] if mode in groups]
    return {mode: groups[mode] for mode in [*order, *(mode for mode in groups if mode not in order)]}


def _by_rest(points: list[Point]) -> dict[str, list[Point]]:
    """Group points that differ in their router mode only."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        rest = {name: value for name, value in point.changes.items() if name != "router_mode"}
        groups.setdefault(json.dumps(rest, sort_keys=True), []).append(point)
    return groups


def _csv(summary: Sweep) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    lines = [summary.columns, *summary.rows]
    if summary.split is not None:
        others = [summary.split.columns, *(cells for _, cells in summary.split.rows)]
        lines = [line + cells for line, cells in zip(lines, others, strict=True)]
    writer.writerows([csv_cell(cell) for cell in line] for line in lines)
    return text.getvalue()


def _per_worker(point: Point) -> float | None:
    """Return the output tokens/s of a worker."""
    rate = point.throughput.output_tokens_per_s
    return None if rate is None else rate / point.workers


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
