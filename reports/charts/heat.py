"""Maps of what each worker did over time."""

from collections.abc import Callable

import numpy as np

from reports.charts import drawing, over_time
from reports.charts.comparison import Comparison
from reports.charts.drawing import QUIET, REST, WIDE, Canvas, Chart, Panel
from reports.record.records import Floats, Record

MAX_ROWS = 64
"""The most rows of a map; with more workers, several share a row."""
HOVERED = 16
"""The most rows whose values the page shows."""


def worker_work(shown: Comparison) -> Chart | None:
    """Work sent to each worker over time."""
    return _heat(
        shown, "Is work spread evenly over workers and time?", "tokens/s", over_time.work,
        "Uncached prompt and output tokens per second sent to each worker.",
    )  # fmt: skip


def worker_load(shown: Comparison) -> Chart | None:
    """Requests on each worker over time."""
    return _heat(shown, "How many requests does each worker hold?", "requests", over_time.load, "Waiting and running.")


def worker_hits(shown: Comparison) -> Chart | None:
    """Share of its prompt tokens that each worker found in its cache, over time."""
    return _heat(
        shown, "Which workers find prompts in their cache?", "%", lambda run, edges: over_time.hits(run, edges) * 100,
        "Share of prompt tokens found; grey where no prompt arrived.",
    )  # fmt: skip


def _heat(
    shown: Comparison, title: str, unit: str, measure: Callable[[Record, Floats], Floats], text: str
) -> Chart | None:
    """Draw a map per arm with a row per worker and a column per window, all on one colour scale."""
    known = [(entry, run) for entry, run, _ in shown.arms if run.requests.worker.count() and run.num_workers > 1]
    if not known:
        return None
    edges = over_time.windows([run for _, run in known], 60)
    most = max(run.num_workers for _, run in known)
    per_row = -(-most // MAX_ROWS)
    tables = [(entry, run, _rows_of(measure(run, edges), per_row)) for entry, run in known]
    values = np.concatenate([table[~np.isnan(table)] for _, _, table in tables])
    if not len(values) or np.ptp(values) == 0:
        return None
    top = float(np.quantile(values, 0.995)) or float(values.max())
    across, gap = min(len(known), 4), 30
    left = drawing.text_width(f"worker {most - 1}") + 14 if per_row == 1 else 20
    height = min(max(9 * -(-most // per_row), 64), 240)
    row_height = height + 58
    down = -(-len(known) // across)
    canvas = Canvas(down * row_height + 4, is_wide=True)
    width = (WIDE - left - 86 - gap * (across - 1)) / across
    panels = []
    for place, (entry, run, rows) in enumerate(tables):
        x, y = left + place % across * (width + gap), place // across * row_height + 24
        axes = canvas.axes(x, y, width, height)
        canvas.text(x, y - 9, entry.name, colour=entry.colour)
        drawing.seconds(axes, "x", 0, float(edges[-1]), most=4)
        drawing.fixed(
            axes,
            "y",
            -0.5,
            len(rows) - 0.5,
            {0: "worker 0", len(rows) - 1: f"worker {run.num_workers - 1}"} if per_row == 1 else {},
        )
        axes.band(-0.5, len(rows) - 0.5, REST, is_behind=True)
        axes.map(rows, top, (0, float(edges[-1]), -0.5, len(rows) - 0.5))
        axes.without_grid()
        if place % across and per_row == 1 and run.num_workers == known[0][1].num_workers:
            drawing.no_labels(axes, "y")
        panel = Panel(axes, "s", unit)
        centres = over_time.centres(edges)
        if len(rows) <= HOVERED:
            panel.is_map = True
            for worker, row in enumerate(rows):
                panel.add(f"worker {worker}", None, centres, row)
        panels.append(panel)
    _scale_of_colours(canvas, top, unit, height)
    text += (
        " Each row is a worker, with 0 at the bottom."
        if per_row == 1
        else (f" Each row is the mean of {per_row} workers, sorted by their means, with the highest at the top.")
    )
    return Chart(canvas, title, text, panels, is_wide=True)


def _rows_of(table: Floats, per_row: int) -> Floats:
    """Average this many workers at a time, grouping similar ones."""
    if per_row == 1:
        return table
    filled = np.nan_to_num(table)
    table = table[np.argsort(filled.mean(axis=1), kind="stable")]
    count = -(-len(table) // per_row)
    padded = np.full((count * per_row, table.shape[1]), np.nan)
    padded[: len(table)] = table
    groups = padded.reshape(count, per_row, -1)
    known = ~np.isnan(groups)
    with np.errstate(invalid="ignore"):
        result: Floats = np.nansum(groups, axis=1) / known.sum(axis=1)
    return result


def _scale_of_colours(canvas: Canvas, top: float, unit: str, height: float) -> None:
    """Draw the colour scale to the right of the maps."""
    axes = canvas.axes(WIDE - 72, 24, 12, height)
    axes.map(np.linspace(0, top, 64)[:, None], top, (0, 1, 0, top))
    drawing.numbers(axes, "y", 0, top, most=4)
    drawing.fixed(axes, "x", 0, 1, {})
    axes.y.is_opposite = True
    axes.without_grid()
    canvas.text(WIDE - 4, 15, unit, colour=QUIET, align="right")
