"""Charts in which each arm has a row: differences, percentiles, and where TTFT goes."""

from collections.abc import Mapping, Sequence

from reports.charts import drawing
from reports.charts.axes import Axes
from reports.charts.comparison import Comparison
from reports.charts.drawing import QUIET, REST, Canvas, Chart, Panel, duration, mark
from reports.figures import metrics, split
from reports.figures.cells import milliseconds
from reports.figures.conditions import METRICS
from reports.key import KeyEntry

ROW = 26
"""Units between the rows of two arms."""
PART_COLOURS = {
    "queue": "#8d8d8d",
    "prefill": "#6a5acd",
    "decode_queue": "#c8b45e",
    "transfer": "#e0703a",
    "first_step": "#2a9d8f",
}
"""Colours of the parts of TTFT; none is the colour of an arm."""
SHOWN = ("ttft_sched", "tpot", "e2e_sched")


def differences(shown: Comparison) -> Chart | None:
    """Each arm's difference to the baseline, with its interval: left is better."""
    arms = [entry for entry, _, _ in shown.arms if entry.arm != shown.summary.baseline]
    metric_names = [name for name in SHOWN if any(_pairs(shown, entry, name) for entry in arms)]
    if not metric_names:
        return None
    canvas, panels = begin_rows(arms, [metrics.LABELS[name] for name in metric_names])
    for panel, name in zip(panels, metric_names, strict=True):
        panel.x_unit = "%"
        reach = [0.0]
        for row, entry in enumerate(arms):
            pairs = _pairs(shown, entry, name)
            for place, (statistic, (low, value, high, verdict)) in enumerate(pairs.items()):
                offset = (place - (len(pairs) - 1) / 2) * 0.3
                face = "none" if verdict == "inconclusive" else entry.colour
                marker = "o" if statistic == "mean" else "s"
                mark(panel.axes.plot([low, high], [row + offset] * 2, colour=entry.colour, width=1.4), entry.place)
                mark(
                    panel.axes.plot([value], [row + offset], marker, colour=entry.colour, face=face, size=6),
                    entry.place,
                )
                word = f"{entry.name} {statistic}: {value:+.1f}% [{low:+.1f}, {high:+.1f}], {verdict}"
                panel.add(word, entry.place, [value], [row + offset])
                reach += [low, high]
        pad = 0.06 * (max(reach) - min(reach)) or 1.0
        drawing.numbers(
            panel.axes, "x", min(reach) - pad, max(reach) + pad, form=lambda value: f"{value:+g}%" if value else "0"
        )
        panel.axes.rule(0, QUIET, is_upright=True)
    base = shown.key[shown.summary.baseline].name
    text = (
        "Paired by request, with 95% intervals: left of 0 is better. Circle: mean; square: 90th percentile; hollow: may be "
        "noise."
    )
    if grew := [entry.name for entry in arms if not any(_pairs(shown, entry, name) for name in SHOWN)]:
        text += f" Not compared, because the queue grew or too few requests were answered: {', '.join(grew)}."
    return Chart(canvas, f"How much better than {base} is each arm?", text, panels, is_wide=True)


def _pairs(shown: Comparison, entry: KeyEntry, name: str) -> dict[str, tuple[float, float, float, str]]:
    """Return an arm's differences to the baseline in percent: low, value, high and the verdict, by statistic."""
    found: dict[str, tuple[float, float, float, str]] = {}
    for statistic in ("mean", "p90"):
        pair = shown.summary.difference(entry.arm, name, statistic)
        if pair is not None and pair.verdict != "unstable":
            scale = pair.relative / pair.mean * 100 if pair.mean else 0.0
            found[statistic] = (pair.low * scale, pair.mean * scale, pair.high * scale, pair.verdict)
    return found


def percentiles(shown: Comparison) -> Chart | None:
    """Mean and percentiles of each arm in a row, with their intervals and the limits."""
    names = [name for name in SHOWN if any(figures.metric(name).mean for _, _, figures in shown.arms)]
    if not names:
        return None
    entries = [entry for entry, _, _ in shown.arms]
    canvas, panels = begin_rows(entries, [metrics.LABELS[name] for name in names])
    markers = {"mean": "|", "p50": "o", "p90": "s", "p99": "D"}
    for panel, name in zip(panels, names, strict=True):
        panel.x_unit = "ms"
        reach: list[float] = []
        for row, (entry, _, figures) in enumerate(shown.arms):
            metric = figures.metric(name)
            known = {key: value * 1000 for key in markers if (value := metric.at(key)) is not None}
            if not known:
                at = min(reach, default=1.0)
                panel.axes.note(at, row, "n/a", QUIET)
                continue
            mark(
                panel.axes.plot([min(known.values()), max(known.values())], [row] * 2, colour=REST, width=1),
                entry.place,
            )
            for key, value in known.items():
                interval = getattr(metric.intervals, key, None)
                if interval is not None:
                    low, high = interval[0] * 1000, interval[1] * 1000
                    mark(
                        panel.axes.plot([low, high], [row] * 2, colour=entry.colour, width=4, alpha=0.35),
                        entry.place,
                    )
                    reach += [low, high]
                face = entry.colour if key != "p50" else "none"
                size = 12 if key == "mean" else 6
                mark(
                    panel.axes.plot(
                        [value],
                        [row],
                        markers[key],
                        colour=entry.colour,
                        face=face,
                        size=size,
                        edge_width=1.6,
                    ),
                    entry.place,
                )
                panel.add(f"{entry.name} {key}: {milliseconds(value / 1000)} ms", entry.place, [value], [row])
                reach.append(value)
        reach += [limit.value * 1000 for limit in shown.limits_of(name)]
        drawing.times(panel.axes, "x", reach, most=5)
        for limit in shown.limits_of(name):
            drawing.limit_line(panel.axes, limit.value * 1000, is_upright=True)
    text = "Bar: mean; circle: median; square: 90th percentile; diamond: 99th percentile; pale: 95% interval."
    if any(shown.limits_of(name) for name in names):
        text += (
            f" Dashed: limits ({', '.join(str(limit) for limit in shown.limits if METRICS[limit.metric] in names)})."
        )
    if grew := [entry.name for entry, _, figures in shown.arms if not figures.stability.is_stable]:
        text += f" No intervals, because the queue grew: {', '.join(grew)}."
    return Chart(canvas, "How long do requests take, and how sure is that?", text, panels, is_wide=True)


def begin_rows(
    entries: Sequence[KeyEntry],
    headings: Sequence[str],
    *,
    notes: Sequence[str] = (),
    is_wide: bool = True,
) -> tuple[Canvas, list[Panel]]:
    """Start a chart with a row for each arm and, side by side, a panel for each heading; notes stand to the right of rows."""
    height = ROW * len(entries) + 8
    canvas = Canvas(height + 54, is_wide=is_wide)
    left = drawing.widest(entry.name for entry in entries) + 14
    gap = 34
    right = drawing.widest(notes) + 20 if notes else 24
    width = (canvas.width - left - right - gap * (len(headings) - 1)) / len(headings)
    panels = []
    for place, heading in enumerate(headings):
        axes = canvas.axes(left + place * (width + gap), 24, width, height, heading=heading)
        drawing.categories(axes, "y", [""] * len(entries))
        panels.append(Panel(axes))
    for row, entry in enumerate(entries):
        _, y = canvas.place(panels[0].axes, 0, row)
        canvas.text(0, y + 4, entry.name, colour=entry.colour, arm=entry.place)
        if notes:
            canvas.text(canvas.width - right + 12, y + 4, notes[row], colour=QUIET, arm=entry.place)
    return canvas, panels


def ttft_split(shown: Comparison) -> Chart | None:
    """The parts of the mean TTFT, a stacked bar per arm, in the order in which requests meet them."""
    known = [(entry, found) for entry, _, figures in shown.arms if (found := figures.split)]
    if not known:
        return None
    canvas, (panel,) = begin_rows([entry for entry, _ in known], [""], is_wide=False)
    panel.x_unit = "ms"
    axes = panel.axes
    longest = max(found.ttft for _, found in known) * 1000
    for row, (entry, found) in enumerate(known):
        begin = 0.0
        for part, seconds in found.parts.items():
            width = seconds * 1000
            if width > 0:
                mark(axes.bar(begin, row - 0.31, width, 0.62, PART_COLOURS[part]), entry.place)
                panel.add(
                    f"{entry.name}, {split.LABELS[part]}: {milliseconds(seconds)} ms",
                    entry.place,
                    [begin + width / 2],
                    [row],
                )
            begin += width
    drawing.numbers(axes, "x", 0, longest * 1.2 or 1.0, form=duration)
    axes.without_grid()
    parts = [part for part in split.PARTS if any(found.parts.get(part) for _, found in known)]
    for row, (entry, found) in enumerate(known):
        x, y = canvas.place(axes, found.ttft * 1000, row)
        canvas.text(x + 5, y + 4, duration(float(f"{found.ttft * 1000:.3g}")), colour=QUIET, arm=entry.place)
    name_parts(canvas, axes, {split.LABELS[part]: PART_COLOURS[part] for part in parts})
    text = "; ".join(f"{split.LABELS[part]}: {split.PARTS[part]}" for part in parts)
    return Chart(
        canvas,
        "Where does the time to the first token go?",
        f"Means, measured from when the request was sent. {text[:1].upper()}{text[1:]}.",
        [panel],
    )


def name_parts(canvas: Canvas, axes: Axes, colours: Mapping[str, str]) -> None:
    """Name the parts of bars in a line above them, each after its colour."""
    x = axes.right
    for name, colour in reversed(list(colours.items())):
        x -= drawing.text_width(name)
        canvas.text(x, 15, name, colour=QUIET)
        x -= drawing.text_width("■ ")
        canvas.text(x, 15, "■", colour=colour)
        x -= 12
