"""The charts of a sweep, and of a search: what meets the limits, and what it costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foundation.settings import short_value
from reports.charts import drawing
from reports.charts.axes import Axes
from reports.charts.curve import load_curves
from reports.charts.drawing import HALF, LIMIT, LINE, QUIET, WIDE, Canvas, Chart, Panel, duration, mark
from reports.charts.rows import begin_rows
from reports.figures.conditions import METRICS, Condition
from reports.figures.metrics import LABELS
from reports.key import Key, KeyEntry, key_of
from reports.sweep.curve import AXES, LoadCurve
from reports.sweep.points import Point, SearchResult

Number = Callable[[Point], float | None]
LOADS = ("rate_scale", "rate", "concurrency")
"""Settings of the load; for these, more is better."""
FLAT = 0.05
"""Figures within this share of the highest are alike."""


class ShownFigure(NamedTuple):
    """A figure of each point: a time (s) or a share of the requests."""

    title: str
    of: Number
    limit: float | None
    is_share: bool = False

    @property
    def unit(self) -> str:
        """The unit in which it is shown."""
        return "%" if self.is_share else "ms"

    @property
    def times(self) -> float:
        """The factor by which a value is multiplied when it is shown."""
        return 100.0 if self.is_share else 1000.0

    def at(self, point: Point) -> float | None:
        """Return the value shown for a point; a logarithmic axis cannot show times of zero."""
        value = self.of(point)
        return value * self.times if value or (value is not None and self.is_share) else None

    def text(self, shown: float) -> str:
        """Format a value as it is shown."""
        return f"{drawing.plain(shown)}%" if self.is_share else duration(shown)

    def scale(self, axes: Axes, which: str, values: Sequence[float]) -> None:
        """Let an axis hold values that are shown, and its limit."""
        if self.is_share:
            drawing.numbers(axes, which, 0, 104, form=self.text)  # a dot at 100% is whole
        else:
            drawing.times(axes, which, [*values, self.limit * self.times] if self.limit else values)


@dataclass(frozen=True)
class Swept:
    """The points of a sweep, in lines."""

    lines: dict[str, list[Point]]
    """Lines by the settings that distinguish them, apart from `axis`."""
    key: Key
    axis: str | None
    """The setting along a line: the number with the most values; None if no number is varied."""
    limits: Sequence[Condition]

    @property
    def points(self) -> list[Point]:
        """All points."""
        return [point for line in self.lines.values() for point in line]

    @property
    def axis_label(self) -> str:
        """What the axis is called."""
        if self.has_gpus:
            return "GPUs"
        return (self.axis or "").removeprefix("num_").replace("_", " ")

    @property
    def has_gpus(self) -> bool:
        """Whether the axis counts workers with several GPUs each, so that it shows GPUs instead."""
        return self.axis is not None and "workers" in self.axis and any(p.gpus != p.workers for p in self.points)

    def at(self, point: Point) -> float:
        """Return where a point is on the axis."""
        return float(point.gpus if self.has_gpus else point.changes[self.axis or ""])


def swept(points: Sequence[Point], limits: Sequence[Condition]) -> Swept:
    """Put points in lines, in their order: along the number with the most values, one line for each combination of the rest."""
    values: dict[str, set[Any]] = {}
    for point in points:
        for name, value in point.changes.items():
            values.setdefault(name, set()).add(value)
    counts = {
        name: len(its)
        for name, its in values.items()
        if len(its) > 1
        and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in its)
        and all(name in point.changes for point in points)
    }
    axis = max(counts, key=lambda name: counts[name], default=None)
    varied = [name for name, its in values.items() if len(its) > 1 and name != axis]
    lines: dict[str, list[Point]] = {}
    for point in points:
        lines.setdefault(_name(point, varied), []).append(point)
    return _along_axis(lines, axis, limits)


def of_search(rows: Sequence[SearchResult], points: Sequence[Point], limits: Sequence[Condition]) -> Swept:
    """Put what a search tried in lines along the setting searched for, one for each combination, in their order."""
    find = rows[0].find
    lines = {
        row.arm: [
            one for one in points if {name: of for name, of in one.changes.items() if name != find} == row.changes
        ]
        for row in rows
    }
    return _along_axis(lines, find, limits)


def _along_axis(lines: dict[str, list[Point]], axis: str | None, limits: Sequence[Condition]) -> Swept:
    found = Swept(lines, key_of(list(lines)), axis, limits)
    if axis is not None:
        for line in lines.values():
            line.sort(key=found.at)
    return found


def _name(point: Point, varied: Sequence[str]) -> str:
    """Name a line by the settings that are varied; the mode comes first, without its setting's name."""
    parts = [
        str(point.changes[name]) if name == "router_mode" else f"{name} {short_value(point.changes[name])}"
        for name in varied
        if name in point.changes
    ]
    return ", ".join(parts) or str(point.changes.get("router_mode", "all"))


def charts(sweep: Swept, found: Sequence[SearchResult]) -> dict[str, Chart]:
    """Draw the charts that are not empty."""
    makers: dict[str, Callable[[], Chart | None]] = {
        "curve": lambda: load_curves(list(_curves(sweep)), sweep.limits),
        "found": lambda: searched(found, sweep.key),
        "limits": lambda: by_axis(sweep),
        "points": lambda: by_row(sweep),
        "cost": lambda: cost(sweep),
        "pareto": lambda: pareto(sweep),
        "throughput": lambda: throughput(sweep),
    }
    drawn = {name: chart for name, make in makers.items() if (chart := make()) is not None}
    if "curve" in drawn:
        drawn.pop("throughput", None)  # its axis
    return drawn


def _curves(sweep: Swept) -> Iterator[tuple[LoadCurve, KeyEntry]]:
    """Yield each line along the load; nothing along another axis."""
    if sweep.axis in AXES:
        for name, line in sweep.lines.items():
            valid = [point for point in line if not point.notes]  # others are no measure of the server
            yield LoadCurve(name, sweep.axis, valid or line), sweep.key[name]


def searched(rows: Sequence[SearchResult], key: Key) -> Chart | None:
    """What each combination needs or carries: between the last value that met the limits and the first that did not."""
    known = [row for row in rows if row.tried]
    if not known:
        return None
    find = rows[0].find.replace("_", " ")
    notes = [_found_text(row) for row in rows]
    canvas, (panel,) = begin_rows([key[row.arm] for row in rows], [find], notes=notes)
    axes = panel.axes
    values = [value for row in known for value in row.tried]
    drawing.numbers(axes, "x", 0, max(values) * 1.08, whole=all(float(value).is_integer() for value in values))
    for place, row in enumerate(rows):
        entry = key[row.arm]
        if len(row.tried) == 2:
            mark(axes.plot(row.tried, [place, place], colour=entry.colour, width=1.2), entry.place)
        if row.met is not None:
            mark(axes.plot([row.met], [place], "o", colour=entry.colour, size=9), entry.place)
            panel.add(
                f"{entry.name} meets the limits at {drawing.plain(row.met)}", entry.place, [float(row.met)], [place]
            )
        if row.missed_at is not None:
            mark(axes.plot([row.missed_at], [place], "x", colour=LIMIT, size=7, edge_width=1.8), entry.place)
            panel.add(
                f"{entry.name} misses a limit at {drawing.plain(row.missed_at)}",
                entry.place,
                [float(row.missed_at)],
                [place],
            )
    ways = {row.sense for row in rows if row.sense}
    way = f"{ways.pop()} " if len(ways) == 1 else ""
    text = "Dot: all limits are met. Cross: the nearest value tried that misses one."
    return Chart(canvas, f"What is the {way}{find} that meets the limits?", text, [panel], is_wide=True)


def _found_text(row: SearchResult) -> str:
    if row.met is None:
        return "none tried"
    if row.is_at_end:
        return f"{drawing.plain(row.met)}, the end tried"
    return drawing.plain(row.met)


def by_axis(sweep: Swept) -> Chart | None:
    """The limited metrics along the axis, with their limits and the first, or last, point that meets them all."""
    if sweep.axis is None or len({sweep.at(point) for point in sweep.points}) < 2:
        return None
    shown = [figure for figure in _limited(sweep) if _varies(sweep.points, figure)]
    if not shown:
        return None
    across = min(len(shown), 3)
    names = drawing.widest(entry.name for entry in sweep.key.values()) + 18
    height = max(220, LINE * len(sweep.lines))
    canvas = Canvas(-(-len(shown) // across) * (height + 72), is_wide=across > 1)
    cell, left = canvas.width / across, 58
    answers = [point for line in sweep.lines if (point := _answer(sweep, line)) is not None]
    panels = []
    for place, figure in enumerate(shown):
        x, y = place % across * cell + left, place // across * (height + 72) + 24
        axes = canvas.axes(x, y, cell - left - names, height, heading=figure.title)
        panel = Panel(axes, sweep.axis_label, figure.unit)
        along(sweep, axes, canvas.width)
        figure.scale(axes, "y", [value for point in sweep.points if (value := figure.at(point)) is not None])
        limit = figure.limit * figure.times if figure.limit else None
        if limit:
            axes.band(limit, axes.y.low if figure.is_share else axes.y.high, LIMIT, alpha=0.07)
        ends = _lines(sweep, panel, figure, answers)
        if limit:
            canvas.label_limit(axes, limit, f"limit {figure.text(limit)}")
        canvas.label_ends(axes, ends)
        canvas.text(x + (cell - left - names) / 2, y + height + 36, sweep.axis_label, colour=QUIET, align="center")
        panels.append(panel)
    title = (
        f"{_which(sweep)} the limits?"
        if sweep.limits
        else f"What does {'the ' * _is_count(sweep)}{_axis_name(sweep)} change?"
    )
    return Chart(canvas, title, _reading(sweep) + _answers(sweep, answers), panels, is_wide=across > 1)


def _lines(
    sweep: Swept, panel: Panel, figure: ShownFigure, answers: Sequence[Point]
) -> list[tuple[float, float, KeyEntry]]:
    """Draw a figure along the axis, with a ring round each answer; return the ends of the lines."""
    ends = []
    for name, line in sweep.lines.items():
        entry = sweep.key[name]
        spots = [(sweep.at(point), value, point) for point in line if (value := figure.at(point)) is not None]
        if not spots:
            continue
        xs, ys = [spot[0] for spot in spots], [spot[1] for spot in spots]
        drawing.line(panel.axes, entry, xs, ys, width=1.4)
        _dots(panel.axes, entry, spots, bool(sweep.limits))
        for x, y, point in spots:
            if point in answers:
                ring: dict[str, Any] = {
                    "colour": entry.colour,
                    "face": "none",
                    "size": 13,
                    "edge_width": 1.6,
                }
                mark(panel.axes.plot([x], [y], "o", **ring), entry.place)
        panel.add(entry.name, entry.place, xs, ys)
        ends.append((xs[-1], ys[-1], entry))
    return ends


def _answers(sweep: Swept, answers: Sequence[Point]) -> str:
    """Say what the rings mark."""
    names = {id(point): sweep.key[name].name for name, line in sweep.lines.items() for point in line}
    said = [f"{names[id(point)]}: {drawing.plain(sweep.at(point))}" for point in answers]
    return f" Ring: the {_sense(sweep)} {_axis_name(sweep)} that meets all limits ({'; '.join(said)})." if said else ""


def _axis_name(sweep: Swept) -> str:
    return f"number of {sweep.axis_label}" if _is_count(sweep) else sweep.axis_label


def _is_count(sweep: Swept) -> bool:
    """Tell whether the axis counts things."""
    return sweep.axis_label.endswith(("s", "replicas")) and all(sweep.at(point).is_integer() for point in sweep.points)


def _which(sweep: Swept) -> str:
    """Start the question of what meets the limits."""
    return f"How many {sweep.axis_label} meet" if _is_count(sweep) else f"Which {sweep.axis_label} meets"


def _reading(sweep: Swept) -> str:
    if sweep.limits:
        return "Filled: all limits are met; hollow: one is missed, or the queue grew."
    return "Hollow: the queue grew."


def _dots(axes: Axes, entry: KeyEntry, spots: Sequence[tuple[float, float, Point]], has_limits: bool) -> None:
    """Draw points, filled where all is well."""
    dots(axes, entry, [(x, y, _is_good(point, has_limits=has_limits)) for x, y, point in spots])


def dots(axes: Axes, entry: KeyEntry, spots: Sequence[tuple[float, float, bool]]) -> None:
    """Draw dots, filled or hollow."""
    for is_filled in (True, False):
        some = [(x, y) for x, y, is_good in spots if is_good is is_filled]
        if some:
            face = entry.colour if is_filled else "none"
            drawn = axes.plot(
                [x for x, _ in some], [y for _, y in some], entry.marker, colour=entry.colour, face=face, size=5.5
            )
            mark(drawn, entry.place)


def _is_good(point: Point, *, has_limits: bool) -> bool:
    return point.state == "met" if has_limits else point.is_stable


def _limited(sweep: Swept) -> list[ShownFigure]:
    """Return the limited metrics, and the usual figures if there are few of those."""
    found: list[ShownFigure] = []
    for limit in sweep.limits:
        if limit.statistic is not None:
            title = f"{LABELS[METRICS[limit.metric]]} {limit.statistic}"
            found.append(ShownFigure(title, _outcome(str(limit)), limit.value))
    if shares := [one for point in sweep.points for one in point.outcomes if one.is_share]:
        wanted = [one.value / (1 + one.margin) for one in shares if one.value and one.margin is not None]
        found.append(ShownFigure("requests within their limits", _share, max(wanted, default=None), is_share=True))
    usual: tuple[tuple[str, Number], ...] = (
        ("TTFT p90", lambda point: point.ttft_sched.p90),
        ("TPOT mean", lambda point: point.tpot.mean),
        ("E2E mean", lambda point: point.e2e_sched.mean),
    )
    titles = " ".join(figure.title for figure in found)
    others = [ShownFigure(title, of, None) for title, of in usual if title.split()[0] not in titles]
    return found + others[: max(3 - len(found), 0)]


def _share(point: Point) -> float | None:
    return next((one.value for one in point.outcomes if one.is_share), None)


def _outcome(limit: str) -> Number:
    return lambda point: next((one.value for one in point.outcomes if one.limit == limit), None)


def _sense(sweep: Swept) -> str:
    return "highest" if sweep.axis in LOADS else "lowest"


def _answer(sweep: Swept, name: str) -> Point | None:
    """Return the point of a line that answers the question: the most load, or the fewest workers, within all limits."""
    if not sweep.limits or sweep.axis is None:
        return None
    good = [point for point in sweep.lines[name] if point.state == "met"]
    if not good or len(good) == len(sweep.lines[name]):
        return None
    return good[-1] if _sense(sweep) == "highest" else good[0]


def _varies(points: Sequence[Point], figure: ShownFigure) -> bool:
    """Return whether a figure has something to show: any difference beside a limit, else more than a trace of one."""
    values = [value for point in points if (value := figure.of(point)) is not None]
    return len(set(values)) > 1 if figure.limit else not _is_flat(values)


def _is_flat(values: Sequence[float]) -> bool:
    """Return whether values differ so little that a chart would only magnify a constant."""
    return not values or max(values) - min(values) <= FLAT * abs(max(values))


def along(sweep: Swept, axes: Axes, canvas_width: float) -> None:
    """Scale the axis of the sweep: logarithmic if it spans a lot, with a tick at each value if they are few."""
    values = sorted({sweep.at(point) for point in sweep.points})
    low, high = values[0], values[-1]
    if low > 0 and high / low >= 20:
        drawing.logarithm(axes, "x", values)
    elif len(values) <= 8 and all(value.is_integer() for value in values):
        pad = 0.06 * (high - low)
        drawing.fixed(
            axes,
            "x",
            low - pad,
            high + pad,
            {value: drawing.plain(value) for value in _apart(values, axes.width)},
        )
    else:
        pad = 0.06 * (high - low)
        drawing.numbers(axes, "x", low - pad, high + pad)


def _apart(values: Sequence[float], width: float) -> list[float]:
    """Return values whose labels do not touch in this much room."""
    span = (values[-1] - values[0]) or 1.0
    kept: list[float] = []
    for value in values:
        if not kept or (value - kept[-1]) / span * width > drawing.text_width(drawing.plain(value)) + 12:
            kept.append(value)
    return kept


def by_row(sweep: Swept) -> Chart | None:
    """The limited metrics, a row per point, if no number is varied."""
    points = sweep.points
    if sweep.axis is not None or len(points) < 2:
        return None
    shown = [figure for figure in _limited(sweep) if _varies(points, figure)][:3]
    if not shown:
        return None
    key = key_of([point.name for point in points])
    left = drawing.widest(entry.name for entry in key.values()) + 14
    canvas = Canvas(26 * len(points) + 62, is_wide=True)
    gap = 40
    width = (WIDE - left - 24 - gap * (len(shown) - 1)) / len(shown)
    panels = []
    for place, figure in enumerate(shown):
        axes = canvas.axes(left + place * (width + gap), 24, width, 26 * len(points) + 8, heading=figure.title)
        drawing.categories(axes, "y", [""] * len(points))
        panel = Panel(axes, figure.unit)
        figure.scale(axes, "x", [value for point in points if (value := figure.at(point)) is not None])
        if figure.limit:
            drawing.limit_line(axes, figure.limit * figure.times, is_upright=True)
        for row, point in enumerate(points):
            entry = key[point.name]
            if (at := figure.at(point)) is not None:
                _dots(axes, entry, [(at, row, point)], bool(sweep.limits))
                panel.add(f"{entry.name}: {figure.text(at)}", entry.place, [at], [row])
            if not place:
                _, y = canvas.place(axes, axes.x.low, row)
                canvas.text(0, y + 4, entry.name, colour=entry.colour, arm=entry.place)
        panels.append(panel)
    limits = f" Dashed: limits ({', '.join(map(str, sweep.limits))})." if sweep.limits else ""
    title = "Which meet the limits?" if sweep.limits else "How long do requests take?"
    return Chart(canvas, title, _reading(sweep) + limits, panels, is_wide=True)


def pareto(sweep: Swept) -> Chart | None:
    """Tokens/s of a GPU against tokens/s of a user: how much of one the other costs."""
    return _scatter(
        sweep,
        "What does speed for each user cost?",
        ("tokens/s per user (1 / mean TPOT)", interactivity, "tokens/s"),
        ("output tokens/s per GPU", per_gpu, "tokens/s"),
        "Up and right is better. Grey: the best points, where more of one means less of the other.",
    )


def cost(sweep: Swept) -> Chart | None:
    """Requests within the limits against GPU-hours, if the number of workers changed."""
    if not any(point.fleet and point.fleet.is_shown for point in sweep.points):
        return None
    return _scatter(
        sweep,
        "What do requests within the limits cost?",
        ("GPU-hours", lambda point: point.fleet.gpu_h if point.fleet else None, "GPU-h"),
        ("requests within limits (%)", attainment, "%"),
        "Up and left is better. Grey: the best points, where fewer GPU-hours mean fewer requests within the limits.",
        is_less=True,
    )


def attainment(point: Point) -> float | None:
    """Return the share of requests within the limits (%)."""
    share = point.goodput.attainment if point.goodput else None
    return None if share is None else share * 100


def throughput(sweep: Swept) -> Chart | None:
    """Output tokens/s of all GPUs along the axis."""
    if sweep.axis is None:
        return None
    return _scatter(
        sweep,
        "How much comes out?",
        (sweep.axis_label, sweep.at, sweep.axis_label),
        ("output tokens/s", lambda point: point.throughput.output_tokens_per_s, "tokens/s"),
        "",
        is_along=True,
    )


def interactivity(point: Point) -> float | None:
    """Return the tokens/s that a user sees."""
    return 1 / point.tpot.mean if point.tpot.mean else None


def per_gpu(point: Point) -> float | None:
    """Return the output tokens/s of a GPU, or of a worker if there are no GPUs."""
    rate, count = point.throughput.output_tokens_per_s, point.gpus or point.workers
    return rate / count if rate is not None and count else None


Side = tuple[str, Number, str]


def _scatter(
    sweep: Swept, title: str, x: Side, y: Side, text: str, *, is_along: bool = False, is_less: bool = False
) -> Chart | None:
    """Draw one figure against another, one line for each line of the sweep; less of the first may be better."""
    known = [
        (name, [(a, b, point) for point in line if (a := x[1](point)) is not None and (b := y[1](point)) is not None])
        for name, line in sweep.lines.items()
    ]
    known = [(name, spots) for name, spots in known if spots]
    every = [spot for _, spots in known for spot in spots]
    if any(_is_flat(side) for side in ([a for a, _, _ in every], [b for _, b, _ in every])):
        return None
    names, left = drawing.widest(sweep.key[name].name for name, _ in known) + 18, 58
    height = max(240, LINE * len(known))
    canvas = Canvas(height + 72)
    axes = canvas.axes(left, 24, HALF - left - names, height, heading=y[0])
    panel = Panel(axes, x[2], y[2])
    if is_along:
        along(sweep, axes, canvas.width)
    else:
        _from_zero_or_near(axes, "x", [spot[0] for spot in every])
    _from_zero_or_near(axes, "y", [spot[1] for spot in every])
    if not is_along:
        sign = -1 if is_less else 1
        best = [(a * sign, b) for a, b in _frontier([(a * sign, b) for a, b, _ in every])]
        axes.plot([x for x, _ in best], [y for _, y in best], colour=drawing.REST, width=7.0)
    ends = []
    for name, spots in known:
        entry = sweep.key[name]
        if sweep.axis is not None:
            drawing.line(axes, entry, [spot[0] for spot in spots], [spot[1] for spot in spots], width=1.2)
        _dots(axes, entry, spots, bool(sweep.limits))
        panel.add(entry.name, entry.place, [float(spot[0]) for spot in spots], [spot[1] for spot in spots])
        ends.append((*max(spots, key=lambda spot: spot[0])[:2], entry))
    canvas.label_ends(axes, ends)
    canvas.text(left + (HALF - left - names) / 2, 24 + height + 38, x[0], colour=QUIET, align="center")
    return Chart(canvas, title, f"{_reading(sweep)} {text}".strip(), [panel])


def _from_zero_or_near(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Let an axis start at zero, unless the values are so close that they would look the same."""
    low, high = min(values), max(values)
    pad = 0.08 * (high - low if low > 0.7 * high else high)
    drawing.numbers(axes, which, low - pad if low > 0.7 * high else 0, high + pad)


def _frontier(spots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spots that no other beats in both figures, from the left."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(spots, reverse=True):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best[::-1]
