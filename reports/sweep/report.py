"""What a sweep found: one table, one report."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from foundation.files import replace_text
from foundation.text import one_line
from reports import page
from reports.charts import drawing
from reports.charts import sweep as charts
from reports.charts import tiers as tier_charts
from reports.charts.drawing import Drawn
from reports.charts.sweep import Swept
from reports.figures import fleet as fleet_figures
from reports.figures import tiers
from reports.figures.metrics import FORMULAS, LABELS, TTST_FORMULA
from reports.figures.slo import parse_slo
from reports.folder import RUNS, ReportError, labels_of, reason
from reports.key import Key, KeyEntry
from reports.sweep import table as sweep_table
from reports.sweep.points import AnyPoint, Point, SearchResult, Sweep
from reports.tables.grid import Grid
from reports.verdicts import headline

Manifest = dict[str, Any]


def write(
    out: Path,
    manifest: Manifest,
    rows: list[AnyPoint] | list[SearchResult],
    points: list[AnyPoint],
    *,
    is_complete: bool,
) -> Sweep:
    """Write the table and report of a sweep into its folder; return their content.

    Raises:
        ReportError: there is no room for them; the points are kept.
    """
    try:
        return _write(out, manifest, rows, points, is_complete=is_complete)
    except OSError as error:
        raise ReportError(
            f"{out}: the report cannot be written ({reason(error)}); the points are kept: make room and run "
            "the same command again"
        ) from error


def _write(
    out: Path,
    manifest: Manifest,
    rows: list[AnyPoint] | list[SearchResult],
    points: list[AnyPoint],
    *,
    is_complete: bool,
) -> Sweep:
    summary = sweep_table.lay_out(rows, manifest, is_complete=is_complete)
    whole = {"experiment": manifest, "summary": msgspec.to_builtins(summary)}
    replace_text(out / "sweep.json", json.dumps(whole, indent=2) + "\n")
    replace_text(out / "table.csv", sweep_table.as_csv(rows))
    sweep = _swept(rows, points, summary.limits)
    found = [row for row in rows if isinstance(row, SearchResult)]
    drawn: list[Drawn] = drawing.draw(charts.charts(sweep, found) | tier_charts.charts(sweep), out / "charts")
    shown = list(_tables(summary))
    text = page.render(
        "sweep.html.jinja",
        drawn,
        arms=list(sweep.lines),
        title=manifest["title"],
        subtitle=manifest["subtitle"],
        head=headline.head(manifest),
        alerts=[],
        verdict=summary.verdict,
        points=shown[0],
        more=shown[1:],
        row_arms=[_line_of(row, sweep) for row in rows],
        grids=summary.grids,
        formulas=FORMULAS
        | ({"ttst": TTST_FORMULA} if summary.split else {})
        | (tiers.FORMULAS if summary.tiers else {})
        | (fleet_figures.FORMULAS if any(point.fleet and point.fleet.is_shown for point in sweep.points) else {}),
        labels=LABELS | tiers.LABELS | fleet_figures.LABELS,
        command=manifest["command"],
        settings=json.dumps(manifest, indent=2),
    )
    replace_text(out / "report.html", text)
    return summary


def _swept(rows: list[AnyPoint] | list[SearchResult], points: list[AnyPoint], limits: list[str]) -> Swept:
    """Put what was tried in lines."""
    read = list(map(parse_slo, limits))
    if found := [row for row in rows if isinstance(row, SearchResult)]:
        return charts.of_search(found, [one for one in points if isinstance(one, Point)], read)
    return charts.swept([row for row in rows if isinstance(row, Point)], read)


def key_of_rows(summary: Sweep) -> tuple[Key, list[KeyEntry | None]]:
    """Return the key of a sweep's report, and how each line of the table is shown; impossible ones are left out."""
    sweep = _swept(summary.points, [], summary.limits)
    return sweep.key, [sweep.key.get(_line_of(row, sweep)) for row in summary.points]


ACROSS = 9
"""The number of columns that fit on a page besides the settings."""


def _tables(summary: Sweep) -> Iterator[Grid]:
    """Yield the table in parts that fit on a page, each with the settings: the most important columns first."""
    axes = summary.num_axes
    label, *names = (column.replace("_", " ") for column in summary.columns)
    for first in range(axes, max(len(summary.columns), axes + 1), ACROSS):
        last = first + ACROSS
        columns = names[: axes - 1] + names[first - 1 : last - 1]
        lines = [(cells[0], cells[1:axes] + cells[first:last]) for cells in summary.rows]
        title = summary.title if first == axes else "And"
        note = (
            f"Times in ms. Limits: {', '.join(summary.limits)}; the queue may not grow."
            if summary.limits
            else "Times in ms."
        )
        yield Grid(title, columns, lines, note if first == axes else "", label)


def _line_of(row: AnyPoint | SearchResult, sweep: Swept) -> str:
    """Return the line of the charts, and thus the arm of the key, to which a line of the table belongs."""
    if isinstance(row, SearchResult):
        return row.arm
    return next((name for name, line in sweep.lines.items() if any(point.changes == row.changes for point in line)), "")


def is_sweep(folder: Path) -> bool:
    """Return whether a folder is that of a sweep."""
    return (folder / "sweep.json").is_file()


def runs_within(folder: Path) -> list[Path]:
    """Return the results folders of a benchmark's loads, or a folder itself."""
    within = folder / RUNS
    return (
        sorted(path for path in within.iterdir() if path.is_dir()) if is_sweep(folder) and within.is_dir() else [folder]
    )


def is_complete(folder: Path) -> bool:
    """Return whether a folder is that of a sweep that was not interrupted."""
    return is_sweep(folder) and _read(folder).is_complete


def combine(folders: list[Path], out: Path | None) -> tuple[Manifest, Sweep]:
    """Put the lines of several sweeps into one table; with `out`, also write a folder for it.

    If two sweeps have lines with the same changes, the sweep becomes one of the changes.

    Raises:
        ReportError: a folder is not that of a sweep, or is given twice, or the sweeps differ in limits, workload or question.
    """
    labels, kept = labels_of(folders), [_read(folder) for folder in folders]
    for folder, one in zip(folders[1:], kept[1:], strict=True):
        _refuse_others(folders[0], kept[0].manifest, folder, one.manifest)
    changes = [json.dumps(row.changes, sort_keys=True) for one in kept for row in one.rows]
    if len(set(changes)) < len(changes):
        kept = [
            one._replace(rows=_of(one.rows, labels[folder]), points=_of(one.points, labels[folder]))
            for folder, one in zip(folders, kept, strict=True)
        ]
    rows: Any = [row for one in kept for row in one.rows]
    points = [point for one in kept for point in one.points]
    manifest = _combined(dict(zip(map(str, folders), kept, strict=True)))
    is_complete = not manifest["interrupted"]
    if out is None:
        return manifest, sweep_table.lay_out(rows, manifest, is_complete=is_complete)
    (out / "points").mkdir(parents=True)
    for number, point in enumerate(points):
        replace_text(out / "points" / f"{number}.json", msgspec.json.encode(point).decode())
    return manifest, write(out, manifest, rows, points, is_complete=is_complete)


class _Kept(NamedTuple):
    """What the folder of a sweep holds."""

    manifest: Manifest
    rows: list[Any]
    """The lines of its table."""
    points: list[Any]
    is_complete: bool


def _read(folder: Path) -> _Kept:
    try:
        whole = json.loads((folder / "sweep.json").read_text())
        manifest = whole["experiment"]
        kind: Any = SearchResult if manifest["sweep"]["find"] else AnyPoint
        rows = msgspec.convert(whole["summary"]["points"], list[kind])
        files = sorted((folder / "points").glob("*.json"))
        points = [msgspec.json.decode(file.read_bytes(), type=AnyPoint) for file in files]
        return _Kept(manifest, rows, points, bool(whole["summary"]["is_complete"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{folder}: not the folder of a sweep ({one_line(str(error))})") from error


def _refuse_others(first: Path, wanted: Manifest, folder: Path, given: Manifest) -> None:
    """Refuse a sweep with points that cannot be compared with those of the first."""
    for what, its, others in zip(("limits", "workload", "--find"), _asked(given), _asked(wanted), strict=True):
        if its != others:
            raise ReportError(
                f"{folder} has {what} {its}, but {first} has {others}; sweeps in one table may differ only in their settings"
            )


def _asked(manifest: Manifest) -> tuple[str, str, str]:
    """Return what sweeps in one table must have in common."""
    workload = manifest["workload"]
    return (
        ", ".join(manifest["limits"]) or "none",
        f"{workload['name']} ({workload['requests']} requests)",
        manifest["sweep"]["find"] or "none",
    )


def _of(rows: list[Any], sweep: str) -> list[Any]:
    """Prefix lines with the sweep that they are from."""
    return [
        msgspec.structs.replace(
            row,
            changes=row.changes | {"sweep": sweep},
            **{name: f"{sweep}/{getattr(row, name)}" for name in ("arm" if isinstance(row, SearchResult) else "name",)},
        )
        for row in rows
    ]


def _combined(sources: dict[str, _Kept]) -> Manifest:
    """Return the manifest of several sweeps together."""
    first = next(iter(sources.values())).manifest
    modes = dict.fromkeys(mode for one in sources.values() for mode in one.manifest["experiment"]["router_mode"])
    return first | {
        "title": f"{first['workload']['name']}: {len(sources)} sweep{'s' * (len(sources) != 1)} together",
        "subtitle": ", ".join(sources),
        "step_times": "; ".join(dict.fromkeys(filter(None, (one.manifest["step_times"] for one in sources.values())))),
        "command": f"dynabench compare {' '.join(sources)}",
        "experiment": first["experiment"] | {"router_mode": list(modes)},
        "sources": {folder: one.manifest for folder, one in sources.items()},
        "left_out": [reason for one in sources.values() for reason in one.manifest.get("left_out", [])],
        "interrupted": [folder for folder, one in sources.items() if not one.is_complete],
    }
