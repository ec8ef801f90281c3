"""Charts of KV tiers: where prompt tokens came from, and what that saved, of the arms of a comparison and along a sweep."""

from collections.abc import Sequence
from typing import NamedTuple

from reports import tiers
from reports.charts import drawing, rows
from reports.charts.comparison import Comparison
from reports.charts.drawing import HALF, LINE, QUIET, WIDE, Canvas, Chart, Panel, duration, mark
from reports.charts.sweep import Swept, along, dots
from reports.key import Entry
from reports.points import Point
from reports.tiers import SOURCES, Hits, Saved, Saving

COLOURS = {
    "gpu": "#2a9d8f",
    "host": "#6a5acd",
    "disk": "#c8b45e",
    "store": "#e0703a",
    "computed": "#b3b3b3",
}
"""Of where prompt tokens came from: none is the colour of an arm."""
FROM_WHERE = "Where do prompt tokens come from?"
SAVED = "What do KV tiers save?"
SHARES = "Shares of all prompt tokens: found on the GPU, in each tier, or computed."


def hits(shown: Comparison) -> Chart | None:
    """Where prompt tokens came from: a stacked bar per arm."""
    if not shown.summary.has_tiers:
        return None
    return _bars([(entry, figures.hits) for entry, _, figures in shown.arms if figures.hits])


def charts(sweep: Swept) -> dict[str, Chart]:
    """Draw the charts of a sweep that say something."""
    drawn = {"hits_by_tier": hits_swept(sweep), "tier_savings": savings_swept(sweep)}
    return {name: chart for name, chart in drawn.items() if chart is not None}


def hits_swept(sweep: Swept) -> Chart | None:
    """Where prompt tokens came from: a stacked bar per point, in panels by line where a number is varied."""
    points = [point for point in sweep.points if point.hits]
    if not any(point.tiers for point in points):
        return None
    if sweep.axis is None:
        return _bars(
            [(sweep.key[name], point.hits) for name, line in sweep.lines.items() for point in line if point.hits]
        )
    lines = {name: [point for point in line if point.hits] for name, line in sweep.lines.items()}
    return _columns(sweep, {name: line for name, line in lines.items() if line})


def _bars(known: Sequence[tuple[Entry, Hits]]) -> Chart:
    canvas, (panel,) = rows.begin_rows([entry for entry, _ in known], [""], is_wide=False)
    for row, (entry, found) in enumerate(known):
        begin = 0.0
        for source, share in found.parts.items():
            if share > 0:
                bar = panel.axes.barh(row, share * 100, 0.62, left=begin, color=COLOURS[source])
                mark(list(bar), entry.place)
                said = f"{entry.name}, {SOURCES[source]}: {share:.1%}"
                panel.add(said, entry.place, [begin + share * 50], [row])
            begin += share * 100
    _percent(panel, "x")
    rows.name_parts(canvas, panel.axes, _names([found for _, found in known]))
    return Chart(canvas.figure, FROM_WHERE, SHARES, [panel])


def _columns(sweep: Swept, lines: dict[str, list[Point]]) -> Chart:
    across = min(len(lines), 3)
    height, left, gap = 200, 46, 24
    canvas = Canvas(-(-len(lines) // across) * (height + 76) + 20, is_wide=across > 1)
    cell = canvas.width / across
    panels = []
    for place, (name, line) in enumerate(lines.items()):
        x, y = place % across * cell + left, place // across * (height + 76) + 44
        axes, entry = canvas.axes(x, y, cell - left - gap, height), sweep.key[name]
        if len(lines) > 1:
            canvas.text(x, y - 8, entry.name, colour=entry.colour, arm=entry.place)
        panel = Panel(axes, sweep.axis_label, "%")
        drawing.categories(axes, "x", [drawing.plain(sweep.at(point)) for point in line])
        for column, point in enumerate(line):
            begin = 0.0
            for source, share in (point.hits or Hits()).parts.items():
                mark(list(axes.bar(column, share * 100, 0.62, bottom=begin, color=COLOURS[source])), entry.place)
                said = f"{sweep.axis_label} {drawing.plain(sweep.at(point))}, {SOURCES[source]}: {share:.1%}"
                panel.add(said, entry.place, [column], [begin + share * 50])
                begin += share * 100
        _percent(panel, "y")
        canvas.text(x + (cell - left - gap) / 2, y + height + 36, sweep.axis_label, colour=QUIET, align="center")
        panels.append(panel)
    rows.name_parts(
        canvas, panels[across - 1].axes, _names([p.hits for line in lines.values() for p in line if p.hits])
    )
    return Chart(canvas.figure, FROM_WHERE, SHARES, panels, is_wide=across > 1)


def _percent(panel: Panel, which: str) -> None:
    drawing.numbers(panel.axes, which, 0, 100, form=lambda value: f"{value:g}%")
    panel.axes.grid(visible=False)


def _names(found: Sequence[Hits]) -> dict[str, str]:
    """Return the colours of what any of them has, by what it is called."""
    return {label: COLOURS[name] for name, label in SOURCES.items() if any(getattr(each, name) for each in found)}


class Measure(NamedTuple):
    """What can be saved."""

    heading: str
    unit: str
    scale: float

    def of(self, saved: Saved) -> Saving | None:
        """Return how much of it was."""
        return saved.ttft_s if self.unit == "ms" else saved.gpu_s

    def text(self, value: float) -> str:
        """Write a value that is shown."""
        return duration(value) if self.unit == "ms" else drawing.plain(value)


MEASURES = (Measure("mean TTFT saved", "ms", 1000.0), Measure("GPU-seconds saved", "GPU-s", 1.0))


def savings(shown: Comparison) -> Chart | None:
    """What each arm took less than the first: right is better."""
    known = [(entry, figures.saved) for entry, _, figures in shown.arms if figures.saved]
    measures = [one for one in MEASURES if any(one.of(saved) for _, saved in known)]
    if not measures:
        return None
    canvas, panels = rows.begin_rows([entry for entry, _ in known], [measure.heading for measure in measures])
    for panel, measure in zip(panels, measures, strict=True):
        panel.x_unit = measure.unit
        reach = [0.0]
        for row, (entry, saved) in enumerate(known):
            if (found := measure.of(saved)) is None:
                panel.axes.annotate("n/a", (0, row), color=QUIET, va="center", fontsize=drawing.SIZE)
                continue
            value, ends = found.value * measure.scale, [end * measure.scale for end in found.interval or ()]
            mark(panel.axes.plot(ends, [row] * len(ends), color=entry.colour, linewidth=4, alpha=0.35), entry.place)
            mark(panel.axes.plot([value], [row], "o", color=entry.colour, markersize=6), entry.place)
            panel.add(f"{entry.name}: {_said(measure, found)}", entry.place, [value], [row])
            reach += [value, *ends]
        _from_nothing(panel, "x", reach, measure)
        panel.axes.axvline(0, color=QUIET, linewidth=1.0)
    text = f"Against {shown.key[shown.summary.baseline].name}, for the same requests: right of 0 is better. "
    if len(measures) < len(MEASURES):
        text += "TTFT is not compared, as a queue grew. "
    return Chart(canvas.figure, SAVED, text + _reading([saved for _, saved in known]), panels, is_wide=True)


def savings_swept(sweep: Swept) -> Chart | None:
    """What larger tiers saved, against the smallest of each line."""
    if sweep.axis is None or not tiers.is_size(sweep.axis) or not any(point.tiers for point in sweep.points):
        return None
    lines = {name: _saved_along(line) for name, line in sweep.lines.items()}
    every = [saved for line in lines.values() for _, saved, _ in line]
    measures = [one for one in MEASURES if any(found.value for saved in every if (found := one.of(saved)))]
    if not measures:
        return None
    names, left = drawing.widest(entry.name for entry in sweep.key.values()) + 18, 66
    height = max(220, LINE * len(lines))
    canvas = Canvas(height + 72, is_wide=len(measures) > 1)
    cell = (WIDE if len(measures) > 1 else HALF) / len(measures)
    panels = []
    for place, measure in enumerate(measures):
        x = place * cell + left
        axes = canvas.axes(x, 24, cell - left - names, height, heading=measure.heading)
        panel = Panel(axes, sweep.axis_label, measure.unit)
        along(sweep, axes, canvas.width)
        known = [found for saved in every if (found := measure.of(saved))]
        _from_nothing(
            panel,
            "y",
            [0.0, *(end * measure.scale for one in known for end in (one.value, *(one.interval or ())))],
            measure,
        )
        axes.axhline(0, color=QUIET, linewidth=1.0)
        canvas.label_ends(axes, _curves(sweep, panel, lines, measure))
        canvas.text(x + (cell - left - names) / 2, 24 + height + 36, sweep.axis_label, colour=QUIET, align="center")
        panels.append(panel)
    base = min(sweep.at(point) for point in sweep.points)
    text = f"Against {sweep.axis_label} {drawing.plain(base)}, for the same requests: higher is better. Hollow: a queue grew. "
    return Chart(canvas.figure, SAVED, text + _reading(every), panels, is_wide=len(measures) > 1)


def _saved_along(line: Sequence[Point]) -> list[tuple[Point, Saved, bool]]:
    """Return what each point of a line took less than the first, where that is known, and whether a queue grew."""
    first, found = line[0], []
    for point in line:
        saved = tiers.saved(first.name, first.spent, point.spent, is_stable=True)
        if saved is not None:
            found.append((point, saved, not (first.is_stable and point.is_stable)))
    return found


def _curves(
    sweep: Swept, panel: Panel, lines: dict[str, list[tuple[Point, Saved, bool]]], measure: Measure
) -> list[tuple[float, float, Entry]]:
    ends = []
    for name, line in lines.items():
        entry = sweep.key[name]
        known = [(point, found, grew) for point, saved, grew in line if (found := measure.of(saved))]
        if not known:
            continue
        xs, ys = [sweep.at(point) for point, _, _ in known], [found.value * measure.scale for _, found, _ in known]
        drawing.line(panel.axes, entry, xs, ys, linewidth=1.4)
        for x, (_, found, _) in zip(xs, known, strict=True):
            if found.interval:
                interval = [end * measure.scale for end in found.interval]
                mark(panel.axes.plot([x, x], interval, color=entry.colour, linewidth=4, alpha=0.35), entry.place)
        dots(panel.axes, entry, [(x, y, not grew) for x, y, (_, _, grew) in zip(xs, ys, known, strict=True)])
        panel.add(entry.name, entry.place, xs, ys)
        ends.append((xs[-1], ys[-1], entry))
    return ends


def _from_nothing(panel: Panel, which: str, reach: Sequence[float], measure: Measure) -> None:
    """Let an axis hold what was saved, nothing included."""
    low, high = min(reach), max(reach)
    pad = 0.08 * (high - low) or 1.0
    drawing.numbers(panel.axes, which, low - pad if low < 0 else -pad / 2, high + pad, form=measure.text)


def _said(measure: Measure, found: Saving) -> str:
    text = f"{measure.text(float(f'{found.value * measure.scale:.4g}'))} saved"
    if measure.unit != "ms":
        text = text.replace(" saved", " GPU-seconds saved")
    return text if found.interval is None else f"{text}, over {found.repeats} repeats"


def _reading(saved: Sequence[Saved]) -> str:
    repeats = max(one.gpu_s.repeats for one in saved)
    text = f"GPU-seconds: {tiers.FORMULAS['gpu_s']}."
    return (
        f"{text} Pale: 95% intervals over {repeats} repeats."
        if repeats > 1
        else f"{text} One run of each, so no intervals."
    )
