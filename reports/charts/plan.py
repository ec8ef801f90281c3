"""The charts of a plan: what each layout needs and how close it is to the limits, what more load needs, how sure it is."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from reports.charts import drawing
from reports.charts.drawing import HALF, LIMIT, QUIET, REST, WIDE, Canvas, Chart, Panel
from reports.figures.cells import milliseconds
from reports.figures.outcomes import subject
from reports.key import PALETTE, Key, key_of

if TYPE_CHECKING:
    from reports.capacity.answer import PlanAnswer, Ranked

BEST = PALETTE[0][0]
MOST = 16
"""Layouts that are drawn."""
ROW = 24
WIDEST = 44
"""Width of the names of layouts, in characters. They stand beside a wide chart and differ in many settings."""
MOST_SHOWN = 200.0
"""Intervals are drawn up to twice their limit (%): failed requests make them infinite."""


def charts(answer: "PlanAnswer", key: Key) -> dict[str, Chart]:
    """Draw the charts that say something; the key has the layouts that have a colour on the page."""
    makers: dict[str, Callable[[], Chart | None]] = {
        "layouts": lambda: layouts(answer, key),
        "loads": lambda: loads(answer),
        "sureness": lambda: sureness(answer),
    }
    return {name: chart for name, make in makers.items() if (chart := make()) is not None}


def layouts(answer: "PlanAnswer", key: Key) -> Chart | None:
    """GPUs of each layout, and how much of each limit it uses."""
    shown = [layout for layout in answer.layouts if layout.outcomes and (layout.gpus or layout.at_least)][:MOST]
    if len(shown) < 2:
        return None
    names = key_of([layout.name for layout in shown], widest=WIDEST)
    limits = [limit for limit in answer.limits if any(_used(layout, limit) for layout in shown)][:3]
    left = drawing.widest(entry.name for entry in names.values()) + 14
    height, gap = ROW * len(shown) + 8, 44
    canvas = Canvas(height + 54, is_wide=True)
    width = (WIDE - left - 30 - gap * len(limits)) / (len(limits) + 1)
    panels = []
    for place, heading in enumerate(("GPUs", *(f"{subject(limit)}, share of its limit" for limit in limits))):
        axes = canvas.axes(left + place * (width + gap), 24, width, height, heading=heading)
        drawing.categories(axes, "y", [""] * len(shown))
        panels.append(Panel(axes))
    for row, layout in enumerate(shown):
        _, y = canvas.place(panels[0].axes, 0, row)
        canvas.text(0, y + 4, names[layout.name].name, colour=_colour(layout, key))
    _gpus(canvas, panels[0], shown, key)
    for panel, limit in zip(panels[1:], limits, strict=True):
        _uses(panel, shown, limit, key)
    text = (
        "Cheapest first. Filled: met the limits when simulated; pale: needs at least that many GPUs. Left of the dashed line, "
        "a limit is met."
    )
    return Chart(canvas, "Which layout needs the fewest GPUs, and what binds it?", text, panels, is_wide=True)


def _colour(layout: "Ranked", key: Key) -> str:
    return key[layout.name].colour if layout.name in key else QUIET


def _used(layout: "Ranked", limit: str) -> float | None:
    """Return how much of a limit a layout uses (%)."""
    known = next((one for one in layout.outcomes if one.limit == limit and not one.is_share), None)
    return None if known is None or known.margin is None else (1 - known.margin) * 100


def _gpus(canvas: Canvas, panel: Panel, shown: "list[Ranked]", key: Key) -> None:
    counts = [layout.gpus or layout.at_least or 0 for layout in shown]
    for row, (layout, count) in enumerate(zip(shown, counts, strict=True)):
        is_met = layout.gpus is not None
        panel.axes.bar(0, row - 0.31, count, 0.62, _colour(layout, key) if is_met else REST)
        word = _count(layout, count)
        panel.add(f"{layout.name}: {word} GPUs", None, [float(count)], [row])
    drawing.numbers(panel.axes, "x", 0, max(counts) * 1.22, most=4, whole=True)
    for row, (layout, count) in enumerate(zip(shown, counts, strict=True)):
        x, y = canvas.place(panel.axes, count, row)
        canvas.text(x + 5, y + 4, _count(layout, count), colour=QUIET)


def _count(layout: "Ranked", count: int) -> str:
    """Write a number of GPUs, or the bound on it that is known."""
    if layout.gpus is None:
        return f"over {count - 1}"
    return f"at most {count}" if layout.is_upper_bound else f"{count}"


def _uses(panel: Panel, shown: "list[Ranked]", limit: str, key: Key) -> None:
    values = [(row, layout, used) for row, layout in enumerate(shown) if (used := _used(layout, limit)) is not None]
    drawing.logarithm(panel.axes, "x", [100.0, *(used for _, _, used in values)], lambda value: f"{value:g}%", most=5)
    drawing.limit_line(panel.axes, 100.0, is_upright=True)
    for row, layout, used in values:
        face = _colour(layout, key) if used <= 100 else "none"
        panel.axes.plot([used], [row], "o", colour=_colour(layout, key), face=face, size=6)
        panel.add(f"{layout.name}: {used:.3g}% of {limit}", None, [used], [row])


def loads(answer: "PlanAnswer") -> Chart | None:
    """GPUs by load."""
    known = [(at.load, at.gpus, at) for at in answer.loads if at.gpus is not None]
    if len({gpus for _, gpus, _ in known}) < 2:
        return None
    notes = {at.load: f"{gpus}" for _, gpus, at in known}
    canvas = Canvas(254)
    axes = canvas.axes(46, 24, HALF - 46 - 40, 180, heading="GPUs")
    panel = Panel(axes, "x the load", "GPUs")
    first, last = known[0][0], known[-1][0]
    pad = 0.06 * (last - first)
    drawing.fixed(axes, "x", first - pad, last + pad, {load: f"{load:g}x" for load, _, _ in known})
    drawing.numbers(axes, "y", 0, max(gpus for _, gpus, _ in known) * 1.2, whole=True, most=4)
    axes.plot([load for load, _, _ in known], [gpus for _, gpus, _ in known], marker="o", colour=BEST, size=7)
    panel.add("GPUs", None, [float(load) for load, _, _ in known], [float(gpus) for _, gpus, _ in known])
    for load, gpus, _ in known:
        x, y = canvas.place(axes, load, gpus)
        canvas.text(x, y - 9, notes[load], align="center")
    canvas.text(46 + (HALF - 86) / 2, 246, "times the workload's rate", colour=QUIET, align="center")
    layouts_by_load = "; ".join(f"{at.load:g}x: {at.layout}" for _, _, at in known)
    unmet = [f"{at.load:g}x" for at in answer.loads if at.gpus is None]
    text = f"The fewest GPUs that met the limits. {layouts_by_load}."
    if unmet:
        text += f" None found for {', '.join(unmet)}."
    return Chart(canvas, "What does more load take?", text, [panel])


def sureness(answer: "PlanAnswer") -> Chart | None:
    """Each limited metric as a share of its limit, with the interval of the sample and the error of the model."""
    known = []
    for sure in answer.sureness:
        outcome = next(
            (one for layout in answer.layouts[:1] for one in layout.outcomes if one.limit == sure.limit), None
        )
        if outcome is not None and not outcome.is_share and outcome.margin is not None and outcome.margin < 1:
            known.append((sure, sure.value / (1 - outcome.margin)))
    if not known:
        return None
    left = drawing.widest(sure.limit for sure, _ in known) + 14
    canvas = Canvas(34 * len(known) + 62)
    axes = canvas.axes(left, 24, HALF - left - 24, 34 * len(known) + 8, heading="share of the limit")
    drawing.categories(axes, "y", [""] * len(known))
    panel = Panel(axes)
    reach = [100.0]
    for row, (sure, limit) in enumerate(known):
        value = sure.value / limit * 100
        if sure.low is not None and sure.high is not None:
            low, high = sure.low / limit * 100, min(sure.high / limit * 100, MOST_SHOWN)
            axes.plot([low, high], [row, row], colour=BEST, width=6, alpha=0.35)
            reach += [low, high]
        if sure.real_low is not None and sure.real_high is not None:
            low, high = sure.real_low / limit * 100, min(sure.real_high / limit * 100, MOST_SHOWN)
            axes.plot([low, high], [row, row], colour=QUIET, width=1, marker="|", size=8)
            reach += [low, high]
        axes.plot([value], [row], "o", colour=BEST, size=7)
        reach.append(value)
        panel.add(f"{sure.limit}: {milliseconds(sure.value)} ms, {value:.3g}% of the limit", None, [value], [row])
        _, y = canvas.place(axes, 0, row)
        canvas.text(0, y + 4, sure.limit)
    pad = 0.08 * (max(reach) - min(reach)) or 5.0
    drawing.numbers(axes, "x", max(min(reach) - pad, 0), max(reach) + pad, form=lambda value: f"{value:g}%")
    axes.rule(100, LIMIT, width=1.2, dashes=(4, 2), is_upright=True)
    text = "Dot: the simulated value. Pale: its 95% interval. Thin: where 9 of 10 real values are, as far as measurements say. Right of the dashed line, the limit is missed."
    return Chart(canvas, "How sure is it that the limits are met?", text, [panel])
