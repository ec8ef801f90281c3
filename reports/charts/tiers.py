"""Charts of KV tiers: where prompt tokens came from, and what that saved, of the arms of a comparison and along a sweep."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reports.charts import drawing, rows
from reports.charts.axes import Axes
from reports.charts.comparison import Comparison
from reports.charts.drawing import LINE, QUIET, REST, WIDE, Canvas, Chart, Panel, duration, mark
from reports.charts.sweep import Swept, along, dots
from reports.figures import tiers
from reports.figures.tier_sizes import is_size
from reports.figures.tiers import SOURCES, Hits, Saved, Saving
from reports.key import KeyEntry
from reports.sweep.points import Point

COLOURS = {
    "gpu": "#2a9d8f",
    "host": "#6a5acd",
    "disk": "#c8b45e",
    "store": "#e0703a",
    "computed": REST,
}
"""Colours of the sources of prompt tokens; none is the colour of an arm."""
FROM_WHERE = "Where do prompt tokens come from?"
SAVED = "What do KV tiers save?"
SHARES = "Shares of all prompt tokens: found on the GPU, in each tier, or computed."


def hits(shown: Comparison) -> Chart | None:
    """Where prompt tokens came from: a stacked bar per arm."""
    if not shown.summary.has_tiers:
        return None
    return _bars([(entry, figures.hits) for entry, _, figures in shown.arms if figures.hits])


def charts(sweep: Swept) -> dict[str, Chart]:
    """Draw the charts of a sweep that are not empty."""
    drawn = {"hits_by_tier": hits_swept(sweep), "tier_savings": savings_swept(sweep)}
    return {name: chart for name, chart in drawn.items() if chart is not None}


def hits_swept(sweep: Swept) -> Chart | None:
    """Where prompt tokens came from: a stacked bar per point, in a panel per line if a number is varied."""
    points = [point for point in sweep.points if point.hits]
    if not any(point.tiers for point in points):
        return None
    if sweep.axis is None:
        return _bars(
            [(sweep.key[name], point.hits) for name, line in sweep.lines.items() for point in line if point.hits]
        )
    lines = {name: [point for point in line if point.hits] for name, line in sweep.lines.items()}
    return _columns(sweep, {name: line for name, line in lines.items() if line})


def _bars(known: Sequence[tuple[KeyEntry, Hits]]) -> Chart:
    canvas, (panel,) = rows.begin_rows([entry for entry, _ in known], [""], is_wide=False)
    for row, (entry, found) in enumerate(known):
        begin = 0.0
        for source, share in found.parts.items():
            if share > 0:
                bar = panel.axes.bar(begin, row - 0.31, share * 100, 0.62, COLOURS[source])
                mark(bar, entry.place)
                said = f"{entry.name}, {SOURCES[source]}: {share:.1%}"
                panel.add(said, entry.place, [begin + share * 50], [row])
            begin += share * 100
    _percent(panel, "x")
    rows.name_parts(canvas, panel.axes, _names([found for _, found in known]))
    return Chart(canvas, FROM_WHERE, SHARES, [panel])


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
                mark(axes.bar(column - 0.31, begin, 0.62, share * 100, COLOURS[source]), entry.place)
                said = f"{sweep.axis_label} {drawing.plain(sweep.at(point))}, {SOURCES[source]}: {share:.1%}"
                panel.add(said, entry.place, [column], [begin + share * 50])
                begin += share * 100
        _percent(panel, "y")
        canvas.text(x + (cell - left - gap) / 2, y + height + 36, sweep.axis_label, colour=QUIET, align="center")
        panels.append(panel)
    rows.name_parts(
        canvas, panels[across - 1].axes, _names([p.hits for line in lines.values() for p in line if p.hits])
    )
    return Chart(canvas, FROM_WHERE, SHARES, panels, is_wide=across > 1)


def _percent(panel: Panel, which: str) -> None:
    drawing.numbers(panel.axes, which, 0, 100, form=lambda value: f"{value:g}%")
    panel.axes.without_grid()


def _names(found: Sequence[Hits]) -> dict[str, str]:
    """Return the colours that are used, by label."""
    return {label: COLOURS[name] for name, label in SOURCES.items() if any(getattr(each, name) for each in found)}


class Measure(NamedTuple):
    """A quantity that can be saved."""

    name: str
    unit: str
    scale: float
    of: Callable[[Saved], Saving | None]

    def text(self, value: float) -> str:
        """Format a value as it is shown."""
        shown = duration(abs(value)) if self.unit == "ms" and value else drawing.plain(abs(value))
        return f"-{shown}" if value < 0 else shown

    def ends(self, found: Saving) -> list[float]:
        """Return the interval as it is shown, if there is one."""
        return [end * self.scale for end in found.interval or ()]

    def scale_axis(self, axes: Axes, which: str, known: Sequence[Saving]) -> None:
        """Let an axis hold what was saved, with a line at zero."""
        reach = [0.0, *(value for one in known for value in (one.value * self.scale, *self.ends(one)))]
        pad = 0.08 * (max(reach) - min(reach)) or 1.0
        drawing.numbers(axes, which, min(reach) - pad / 2, max(reach) + pad, form=self.text)
        axes.rule(0, QUIET, is_upright=which == "x")


MEASURES = (
    Measure("mean TTFT saved", "ms", 1000.0, lambda saved: saved.ttft_s),
    Measure("prefill avoided (GPU-s)", "GPU-s", 1.0, lambda saved: saved.avoided_gpu_s),
    Measure("GPU-seconds saved", "GPU-s", 1.0, lambda saved: saved.gpu_s),
)
PALE: Any = {"width": 4.0, "alpha": 0.35}


def savings(shown: Comparison) -> Chart | None:
    """What each arm saved compared to the one with the smallest tiers; right is better."""
    known = [(entry, figures.saved) for entry, _, figures in shown.arms if figures.saved]
    measures = [one for one in MEASURES if any(one.of(saved) for _, saved in known)]
    if not measures:
        return None
    canvas, panels = rows.begin_rows([entry for entry, _ in known], [measure.name for measure in measures])
    for panel, measure in zip(panels, measures, strict=True):
        panel.x_unit = measure.unit
        for row, (entry, saved) in enumerate(known):
            if (found := measure.of(saved)) is None:
                panel.axes.note(0, row, "n/a", QUIET)
                continue
            value, ends = found.value * measure.scale, measure.ends(found)
            mark(panel.axes.plot(ends, [row] * len(ends), colour=entry.colour, **PALE), entry.place)
            mark(panel.axes.plot([value], [row], "o", colour=entry.colour, size=6), entry.place)
            said = " to ".join(measure.text(float(f"{end:.3g}")) for end in ends)
            said = f"{measure.text(float(f'{value:.4g}'))}{f' ({said})' * bool(said)}"
            panel.add(f"{entry.name}, {measure.name}: {said}", entry.place, [value], [row])
        measure.scale_axis(panel.axes, "x", [found for _, saved in known if (found := measure.of(saved))])
    every = [saved for _, saved in known]
    others = dict.fromkeys(shown.key[one.against].name for one in every)
    text = f"Against {' and '.join(others)}{', each with otherwise the same settings' * (len(others) > 1)}; "
    text += f"right of 0 is better. {_reading(every)}"
    if not any(one.ttft_s for one in every):
        text += " TTFT is not compared, because a queue grew."
    if any(one.interval for saved in every for measure in measures if (one := measure.of(saved))):
        text += " Pale: 95% intervals, paired by request for TTFT and over the repeats for GPU-seconds."
    return Chart(canvas, SAVED, text, panels, is_wide=True)


def savings_swept(sweep: Swept) -> Chart | None:
    """What larger tiers saved compared to the smallest of each line."""
    if sweep.axis is None or not is_size(sweep.axis) or not any(point.tiers for point in sweep.points):
        return None
    lines = {
        name: [(point, saved) for point in line if (saved := tiers.saved(line[0].name, line[0].spent, point.spent))]
        for name, line in sweep.lines.items()
    }
    every = [saved for line in lines.values() for _, saved in line]
    measures = [one for one in MEASURES if any(one.of(saved) for saved in every)]
    if not any(found.value for saved in every for one in measures if (found := one.of(saved))):
        return None
    names, left = drawing.widest(entry.name for entry in sweep.key.values()) + 18, 66
    height, cell = max(220, LINE * len(lines)), WIDE / len(measures)
    canvas = Canvas(height + 72, is_wide=True)
    panels = []
    for place, measure in enumerate(measures):
        x = place * cell + left
        panel = Panel(
            canvas.axes(x, 24, cell - left - names, height, heading=measure.name), sweep.axis_label, measure.unit
        )
        along(sweep, panel.axes, canvas.width)
        measure.scale_axis(panel.axes, "y", [found for saved in every if (found := measure.of(saved))])
        canvas.label_ends(panel.axes, _curves(sweep, panel, lines, measure))
        canvas.text(x + (cell - left - names) / 2, 24 + height + 36, sweep.axis_label, colour=QUIET, align="center")
        panels.append(panel)
    base = drawing.plain(min(sweep.at(point) for point in sweep.points))
    text = f"Against {sweep.axis_label} {base}; higher is better. Hollow: a queue grew. {_reading(every)}"
    if any(one.interval for saved in every for measure in measures if (one := measure.of(saved))):
        text += " Pale: 95% intervals over the repeats."
    return Chart(canvas, SAVED, text, panels, is_wide=True)


def _curves(
    sweep: Swept, panel: Panel, lines: dict[str, list[tuple[Point, Saved]]], measure: Measure
) -> list[tuple[float, float, KeyEntry]]:
    """Draw what each line saved; return where the curves end."""
    ends = []
    for name, line in lines.items():
        entry, spots = sweep.key[name], []
        for point, saved in line:
            if found := measure.of(saved):
                x, is_good = sweep.at(point), point.is_stable and line[0][0].is_stable
                spots.append((x, found.value * measure.scale, is_good))
                interval = measure.ends(found)
                mark(panel.axes.plot([x] * len(interval), interval, colour=entry.colour, **PALE), entry.place)
        if spots:
            xs, ys, _ = zip(*spots, strict=True)
            drawing.line(panel.axes, entry, xs, ys, width=1.4)
            dots(panel.axes, entry, spots)
            panel.add(entry.name, entry.place, xs, ys)
            ends.append((xs[-1], ys[-1], entry))
    return ends


def _reading(saved: Sequence[Saved]) -> str:
    runs = "one run" if saved[0].gpu_s.repeats == 1 else f"the mean of {saved[0].gpu_s.repeats} runs"
    text = f"The values are from {runs} of {saved[0].requests:,} requests each. GPU-seconds: {tiers.FORMULAS['gpu_s']}."
    if any(one.avoided_gpu_s for one in saved):
        text += f" Prefill avoided: {tiers.FORMULAS['avoided']}."
    return text.strip()
