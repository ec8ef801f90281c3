"""Charts over the time of a run: a line per arm, or a panel per arm where lines would tangle."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from reports.charts import drawing, over_time
from reports.charts.axes import Axes
from reports.charts.comparison import Comparison
from reports.charts.drawing import HALF, REST, WIDE, Canvas, Chart, Panel
from reports.key import KeyEntry
from reports.record.records import Floats, Record

TANGLE = 3
"""The most lines that remain readable in one panel if they cross."""
WINDOWS = 80

Measure = tuple[str, str, Callable[[Record, Floats], Floats | None]]
"""What is shown over time: heading, unit, and how it is computed."""

OVER_TIME: tuple[Measure, ...] = (
    ("requests waiting", "", lambda run, edges: over_time.queued(run.requests, edges)),
    ("requests running (batch)", "", lambda run, edges: over_time.running(run.requests, edges)),
    ("output tokens/s", "tokens/s", lambda run, edges: over_time.output_rate(run.requests, edges)),
)


def arrivals(shown: Comparison) -> Chart | None:
    """Requests that arrived per second, and requests that failed."""
    edges = over_time.windows(list(shown.runs.values()), WINDOWS)
    seen: list[tuple[KeyEntry, Floats]] = []
    for entry, run, _ in shown.arms:
        rate = over_time.arrivals(run.requests, edges)
        if not any(np.array_equal(rate, other) for _, other in seen):  # arms mostly see the same arrivals
            seen.append((entry, rate))
    if max(float(rate.max()) for _, rate in seen) == 0 or all(np.ptp(rate) == 0 for _, rate in seen):
        return None
    canvas = Canvas(180)
    right = drawing.widest(entry.name for entry, _ in seen) + 14 if len(seen) > 1 else 14
    axes = canvas.axes(46, 24, HALF - 46 - right, 126, heading="requests/s")
    panel = Panel(axes, "s", "/s")
    centres = over_time.centres(edges)
    drawing.seconds(axes, "x", 0, float(edges[-1]))
    drawing.numbers(axes, "y", 0, max(float(rate.max()) for _, rate in seen) * 1.08, most=4)
    for entry, rate in seen:
        if len(seen) == 1:
            axes.fill(centres, 0, rate, REST)
            panel.add("arrivals", None, centres, rate)
        else:
            drawing.line(axes, entry, centres, rate, width=1.2)
            panel.add(entry.name, entry.place, centres, rate)
    if len(seen) > 1:
        canvas.label_ends(axes, [(float(centres[-1]), float(rate[-1]), entry) for entry, rate in seen])
    text = "Requests are counted when they were due." + (
        " All arms saw the same arrivals." if len(seen) == 1 < len(shown.arms) else ""
    )
    return Chart(canvas, "When do requests come?", text, [panel])


def failures(shown: Comparison) -> Chart | None:
    """Requests that failed over time."""
    if all(run.requests.succeeded.all() for run in shown.runs.values()):
        return None
    return _over_time(
        shown, "When do requests fail?", "Requests are counted when they were due.",
        [("failed requests", "", lambda run, edges: np.histogram(run.requests.intended_s[~run.requests.succeeded], edges)[0].astype(float))],
    )  # fmt: skip


def load(shown: Comparison) -> Chart | None:
    """Waiting and running requests, output tokens, and KV use over time."""
    pools = over_time.kv_pools(list(shown.runs.values()))
    kv = [(f"KV in use{f': {pool}' if len(pools) > 1 else ''}", "%", _kv_of(pool)) for pool in pools]
    return _over_time(
        shown, "Does the load settle?",
        "All workers together, while requests arrive. A queue that grows until the end does not settle.",
        (*OVER_TIME, *kv),
    )  # fmt: skip


def _kv_of(pool: str) -> Callable[[Record, Floats], Floats | None]:
    def found(run: Record, edges: Floats) -> Floats | None:
        shares = over_time.kv_use(run, pool, edges)
        return None if shares is None else shares * 100

    return found


def server_load(shown: Comparison) -> Chart | None:
    """Waiting and running requests, and the use of the KV cache, as the measured server says."""
    return _over_time(
        shown, "What does the server say of its load?", "By its own metrics, sampled during the run; anyone's requests.",
        [
            ("requests waiting", "", lambda run, edges: over_time.server_state(run, "waiting", edges)),
            ("requests running", "", lambda run, edges: over_time.server_state(run, "running", edges)),
            ("KV in use", "%", _server_kv),
        ],
    )  # fmt: skip


def _server_kv(run: Record, edges: Floats) -> Floats | None:
    shares = over_time.server_state(run, "kv", edges)
    return None if shares is None else shares * 100


def ttft_over_time(shown: Comparison) -> Chart | None:
    """TTFT of requests by when they were due."""

    def of(quantile: float) -> Callable[[Record, Floats], Floats | None]:
        def found(run: Record, edges: Floats) -> Floats | None:
            return np.repeat(over_time.ttft(run, edges[:: WINDOWS // 40], quantile), WINDOWS // 40)

        return found

    return _over_time(
        shown, "Does TTFT change during the run?", "Requests are grouped by when they were due, in 40 windows.",
        [("TTFT median", "ms", of(0.5)), ("TTFT p90", "ms", of(0.9))], is_log=True,
    )  # fmt: skip


def _over_time(
    shown: Comparison, title: str, text: str, measures: Sequence[Measure], *, is_log: bool = False
) -> Chart | None:
    """Draw what changes over time: a panel per measure with a line per arm or, for many arms, a panel for each of them."""
    edges = over_time.windows(list(shown.runs.values()), WINDOWS)
    known = []
    for measure in measures:
        values = {arm: found for arm, run in shown.runs.items() if (found := measure[2](run, edges)) is not None}
        if any(np.nanmax(found, initial=0) > np.nanmin(found, initial=np.inf) for found in values.values()):
            known.append((measure, values))
    if not known:
        return None
    centres = over_time.centres(edges)
    draw_it = _overlaid if len(shown.arms) <= TANGLE else _side_by_side
    canvas, panels = draw_it(shown, known, centres, float(edges[-1]), is_log=is_log)
    if len(shown.arms) > TANGLE:
        text += " Grey: the range of all arms."
    return Chart(canvas, title, text, panels, is_wide=True)


Known = Sequence[tuple[Measure, dict[str, Floats]]]


def _scale(axes: Axes, values: Iterable[Floats], unit: str, *, is_log: bool) -> None:
    """Give the y axes of one measure the same scale."""
    together = np.concatenate(list(values))
    together = together[~np.isnan(together)]
    if is_log:
        drawing.times(axes, "y", [float(together.min()), float(together.max())], most=4)
    else:
        form = (lambda value: f"{value:g}%") if unit == "%" else None
        drawing.numbers(axes, "y", 0, float(together.max()) * 1.08, most=4, form=form)


def _overlaid(
    shown: Comparison, known: Known, centres: Floats, end: float, *, is_log: bool
) -> tuple[Canvas, list[Panel]]:
    """Draw a panel per measure, side by side, with a line per arm."""
    across = 2 if len(known) in (2, 4) else min(len(known), 3)
    names = drawing.widest(entry.name for entry, _, _ in shown.arms) + 14 if len(shown.arms) > 1 else 14
    height, left = 150, 58
    down = -(-len(known) // across)
    canvas = Canvas((height + 56) * down, is_wide=True)
    cell = WIDE / across
    panels = []
    for place, ((heading, unit, _), values) in enumerate(known):
        x, y = place % across * cell, place // across * (height + 56)
        axes = canvas.axes(x + left, y + 24, cell - left - names, height, heading=heading)
        panel = Panel(axes, "s", unit)
        drawing.seconds(axes, "x", 0, end, most=5)
        _scale(axes, values.values(), unit, is_log=is_log)
        for arm, found in values.items():
            entry = shown.key[arm]
            drawing.line(axes, entry, centres, found, width=1.4)
            panel.add(entry.name, entry.place, centres, found)
        if len(shown.arms) > 1:
            canvas.label_ends(axes, [(*_end(centres, found), shown.key[arm]) for arm, found in values.items()])
        panels.append(panel)
    return canvas, panels


def _end(centres: Floats, values: Floats) -> tuple[float, float]:
    """Return the last point that is known."""
    last = int(np.flatnonzero(~np.isnan(values))[-1]) if not np.isnan(values).all() else 0
    return float(centres[last]), float(np.nan_to_num(values[last]))


def _side_by_side(
    shown: Comparison, known: Known, centres: Floats, end: float, *, is_log: bool
) -> tuple[Canvas, list[Panel]]:
    """Draw a row per measure and a column per arm; a row shares one scale and shows the range of all arms in grey."""
    count = len(shown.arms)
    across = min(count, 8)
    height, left, gap = 88, 58, 14
    blocks = -(-count // across)
    row_height = height + 34
    canvas = Canvas(blocks * (row_height * len(known) + 44), is_wide=True)
    width = (WIDE - left - gap * (across - 1) - 20) / across
    panels = []
    for place, (entry, _, _) in enumerate(shown.arms):
        column, block = place % across, place // across
        x, top = left + column * (width + gap), block * (row_height * len(known) + 44) + 18
        canvas.text(x, top - 3, entry.name, colour=entry.colour, arm=entry.place)
        for row, ((heading, unit, _), values) in enumerate(known):
            y = top + row * row_height + 26
            axes = canvas.axes(x, y, width, height, heading=heading if column == 0 else "")
            panel = Panel(axes, "s", unit)
            drawing.seconds(axes, "x", 0, end, most=2)
            _scale(axes, values.values(), unit, is_log=is_log)
            table = np.array(list(values.values()))
            axes.fill(centres, np.fmin.reduce(table), np.fmax.reduce(table), REST, alpha=0.6)
            if entry.arm in values:
                drawing.line(axes, entry, centres, values[entry.arm], width=1.4, dashes=())
                panel.add(entry.name, entry.place, centres, values[entry.arm])
            if column:
                drawing.no_labels(axes, "y")
            if row < len(known) - 1:
                drawing.no_labels(axes, "x")
            panels.append(panel)
    return canvas, panels
