"""The chart of load curves: what throughput costs in TTFT and between tokens, with the knee and the limits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from reports.charts import drawing
from reports.charts.drawing import LINE, QUIET, Canvas, Chart, Panel, duration, mark
from reports.figures.conditions import Condition
from reports.key import KeyEntry
from reports.sweep.curve import LoadCurve, load_in_words, tokens_per_s
from reports.sweep.points import Point, Quantiles

HEIGHT = 280
LEFT, BELOW = 58, 78
RING = 14.0


class Shown(NamedTuple):
    """A latency that a panel shows."""

    name: str
    heading: str
    limited: tuple[str, ...]
    """The metrics whose limits apply to it."""
    of: Callable[[Point], Quantiles]


PANELS = (
    Shown("TTFT", "Time to first token (TTFT)", ("ttft",), lambda point: point.ttft_sched),
    Shown("ITL", "Time between tokens (ITL)", ("itl", "tpot"), lambda point: point.itl),
)


def load_curves(lines: Sequence[tuple[LoadCurve, KeyEntry]], limits: Sequence[Condition]) -> Chart | None:
    """Draw latency against throughput along the load, a line for each curve; None if there is nothing to compare."""
    known = [(curve.answered, entry) for curve, entry in lines if len(curve.answered.points) > 1]
    if not known:
        return None
    canvas = Canvas(HEIGHT + BELOW, is_wide=True)
    names = drawing.widest(entry.name for _, entry in known) + 18 if len(known) > 1 else 24
    cell = canvas.width / len(PANELS)
    most = max(tokens_per_s(point) for curve, _ in known for point in curve.points)
    panels = []
    for place, shown in enumerate(PANELS):
        left, width = place * cell + LEFT, cell - LEFT - names
        axes = canvas.axes(left, 24, width, max(HEIGHT, LINE * len(known)), heading=shown.heading)
        panel = Panel(axes, "tokens/s", "ms")
        own = [limit for limit in limits if limit.metric in shown.limited and limit.statistic is not None]
        times = [value for curve, _ in known for point in curve.points for value in _both(shown.of(point)) if value]
        drawing.numbers(axes, "x", 0, 1.08 * most)
        drawing.times(axes, "y", [1000 * value for value in [*times, *(limit.value for limit in own)]])
        ends = [end for curve, entry in known for end in _draw(canvas, panel, shown, curve, entry, bool(limits))]
        for limit in own:
            canvas.label_limit(axes, 1000 * limit.value, f"limit on {limit.statistic}: {duration(1000 * limit.value)}")
        if len(known) > 1:
            canvas.label_ends(axes, ends)
        canvas.text(left + width / 2, HEIGHT + 64, "output tokens/s", colour=QUIET, align="center")
        panels.append(panel)
    return Chart(
        canvas, "What does throughput cost?", _reading(known[0][0], has_limits=bool(limits)), panels, is_wide=True
    )


def _both(figures: Quantiles) -> tuple[float | None, float | None]:
    return figures.p50, figures.p95


def _reading(curve: LoadCurve, *, has_limits: bool) -> str:
    unit = "streams" if curve.axis == "concurrency" else "requests/s"
    filled = " Filled: all limits hold; hollow: one is missed, or it is not known." if has_limits else ""
    return f"Lower right is better. Solid: median; dashed: 95th percentile; numbers: {unit}. Ring: the lowest load with 95% of the highest throughput.{filled}"


def _draw(
    canvas: Canvas, panel: Panel, shown: Shown, curve: LoadCurve, entry: KeyEntry, has_limits: bool
) -> list[tuple[float, float, KeyEntry]]:
    """Draw a curve's median and 95th percentile; return the end of the median."""
    ends = []
    for place, share in enumerate(("p50", "p95")):
        spots = [
            (tokens_per_s(point), 1000 * value, point)
            for point, value in ((point, _both(shown.of(point))[place]) for point in curve.points)
            if value
        ]
        if not spots:
            continue
        xs, ys = [spot[0] for spot in spots], [spot[1] for spot in spots]
        dashes = (4.0, 3.0) if place else ()
        drawing.line(panel.axes, entry, xs, ys, width=1.0 if place else 1.6, dashes=dashes)
        _dots(panel, entry, spots, has_limits=has_limits)
        panel.add(f"{entry.name} {share}", entry.place, xs, ys)
        if not place:
            _mark_loads(canvas, panel, curve, entry, spots)
            ends.append((xs[-1], ys[-1], entry))
    return ends


def _dots(panel: Panel, entry: KeyEntry, spots: Sequence[tuple[float, float, Point]], *, has_limits: bool) -> None:
    """Draw dots, filled where all limits hold."""
    for x, y, point in spots:
        face = entry.colour if not has_limits or point.state == "met" else "none"
        mark(panel.axes.plot([x], [y], entry.marker, colour=entry.colour, face=face, size=5.0), entry.place)


def _mark_loads(
    canvas: Canvas, panel: Panel, curve: LoadCurve, entry: KeyEntry, spots: Sequence[tuple[float, float, Point]]
) -> None:
    """Write the load beside each dot that has room, and draw a ring round the knee."""
    knee, before = curve.knee, float("-inf")
    for x, y, point in spots:
        right, down = canvas.place(panel.axes, x, y)
        if point is knee:
            ring = panel.axes.plot([x], [y], "o", colour=entry.colour, face="none", size=RING, edge_width=1.6)
            mark(ring, entry.place)
        text = load_in_words(curve.axis, curve.at(point)).partition(" ")[0]
        if right - before > drawing.text_width(text) + 6 or point is knee:
            canvas.text(right, down - 12, text, colour=entry.colour, align="center", arm=entry.place)
            before = right
