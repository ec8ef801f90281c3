"""The chart of fleets over time: the load, the workers in each state, and the share of requests within the limits.

Each arm has a column of panels; all columns share their scales:

    requests/s | output tokens/s | workers of each pool | within limits | TTFT
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reports.charts import drawing, over_time
from reports.charts.comparison import Comparison
from reports.charts.drawing import INK, LIMIT, QUIET, REST, WIDE, Canvas, Chart, Panel, mark
from reports.figures import fleet as fleet_figures
from reports.key import KeyEntry
from reports.record.fleet import FleetUse, Headcount, PoolFleet
from reports.record.records import Floats, Record

STATES: dict[str, tuple[str, str, Callable[[Headcount], int]]] = {
    "ready": ("ready", "#2a9d8f", lambda row: row.ready),
    "draining": ("draining", "#6a5acd", lambda row: row.draining),
    "starting": ("starting", "#c8b45e", lambda row: row.starting),
    "pending": ("waiting for GPUs", REST, lambda row: row.pending),
}
"""The states of workers, from the bottom: label, colour (never that of an arm), and how many workers are in it."""
ACROSS = 6
"""Arms beside one another."""
MOST_STEPS = 400
"""The most changes that are drawn one by one; beyond that they are sampled."""
LEFT, GAP, TOP = 58, 28, 24
BETWEEN = 34
"""The gap between a panel and the next one below."""


@dataclass(frozen=True)
class Seen:
    """What is drawn for an arm."""

    entry: KeyEntry
    run: Record
    fleet: FleetUse
    shares: Floats | None
    """The share of each window's requests within the limits."""


@dataclass(frozen=True)
class FleetRow:
    """A row of panels: one for each arm."""

    heading: str
    height: float
    draw: Callable[[Seen, Panel], None]
    y_unit: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    """The colours in it, shown next to its heading."""


def fleet(shown: Comparison) -> Chart | None:
    """Draw load, workers by state, and requests within the limits; return None if the fleet never changed."""
    if not shown.summary.has_fleet:
        return None
    edges = fleet_figures.windows(list(shown.runs.values()))
    arms = [
        Seen(entry, run, its, _shares(shown, run, edges))
        for entry, run, _ in shown.arms
        if (its := fleet_figures.fleet_of(run)) is not None
    ]
    panels_of = _rows(shown, arms, edges)
    across = min(len(arms), ACROSS)
    high = sum(row.height + BETWEEN for row in panels_of) + 26
    canvas = Canvas(TOP + high * -(-len(arms) // across), is_wide=True)
    width = (WIDE - LEFT - GAP * (across - 1) - 20) / across
    end = max([float(edges[-1]), *(seen.fleet.length_s for seen in arms)])
    panels: list[Panel] = []
    for place, seen in enumerate(arms):
        column, x = place % across, LEFT + place % across * (width + GAP)
        y = TOP + place // across * high
        canvas.text(x, y - 10, seen.entry.name, colour=seen.entry.colour, arm=seen.entry.place)
        for number, row in enumerate(panels_of):
            axes = canvas.axes(x, y + 18, width, row.height, heading=row.heading if column == 0 else "")
            panel = Panel(axes, "s", row.y_unit)
            drawing.seconds(axes, "x", 0, end, most=8 if across == 1 else 2 if across > 3 else 4)
            row.draw(seen, panel)
            if column:
                drawing.no_labels(axes, "y")
            elif row.names:
                _name(canvas, x + drawing.text_width(row.heading) + 20, y + 9, row.names)
            if number < len(panels_of) - 1:
                drawing.no_labels(axes, "x")
            panels.append(panel)
            y += row.height + BETWEEN
    return Chart(canvas, "Do workers follow the load?", _reading(shown, arms, edges), panels, is_wide=True)


def _shares(shown: Comparison, run: Record, edges: Floats) -> Floats | None:
    limits = shown.limits
    return fleet_figures.attained(run, fleet_figures.good(run, limits), edges) if limits else None


def _rows(shown: Comparison, arms: Sequence[Seen], edges: Floats) -> list[FleetRow]:
    """Return the rows of panels from the top; all arms in a row share a scale."""
    pools = list(dict.fromkeys(pool.pool for seen in arms for pool in seen.fleet.pools))
    found = [
        _rate("requests/s", arms, edges, lambda run: over_time.arrivals(run.requests, edges)),
        _rate("output tokens/s", arms, edges, lambda run: over_time.output_rate(run.requests, edges)),
        *(_workers(pool, arms, pools, over_time.centres(edges)) for pool in pools),
    ]
    if shown.limits:
        found.append(FleetRow("requests within limits", 70, lambda seen, panel: _within(seen, panel, edges), "%"))
    if (ttft := _ttft(shown, arms, edges)) is not None:
        found.append(ttft)
    return found


def _rate(heading: str, arms: Sequence[Seen], edges: Floats, of: Callable[[Record], Floats]) -> FleetRow:
    """Draw something per second as an area."""
    most = max(float(of(seen.run).max(initial=0.0)) for seen in arms) * 1.08 or 1.0

    def draw(seen: Seen, panel: Panel) -> None:
        rate = of(seen.run)
        drawing.numbers(panel.axes, "y", 0, most, most=3)
        mark(panel.axes.fill_steps(edges, 0, rate, REST), seen.entry.place)
        panel.add(seen.entry.name, seen.entry.place, over_time.centres(edges), rate)

    return FleetRow(heading, 58, draw, "/s")


def _workers(pool: str, arms: Sequence[Seen], pools: Sequence[str], spots: Floats) -> FleetRow:
    """Draw the workers of a pool, stacked by state, with those needed and deaths; the pointer reads values at `spots`."""
    most = max((_most(seen.fleet, pool) for seen in arms), default=1.0) * 1.1

    def draw(seen: Seen, panel: Panel) -> None:
        drawing.numbers(panel.axes, "y", 0, most, most=4, whole=True)
        for its in seen.fleet.pools:
            if its.pool == pool:
                _states(seen, its, panel, spots)
        if seen.fleet.oracle and pool in seen.fleet.oracle.replicas:
            needed = np.array(seen.fleet.oracle.replicas[pool], float)
            ends = np.arange(len(needed) + 1, dtype=float) * seen.fleet.oracle.window_s
            line = panel.axes.steps(ends, needed, colour=INK, width=1.4)
            mark(line, seen.entry.place)
            panel.add(
                f"{seen.entry.name}, needed", seen.entry.place, spots, fleet_figures.held(spots, ends[:-1], needed)
            )

    heading, height = ("workers", 130) if len(pools) == 1 else (f"workers: {pool}", 100)
    return FleetRow(heading, height, draw, names=_names(arms) if pool == pools[0] else {})


def _states(seen: Seen, pool: PoolFleet, panel: Panel, spots: Floats) -> None:
    times = np.array([row.time_s for row in pool.history if row.time_s < seen.fleet.length_s])
    if len(times) > MOST_STEPS:
        times = np.linspace(0, seen.fleet.length_s, MOST_STEPS, endpoint=False)
    ends = np.append(times, seen.fleet.length_s)
    below = np.zeros(len(times))
    for label, colour, of in STATES.values():
        count = fleet_figures.over_time(pool, times, of)
        if count.any():
            area = panel.axes.fill_steps(ends, below, below + count, colour)
            mark(area, seen.entry.place)
            panel.add(f"{seen.entry.name}, {label}", seen.entry.place, spots, fleet_figures.over_time(pool, spots, of))
        below = below + count
    for time_s in pool.died_s:
        mark(panel.axes.rule(time_s, LIMIT, width=1.4, is_upright=True), seen.entry.place)


def _within(seen: Seen, panel: Panel, edges: Floats) -> None:
    """Draw the share of requests within the limits, with the area below the line in the colour of limits."""
    drawing.numbers(panel.axes, "y", 0, 104, most=3, form=lambda value: f"{value:g}%")
    enough = fleet_figures.ENOUGH * 100
    if seen.shares is not None:
        shares = seen.shares * 100
        missing: Any = np.where(shares < enough, shares, enough)
        mark(panel.axes.fill_steps(edges, missing, np.full(len(shares), enough), LIMIT, alpha=0.25), seen.entry.place)
        mark(panel.axes.steps(edges, shares, colour=seen.entry.colour, width=1.4), seen.entry.place)
        panel.add(seen.entry.name, seen.entry.place, over_time.centres(edges), shares)
    if seen.fleet.oracle and min(seen.fleet.oracle.possible, default=1.0) < 1:
        possible = np.array(seen.fleet.oracle.possible) * 100
        ends = np.arange(len(possible) + 1, dtype=float) * seen.fleet.oracle.window_s
        mark(panel.axes.steps(ends, possible, colour=INK, width=1.0), seen.entry.place)
        spots = over_time.centres(edges)
        panel.add(
            f"{seen.entry.name}, possible", seen.entry.place, spots, fleet_figures.held(spots, ends[:-1], possible)
        )
    drawing.limit_line(panel.axes, enough)


def _ttft(shown: Comparison, arms: Sequence[Seen], edges: Floats) -> FleetRow | None:
    """Draw median and 99th percentile of TTFT in each window, and its limits."""
    times = {seen.entry.arm: [over_time.ttft(seen.run, edges, share) for share in (0.5, 0.99)] for seen in arms}
    limits = [limit.value * 1000 for limit in shown.limits_of("ttft_sched")]
    every = np.concatenate([line for lines in times.values() for line in lines])
    every = every[~np.isnan(every)]
    if not len(every):
        return None
    reach = [float(every.min()), float(every.max()), *limits]

    def draw(seen: Seen, panel: Panel) -> None:
        drawing.times(panel.axes, "y", reach, most=4)
        for label, width, values in zip(("median", "p99"), (1.8, 0.9), times[seen.entry.arm], strict=True):
            line = panel.axes.plot(over_time.centres(edges), values, colour=seen.entry.colour, width=width)
            mark(line, seen.entry.place)
            panel.add(f"{seen.entry.name}, {label}", seen.entry.place, over_time.centres(edges), values)
        for limit in limits:
            drawing.limit_line(panel.axes, limit)

    return FleetRow("TTFT: median, p99", 90, draw, "ms")


def _most(fleet: FleetUse, pool: str) -> float:
    """Return the most workers of a pool that a panel must hold."""
    counts = [row.on_gpus + row.pending for its in fleet.pools if its.pool == pool for row in its.history]
    return float(max([1, *counts, *(fleet.oracle.replicas.get(pool, ()) if fleet.oracle else ())]))


def _name(canvas: Canvas, x: float, y: float, colours: Mapping[str, str]) -> None:
    """Write names in a line, each after its colour."""
    for name, colour in colours.items():
        canvas.text(x, y, "■", colour=colour)
        x += drawing.text_width("■ ")
        canvas.text(x, y, name, colour=QUIET)
        x += drawing.text_width(name) + 12


def _names(arms: Sequence[Seen]) -> dict[str, str]:
    """Return the colours that are used, by label."""
    pools = [pool for seen in arms for pool in seen.fleet.pools]
    found = {
        label: colour for label, colour, of in STATES.values() if any(of(row) for pool in pools for row in pool.history)
    }
    if any(seen.fleet.oracle for seen in arms):
        found["needed"] = INK
    if any(pool.died_s for pool in pools):
        found["a worker died"] = LIMIT
    return found


def _reading(shown: Comparison, arms: Sequence[Seen], edges: Floats) -> str:
    text = f"Requests are grouped by when they were due, in windows of {edges[1] - edges[0]:g} s. Workers are stacked by state."
    if shown.limits:
        text += f" Red: windows with fewer than {fleet_figures.ENOUGH:.0%} of the requests within the limits ({', '.join(map(str, shown.limits))})."
    text += " TTFT: the thick line is the median, the thin one p99 (close to the maximum if requests are few)"
    text += f"{', the dashed one the limit' * bool(shown.limits_of('ttft_sched'))}."
    if any(seen.fleet.oracle for seen in arms):
        text += " Needed: the fewest workers that keep the limits; the line of the same colour is the share of requests that can be within them at all."
    if any(figures.repeats > 1 for _, _, figures in shown.arms):
        text += " The chart shows the first run of each arm."
    return text
