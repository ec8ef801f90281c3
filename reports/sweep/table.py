"""The table of a sweep: a line for each combination, or for each search result, and its verdict in words."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import msgspec
from rich.table import Table

from foundation.settings import short_value
from reports.figures.cells import milliseconds, number, share
from reports.figures.fleet import hours
from reports.figures.outcomes import Outcome, binding, percent, steady_queue_told, subject
from reports.figures.slo import parse_slo
from reports.figures.split import LABELS as PARTS
from reports.foreign import csv_cell
from reports.sweep import curve
from reports.sweep.best_point import best_of, by_rest
from reports.sweep.points import AnyPoint, FoundLoad, Impossible, Point, SearchResult, Sweep, name_and_point
from reports.sweep.search_verdict import digits, is_by_gpus, search_verdict, value_shown
from reports.sweep.verdict import grid_verdict
from reports.tables import drafts as draft_table
from reports.tables import grid
from reports.tables import tiers as tier_table
from reports.tables.grid import Grid, GridColumn
from reports.tables.server import server_grid
from reports.tables.use import split_note
from reports.verdicts.engines import engine_errors

SCHEMA = "dynabench.sweep/2"

INTERRUPTED = "The sweep was interrupted; run the same command again to resume it."
BENCH_INTERRUPTED = "The benchmark was interrupted; the same command with --out {} goes on with the next load."
Rows = list[AnyPoint] | list[SearchResult]
Figure = tuple[str, Callable[[Point], str]]
"""A column of the table: its head, and what it shows of a point."""


def lay_out(rows: Rows, manifest: dict[str, Any], *, is_complete: bool) -> Sweep:
    """Make the table of a sweep, and say what it found."""
    is_search = bool(manifest["sweep"]["find"])
    limited = _limited(manifest["limits"])
    made = (
        _searched(cast(list[SearchResult], rows), limited)
        if is_search
        else _gridded(cast(Any, rows), limited, manifest)
    )
    if any("~" in cell for row in made["rows"] for cell in row):
        made["verdict"] += (
            f" ~: the 95% interval includes the limit, so more {'time' if _is_bench(manifest) else 'repeats'} could change the result."
        )
    way_out = "use more workers, or a lower rate (--rate-scale)"  # no row of a benchmark names this limit
    made["verdict"] = " ".join(filter(None, [made["verdict"], *steady_queue_told(made["rows"], way_out)]))
    if untried := manifest["sweep"].get("untried"):
        made["verdict"] += f" There was no time left for {', '.join(untried)} (--within-s)."
    if not is_complete:
        known = made["verdict"] or "No point is finished yet."
        sweeps = ", ".join(manifest.get("interrupted", ()))
        resumed = BENCH_INTERRUPTED.format(manifest["experiment"]["out"]) if _is_bench(manifest) else INTERRUPTED
        made["verdict"] = f"{known} {f'{sweeps}: interrupted, so incomplete.' if sweeps else resumed}"
    return Sweep(
        **made,
        schema=SCHEMA,
        is_complete=is_complete,
        limits=manifest["limits"],
        points=rows,
        split=_split(rows),
        tiers=tier_table.swept(_points(rows), _axes(rows)),
        drafts=draft_table.swept_drafts(_points(rows)),
        gains=draft_table.swept_gains(_points(rows)),
        found=_found(rows, manifest),
        server=server_grid({name: point.server or None for name, point in _points(rows).items()}, is_whole=False),
    )


def _found(rows: Rows, manifest: dict[str, Any]) -> list[FoundLoad]:
    """Return the highest load within the limits on each measured curve."""
    if not (_is_bench(manifest) and manifest["limits"]):
        return []
    points = [row for row in rows if isinstance(row, Point)]
    return [each.found for each in curve.curves(points, axis=manifest["sweep"]["axis"])]


def _is_bench(manifest: dict[str, Any]) -> bool:
    """Return whether loads were measured, instead of settings simulated."""
    return manifest.get("kind") == "bench"


def _points(rows: Rows) -> dict[str, Point]:
    """Return the points of the table by the names of its lines."""
    return {name: point for name, point in map(name_and_point, rows) if point}


def _axes(rows: Rows) -> list[str]:
    """Return the settings in which lines differ."""
    names = dict.fromkeys(name for row in rows for name in row.changes)
    return [name for name in names if len({str(row.changes.get(name)) for row in rows}) > 1]


def _part(name: str, point: Point) -> str:
    """Format a part of the mean TTFT."""
    seconds = point.split.parts.get(name) if point.split else None
    return "-" if seconds is None else milliseconds(seconds)


def _hundredths(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


OFFERED: Figure = ("offered/s", lambda point: _hundredths(point.offered_per_s))
TTFT_P99: Figure = ("TTFT p99", lambda point: milliseconds(point.ttft_sched.p99))
GOODPUT: Figure = ("goodput", lambda point: _hundredths(point.goodput.goodput_per_s if point.goodput else None))
FIGURES: tuple[Figure, ...] = (
    ("TTFT mean", lambda point: milliseconds(point.ttft_sched.mean)),
    TTFT_P99,
    ("TPOT mean", lambda point: milliseconds(point.tpot.mean)),
    ("req/s", lambda point: _hundredths(point.throughput.requests_per_s)),
    ("hits", lambda point: share(point.cache.hit_share)),
    ("TTFT p90", lambda point: milliseconds(point.ttft_sched.p90)),
    ("E2E mean", lambda point: milliseconds(point.e2e_sched.mean)),
    ("tok/s", lambda point: number(point.throughput.output_tokens_per_s)),
    ("imbalance", lambda point: _hundredths(point.imbalance.work_max_over_mean)),
    OFFERED,
)
"""The most important come first, because a narrow terminal shows only those that fit."""
OF_CURVES: tuple[Figure, ...] = (
    ("tok/s", lambda point: number(curve.tokens_per_s(point) or None)),
    ("TTFT p50", lambda point: milliseconds(point.ttft_sched.p50)),
    ("TTFT p95", lambda point: milliseconds(point.ttft_sched.p95)),
    ("ITL p50", lambda point: milliseconds(point.itl.p50)),
    ("ITL p95", lambda point: milliseconds(point.itl.p95)),
    ("tok/s/user", lambda point: number(1 / point.tpot.mean if point.tpot.mean else None)),
    ("req/s", lambda point: _hundredths(curve.requests_per_s(point))),
    ("failed", lambda point: number(point.failed)),
    ("requests", lambda point: f"{point.requests or 0:,}"),
    TTFT_P99,
    ("ITL p99", lambda point: milliseconds(point.itl.p99)),
    ("E2E mean", lambda point: milliseconds(point.e2e_sched.mean)),
    ("E2E p95", lambda point: milliseconds(point.e2e_sched.p95)),
    ("hits", lambda point: share(point.cache.hit_share)),
    ("offered/s", lambda point: _hundredths(point.offered_per_s)),
)
"""The same for endpoints of others at several loads."""
OF_WHOLE: tuple[Figure, ...] = (
    OF_CURVES[0],
    ("E2E p50", lambda point: milliseconds(point.e2e_sched.p50)),
    ("E2E p95", lambda point: milliseconds(point.e2e_sched.p95)),
    *(
        figure
        for figure in OF_CURVES[1:]
        if figure[0] in ("req/s", "failed", "requests", "E2E mean", "hits", "offered/s")
    ),
)
"""The same if no answer came token by token, so none has a TTFT."""
VALID: Figure = ("valid", lambda point: "no" if point.notes else "yes")
"""Only if a load is not valid."""
FLEET: tuple[Figure, ...] = (
    ("within limits", lambda point: share(point.goodput.attainment if point.goodput else None)),
    ("GPU-hours", lambda point: hours(point.fleet.gpu_h) if point.fleet else "n/a"),
    ("good/GPU-h", lambda point: number(point.fleet.good_per_gpu_h if point.fleet else None)),
    ("mean workers", lambda point: f"{point.fleet.mean_workers:.1f}" if point.fleet else "n/a"),
)
"""Only if the number of workers changed, or a planner was running."""
WITHOUT_LIMITS: tuple[Figure, ...] = (("stable", lambda point: "yes" if point.is_stable else "no"),)
SPLIT: tuple[Figure, ...] = (
    *((label, partial(_part, name)) for name, label in PARTS.items()),
    ("TTFT from sent", lambda point: milliseconds(point.ttft.mean)),
    ("TTST mean", lambda point: milliseconds(point.ttst.mean)),
    ("prefilled by another", lambda point: share(point.split.apart if point.split else None)),
)
AT_FOUND: tuple[Figure, ...] = (
    OFFERED,
    TTFT_P99,
    ("TPOT p99", lambda point: milliseconds(point.tpot.p99)),
    GOODPUT,
)


def _limited(limits: Sequence[str]) -> list[Figure]:
    """Return a column for each statistic that is limited."""

    def value(limit: str, point: Point) -> str:
        return next((_with_interval(one) for one in point.outcomes if one.limit == limit), "n/a")

    read = {limit: parse_slo(limit) for limit in limits}
    return [
        (f"{found.metric.upper()} {found.statistic}", partial(value, limit))
        for limit, found in read.items()
        if found.statistic is not None
    ]


def _with_interval(outcome: Outcome) -> str:
    """Format the limited metric, with its interval if there are repeats that differ."""
    shown = milliseconds(outcome.value)
    if outcome.interval is None or outcome.interval[0] == outcome.interval[1]:
        return shown
    low, high = map(milliseconds, outcome.interval)
    return f"{shown} [{low}, {high}]"


def _without(columns: Sequence[Figure], others: Sequence[Figure]) -> list[Figure]:
    """Return columns without those that are already shown."""
    return [column for column in columns if column[0] not in dict(others)]


def _margin(row: AnyPoint) -> str:
    """Say whether a point meets the limits, and the margin to the nearest."""
    if isinstance(row, Impossible):
        return "impossible"
    nearest = binding(row.outcomes)
    if nearest is None:
        return "met"
    doubt = "~" * nearest.is_open
    if nearest.state == "met":
        return f"met by {percent(nearest.margin or 0.0)}{doubt}"
    name = subject(nearest.limit)
    if nearest.state == "unknown":
        return f"unknown: {name}"
    return f"missed: {name}" if nearest.margin is None else f"missed by {percent(-nearest.margin)}{doubt}: {name}"


def _held(row: AnyPoint) -> str:
    """Say whether a load holds the limits, whose figures have columns of their own."""
    return {"met": "hold", "missed": "missed", "unknown": "not known"}[row.state]


def _gridded(points: list[AnyPoint], limited: list[Figure], manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the table of every combination."""
    axes = _axes(points) or ["router_mode"]
    is_bench = _is_bench(manifest)
    if is_bench:
        axes = _axes(points) or [manifest["sweep"]["axis"]]
    possible = [point for point in points if isinstance(point, Point)]
    rest = _without(_of_loads(possible) if is_bench else FIGURES, limited)
    marks = [VALID] if is_bench and any(point.notes for point in possible) else []
    fleet = _fleet(possible, has_limits=bool(manifest["limits"]))
    columns = (
        [("limits", _held if is_bench else _margin), *marks, *fleet, *limited, *rest, GOODPUT]
        if manifest["limits"]
        else [*([] if is_bench else WITHOUT_LIMITS), *marks, *fleet, *rest]
    )
    return {
        "title": "Every load" if is_bench else "Every combination",
        "columns": [*axes, *(head for head, _ in columns)],
        "num_axes": len(axes),
        "rows": [
            [*(short_value(point.changes.get(axis, "-")) for axis in axes), *(_cells(point, columns))]
            for point in points
        ],
        "verdict": grid_verdict(
            possible,
            [point for point in points if isinstance(point, Impossible)],
            axes,
            has_limits=bool(manifest["limits"]),
            elsewhere=manifest.get("elsewhere", {}),
            engine_errors=engine_errors(manifest),
            load_axis=manifest["sweep"]["axis"] if is_bench else None,
        ),
        "best": _best(possible),
    }


def _of_loads(points: Sequence[Point]) -> list[Figure]:
    """Return the columns of measured loads: failures come first where there are any."""
    figures = OF_CURVES if curve.has_tokens(points) else OF_WHOLE
    has_failed = any(point.failed for point in points)
    return sorted(figures, key=lambda figure: not (has_failed and figure[0] == "failed"))


def _best(points: list[Point]) -> dict[str, list[str]]:
    """Return the best points by the settings other than the router mode."""
    met = [point for point in points if point.outcomes and point.state == "met"]
    groups = {rest: best_of(group).points for rest, group in by_rest(met or points).items()}
    return {rest: [point.name for point in group] for rest, group in groups.items() if group}


def _fleet(points: Sequence[Point], *, has_limits: bool) -> list[Figure]:
    """Return the columns on what a changing number of workers used; none if it never changed."""
    if not any(point.fleet and point.fleet.is_shown for point in points):
        return []
    return [figure for figure in FLEET if has_limits or figure[0] in ("GPU-hours", "mean workers")]


def _cells(row: AnyPoint | None, columns: Sequence[Figure]) -> list[str]:
    """Return the cells of a point, which may be impossible."""
    if isinstance(row, Point):
        return [shown(row) for _, shown in columns]
    said = "-" if row is None else "impossible"
    return [said if head in ("limits", "stable") else "-" for head, _ in columns]


def tables(summary: Sweep, width: int, *, is_whole: bool, colours: Sequence[str] = ()) -> Iterator[Table]:
    """Yield a sweep's table for a terminal: a line per combination, and as many columns as fit, or all in several tables.

    Each line has the colour that it has in the report, if colours are given.
    """
    columns = [
        GridColumn(head.replace("_", " "), [cells[place] for cells in summary.rows])
        for place, head in enumerate(summary.columns)
    ]
    axes, figures = columns[: summary.num_axes], columns[summary.num_axes :]
    found = list(grid.tables(summary.title, axes, figures, width, row_colours=colours)) if summary.rows else []
    if len(found) > 1 and not is_whole:
        found[0].caption = "More columns with --all-metrics, in the report and in table.csv."
        del found[1:]
    yield from found


def _split(rows: Rows) -> Grid | None:
    """Lay out where TTFT goes at each point; None if every worker does everything."""
    points = dict(map(name_and_point, rows))
    if not any(point.is_apart for point in points.values() if point):
        return None
    lines = [(name, [shown(point) if point else "-" for _, shown in SPLIT]) for name, point in points.items()]
    note = split_note({name: point.split if point else None for name, point in points.items()})
    return Grid("Where does TTFT go? (means in ms)", [head for head, _ in SPLIT], lines, note)


def _searched(rows: list[SearchResult], limited: list[Figure]) -> dict[str, Any]:
    """Return the table of a search."""
    name = rows[0].find if rows else ""
    sense = next((row.sense for row in rows if row.sense), None) or "best"
    named = dict.fromkeys(axis for row in rows for axis in row.changes)  # in the order of the question
    axes = sorted(named, key=lambda axis: axis != "router_mode")
    fleet = _fleet(list(_points(rows).values()), has_limits=True)
    gpus: list[Figure] = [("GPUs", lambda point: f"{point.gpus}")] if is_by_gpus(rows) else []
    columns = [*gpus, *fleet, *limited, *_without(AT_FOUND, limited)]
    return {
        "title": f"{sense.capitalize()} {name} that meets the limits",
        "columns": [*axes, f"{sense} {name}", "not at", "for", *(head for head, _ in columns)],
        "num_axes": len(axes),
        "rows": [
            [
                *(short_value(row.changes.get(axis, "-")) for axis in axes),
                value_shown(row),
                "-" if row.missed_at is None else digits(row.missed_at),
                "-" if row.missed is None else _margin(row.missed),
                *_cells(row.point, columns),
            ]
            for row in rows
        ],
        "verdict": search_verdict(rows, name, sense),
    }


def as_csv(rows: Rows) -> str:
    """Return everything known about each line in plain numbers; heads are paths in sweep.json, times are in s."""
    lines = [dict(_flat(msgspec.to_builtins(row))) for row in rows]
    heads = dict.fromkeys(head for line in lines for head in line)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows([csv_cell(line.get(head, "")) for head in heads] for line in lines)
    return text.getvalue()


def _flat(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts within a value by their paths; outcomes are named by their limits."""
    for name, part in value.items():
        if isinstance(part, dict):
            yield from _flat(part, f"{path}{name}.")
        elif name == "outcomes":
            for outcome in part:
                yield from _flat(outcome, f"{path}{outcome.pop('limit')}.")
        elif name == "tiers":
            for use in part:
                yield from _flat(use, f"{path}tiers.{use.pop('pool')}.{use.pop('tier')}.")
        elif name == "drafts" and isinstance(part, list):
            for use in part:
                its = f"{path}drafts.{use.pop('name')}."
                accepted = {f"accepted.{place}": count for place, count in enumerate(use.pop("accepted"), 1)}
                ratios = {f"gain.{gain['sequences']}": gain["ratio"] for gain in use.pop("gains")}
                yield from _flat(use | accepted | ratios, its)
        elif name == "interval":
            yield from (
                (f"{path}{name}.{end}", value) for end, value in zip(("low", "high"), part or ("", ""), strict=True)
            )
        elif not isinstance(part, list):
            yield path + name, "" if part is None else part
