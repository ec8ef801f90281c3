"""What a sweep found: one table, one report."""

import csv
import io
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from foundation.files import replace_text
from reports import drawing, page
from reports.drawing import STYLE, Chart, Drawn, Panel, colour, logarithmic, mark, new
from reports.folder import ReportError
from reports.foreign import csv_cell
from reports.metrics import FORMULAS, LABELS
from reports.tables import milliseconds

Json = dict[str, Any]
SCHEMA = "dynabench.sweep/1"


def write(out: Path, manifest: Json, rows: list[Json], points: list[Json], *, is_complete: bool) -> Json:
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


def _write(out: Path, manifest: Json, rows: list[Json], points: list[Json], *, is_complete: bool) -> Json:
    summary = _searched(rows) if manifest["sweep"]["find"] else _gridded(rows, manifest)
    summary |= {"only_wide": ["offered/s", "TTFT p99", "req/s", "tok/s", "imbalance", "goodput", "missed at"]}
    summary |= {"schema": SCHEMA, "is_complete": is_complete, "limits": manifest["limits"], "points": rows}
    if not is_complete:
        summary["verdict"] += " The sweep was interrupted; run the same command again to go on."
    with plt.rc_context(rc=STYLE):
        charts = _charts(points, manifest)
        drawn: list[Drawn] = drawing.draw(charts, out / "charts")
    groups = list(_grouped(points, manifest))
    text = page.render(
        "sweep.html.jinja",
        drawn,
        title=manifest["title"],
        subtitle=manifest["subtitle"],
        summary=summary,
        arm_names=groups,
        formulas=FORMULAS,
        labels=LABELS,
        command=manifest["command"],
        settings=json.dumps(manifest, indent=2),
    )
    for name, content in (
        ("sweep.json", json.dumps({"experiment": manifest, "summary": summary}, indent=2) + "\n"),
        ("report.html", text),
        ("table.csv", _csv(summary)),
    ):
        replace_text(out / name, content)
    return summary


def _gridded(rows: list[Json], manifest: Json) -> Json:
    axes = [name for name in _names(rows) if len({str(row["changes"].get(name)) for row in rows}) > 1] or [
        "router_mode"
    ]
    has_limits = bool(manifest["limits"])
    columns = [
        *axes,
        "offered/s",
        "TTFT mean",
        "TTFT p90",
        "TTFT p99",
        "TPOT mean",
        "E2E mean",
        "req/s",
        "tok/s",
        "hits",
        "imbalance",
    ]
    columns += ["goodput", "limits"] if has_limits else ["stable"]
    table = []
    for row in rows:
        cells = [_text(row["changes"].get(name)) for name in axes]
        cells += [f"{row['offered_per_s']:.2f}" if row["offered_per_s"] else "n/a"]
        cells += [milliseconds(row["ttft_sched"][key]) for key in ("mean", "p90", "p99")]
        cells += [milliseconds(row["tpot"]["mean"]), milliseconds(row["e2e_sched"]["mean"])]
        through = row["throughput"]
        cells += [f"{through['requests_per_s'] or 0:.2f}", f"{through['output_tokens_per_s'] or 0:,.0f}"]
        cells += [f"{row['cache']['hit_share']:.1%}", f"{row['imbalance']['work_max_over_mean']:.2f}"]
        if has_limits:
            cells += [f"{row['goodput']['goodput_per_s'] or 0:.2f}", "met" if not row["missed"] else "missed"]
        else:
            cells.append("yes" if row["is_stable"] else "no")
        table.append(cells)
    stable = [row for row in rows if row["is_stable"] and row["ttft_sched"]["mean"] is not None]
    parts = [f"{len(rows)} point{'s' * (len(rows) != 1)}, {len(rows) - len(stable)} of them with a queue that grew."]
    if stable and {"router_mode"} == set(axes) & {"router_mode"} and len(axes) > 1:
        wins: dict[str, int] = {}
        for group in _by_rest(rows).values():
            kept = [row for row in group if row["is_stable"]]
            if kept:
                best = min(kept, key=lambda row: float(row["e2e_sched"]["mean"]))
                wins[best["changes"]["router_mode"]] = wins.get(best["changes"]["router_mode"], 0) + 1
        ranked = sorted(wins.items(), key=lambda pair: -pair[1])
        parts.append("Lowest mean E2E latency: " + ", ".join(f"{mode} in {count}" for mode, count in ranked) + ".")
    elif stable:
        best = min(stable, key=lambda row: float(row["ttft_sched"]["mean"]))
        parts.append(f"Lowest mean TTFT: {best['name']} ({milliseconds(best['ttft_sched']['mean'])} ms).")
    return {
        "title": "Every combination",
        "columns": columns,
        "num_axes": len(axes),
        "rows": table,
        "verdict": " ".join(parts),
    }


def _searched(rows: list[Json]) -> Json:
    name = rows[0]["find"] if rows else ""
    axes = sorted({axis for row in rows for axis in row["changes"]}, key=lambda axis: axis != "router_mode")
    columns = [*axes, f"highest {name}", "missed at", "offered/s", "TTFT p99", "TPOT p99", "goodput"]
    table = []
    for row in rows:
        point = row["point"]
        cells = [_text(row["changes"].get(axis)) for axis in axes]
        cells += [
            _text(row["met"]) if row["met"] is not None else "none",
            _text(row["missed_at"]) if row["missed_at"] else "-",
        ]
        if point is None:
            cells += ["-"] * 4
        else:
            cells += [
                f"{point['offered_per_s']:.2f}",
                milliseconds(point["ttft_sched"]["p99"]),
                milliseconds(point["tpot"]["p99"]),
            ]
            cells.append(f"{point['goodput']['goodput_per_s'] or 0:.2f}")
        table.append(cells)
    known = [row for row in rows if row["met"] is not None]
    if known:
        best = max(known, key=lambda row: float(row["met"]))
        verdict = f"{best['arm']} meets the limits up to {name} {_text(best['met'])}, the highest of {len(rows)}."
        least = min(known, key=lambda row: float(row["met"]))
        if least is not best:
            verdict += f" {least['arm']} meets them up to {_text(least['met'])} ({best['met'] / least['met'] - 1:+.0%} between the two)."
    else:
        verdict = "Nothing meets the limits, not even at the lowest value tried (--low)."
    return {
        "title": f"Highest {name} that meets the limits",
        "columns": columns,
        "num_axes": len(axes),
        "rows": table,
        "verdict": verdict,
    }


def _charts(points: list[Json], manifest: Json) -> dict[str, Chart]:
    groups = _grouped(points, manifest)
    charts = {}
    for name, title, x_label, y_label, x_of, y_of in (
        ("pareto", "Throughput against latency: up and left is better", "TTFT p90 (ms)", "output tokens/s",
         lambda p: _ms(p["ttft_sched"]["p90"]), lambda p: p["throughput"]["output_tokens_per_s"]),
        ("interactivity", "Throughput against interactivity: up and right is better", "tokens/s of a user (1 / mean TPOT)", "output tokens/s of a worker",
         lambda p: 1 / p["tpot"]["mean"] if p["tpot"]["mean"] else None, lambda p: (p["throughput"]["output_tokens_per_s"] or 0) / p["workers"]),
        ("ttft_by_load", "Mean TTFT by load", "offered requests/s", "TTFT mean (ms)",
         lambda p: p["offered_per_s"], lambda p: _ms(p["ttft_sched"]["mean"])),
        ("e2e_by_load", "Mean E2E latency by load", "offered requests/s", "E2E mean (ms)",
         lambda p: p["offered_per_s"], lambda p: _ms(p["e2e_sched"]["mean"])),
    ):  # fmt: skip
        figure, axes = new(title, x_label, y_label)
        panel = Panel(axes)
        for place, (group, members) in enumerate(groups.items()):
            known = sorted(
                (x_of(p), y_of(p), p["is_stable"]) for p in members if x_of(p) is not None and y_of(p) is not None
            )
            if not known:
                continue
            x, y, _ = zip(*known, strict=True)
            mark(axes.plot(x, y, "-" if len(x) > 1 else "", color=colour(place), label=group, linewidth=1), place)
            for is_stable, face in ((True, colour(place)), (False, "none")):
                spots = [(a, b) for a, b, settled in known if settled is is_stable]
                if spots:
                    mark(
                        axes.plot(
                            *zip(*spots, strict=True), "o", color=colour(place), markerfacecolor=face, markersize=4
                        ),
                        place,
                    )
            panel.add(group, place, x, y)
        if any(panel.series) and "TTFT" in x_label:
            axes.set_xscale("log")
            logarithmic(axes.xaxis)
        if "by_load" in name and any(panel.series):
            axes.set_yscale("log")
            logarithmic(axes.yaxis)
        if len(groups) > 1:
            axes.legend(fontsize=8)
        charts[name] = Chart(
            figure, f"{title} (hollow: the queue grew)", "A point per combination, a line per router mode.", [panel]
        )
    return charts


def _grouped(points: list[Json], manifest: Json) -> dict[str, list[Json]]:
    """Group points into lines: by router mode, or where there is one only, all together."""
    groups: dict[str, list[Json]] = {}
    for point in sorted(points, key=lambda point: str(point["name"])):
        groups.setdefault(str(point["changes"].get("router_mode", "all")), []).append(point)
    order = [mode for mode in manifest["experiment"]["router_mode"] if mode in groups]
    return {mode: groups[mode] for mode in [*order, *(mode for mode in groups if mode not in order)]}


def _by_rest(rows: list[Json]) -> dict[str, list[Json]]:
    groups: dict[str, list[Json]] = {}
    for row in rows:
        key = json.dumps(
            {name: value for name, value in row["changes"].items() if name != "router_mode"}, sort_keys=True
        )
        groups.setdefault(key, []).append(row)
    return groups


def _names(rows: list[Json]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["changes"]))


def _csv(summary: Json) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([csv_cell(cell) for cell in line] for line in (summary["columns"], *summary["rows"]))
    return text.getvalue()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
