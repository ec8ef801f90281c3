"""What a sweep found: one table, one report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from matplotlib import pyplot as plt

from foundation.files import replace_text
from foundation.text import one_line
from reports import drawing, page, sweep_table
from reports.drawing import STYLE, Chart, Drawn, Panel, colour, logarithmic, mark, new
from reports.folder import ReportError
from reports.metrics import FORMULAS, LABELS, TTST_FORMULA
from reports.points import AnyPoint, Found, Point, Sweep

Manifest = dict[str, Any]


def write(
    out: Path,
    manifest: Manifest,
    rows: list[AnyPoint] | list[Found],
    points: list[AnyPoint],
    *,
    is_complete: bool,
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
    out: Path,
    manifest: Manifest,
    rows: list[AnyPoint] | list[Found],
    points: list[AnyPoint],
    *,
    is_complete: bool,
) -> Sweep:
    summary = sweep_table.lay_out(rows, manifest, is_complete=is_complete)
    groups = _grouped([point for point in points if isinstance(point, Point)], manifest)
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
    replace_text(out / "table.csv", sweep_table.as_csv(rows))
    return summary


def is_sweep(folder: Path) -> bool:
    """Tell whether a folder is that of a sweep."""
    return (folder / "sweep.json").is_file()


def combine(folders: list[Path], out: Path | None) -> tuple[Manifest, Sweep]:
    """Put the lines of several sweeps into one table; with `out`, write the folder of it, too.

    Where two sweeps have lines with the same changes, the sweep is one of the changes.

    Raises:
        ReportError: a folder is not that of a sweep, or it looked for something else: other limits, another workload.
    """
    kept = [_read(folder) for folder in folders]
    for folder, one in zip(folders[1:], kept[1:], strict=True):
        _refuse_others(folders[0], kept[0].manifest, folder, one.manifest)
    changes = [json.dumps(row.changes, sort_keys=True) for one in kept for row in one.rows]
    if len(set(changes)) < len(changes):
        kept = [
            one._replace(rows=_of(one.rows, folder.name), points=_of(one.points, folder.name))
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
        (out / "points" / f"{number}.json").write_bytes(msgspec.json.encode(point))
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
        kind: Any = Found if manifest["sweep"]["find"] else AnyPoint
        rows = msgspec.convert(whole["summary"]["points"], list[kind])
        files = sorted((folder / "points").glob("*.json"))
        points = [msgspec.json.decode(file.read_bytes(), type=AnyPoint) for file in files]
        return _Kept(manifest, rows, points, bool(whole["summary"]["is_complete"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{folder}: not the folder of a sweep ({one_line(str(error))})") from error


def _refuse_others(first: Path, wanted: Manifest, folder: Path, given: Manifest) -> None:
    """Refuse a sweep whose points are not to be compared with those of the first.

    Raises:
        ReportError: so it is.
    """
    for what, its, others in zip(("limits", "workload", "--find"), _asked(given), _asked(wanted), strict=True):
        if its != others:
            raise ReportError(
                f"{folder} has {what} {its}, {first} has {others}: sweeps in one table differ in their settings only"
            )


def _asked(manifest: Manifest) -> tuple[str, str, str]:
    """Return what sweeps in one table share."""
    workload = manifest["workload"]
    return (
        ", ".join(manifest["limits"]) or "none",
        f"{workload['name']} ({workload['requests']} requests)",
        manifest["sweep"]["find"] or "none",
    )


def _of(rows: list[Any], sweep: str) -> list[Any]:
    """Say of lines which sweep they are of."""
    return [
        msgspec.structs.replace(
            row,
            changes=row.changes | {"sweep": sweep},
            **{name: f"{sweep}/{getattr(row, name)}" for name in ("arm" if isinstance(row, Found) else "name",)},
        )
        for row in rows
    ]


def _combined(sources: dict[str, _Kept]) -> Manifest:
    """Return what is said of several sweeps together."""
    first = next(iter(sources.values())).manifest
    modes = dict.fromkeys(mode for one in sources.values() for mode in one.manifest["experiment"]["router_mode"])
    return first | {
        "title": f"{first['workload']['name']}: {len(sources)} sweep{'s' * (len(sources) != 1)} together",
        "subtitle": ", ".join(sources),
        "step_times": "; ".join(dict.fromkeys(filter(None, (one.manifest["step_times"] for one in sources.values())))),
        "command": f"dynabench compare {' '.join(sources)}",
        "experiment": first["experiment"] | {"router_mode": list(modes)},
        "sources": {folder: one.manifest for folder, one in sources.items()},
        "interrupted": [folder for folder, one in sources.items() if not one.is_complete],
    }


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


def _per_worker(point: Point) -> float | None:
    """Return the output tokens/s of a worker."""
    rate = point.throughput.output_tokens_per_s
    return None if rate is None else rate / point.workers


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
