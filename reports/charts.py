"""The charts of a comparison: one function, one chart, one question that it answers.

Arms are told apart by labels at their lines, or where lines would tangle by a panel each, with the other arms' range in grey.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from reports import drawing, insight, metrics, over_time, split
from reports.conditions import METRICS, Condition
from reports.drawing import HALF, LIMIT, LINE, QUIET, REST, STYLE, WIDE, Canvas, Chart, Drawn, Panel, duration, mark
from reports.key import Entry, Key, key_of
from reports.records import Floats, Record
from reports.slo import parse
from reports.summary import ArmSummary, Summary
from reports.tables import milliseconds

Runs = dict[str, Record]
TANGLE = 3
"""Lines that can be told apart in one panel where they cross."""
MAX_ROWS = 64
"""Rows of a heat map."""
WINDOWS = 80
ROW = 26
"""Units from one arm to the next where each has a row."""
PART_COLOURS = {
    "queue": "#8d8d8d",
    "prefill": "#6a5acd",
    "decode_queue": "#c8b45e",
    "transfer": "#e0703a",
    "first_step": "#2a9d8f",
}
"""Of the parts of TTFT: none is the colour of an arm."""
SHOWN = ("ttft_sched", "tpot", "e2e_sched")


@dataclass(frozen=True)
class Comparison:
    """What is drawn."""

    runs: Runs
    summary: Summary
    key: Key

    @property
    def limits(self) -> list[Condition]:
        """The limits of the experiment."""
        return [parse(text) for text in self.summary.limits]

    def limits_of(self, metric: str) -> list[Condition]:
        """Return those of a metric, by its name in the summary."""
        return [limit for limit in self.limits if METRICS[limit.metric] == metric]

    @property
    def arms(self) -> list[tuple[Entry, Record, ArmSummary]]:
        """Each arm: how it is shown, its run, its figures."""
        return [(self.key[arm], run, self.summary.arms[arm]) for arm, run in self.runs.items()]


def differences(shown: Comparison) -> Chart | None:
    """Each arm's difference to the baseline, with its interval: left is better."""
    arms = [entry for entry, _, _ in shown.arms if entry.arm != shown.summary.baseline]
    metric_names = [name for name in SHOWN if any(_pairs(shown, entry, name) for entry in arms)]
    if not metric_names:
        return None
    canvas, panels = _rows(arms, [metrics.LABELS[name] for name in metric_names])
    for panel, name in zip(panels, metric_names, strict=True):
        panel.x_unit = "%"
        reach = [0.0]
        for row, entry in enumerate(arms):
            pairs = _pairs(shown, entry, name)
            for place, (statistic, (low, value, high, verdict)) in enumerate(pairs.items()):
                offset = (place - (len(pairs) - 1) / 2) * 0.3
                face = "none" if verdict == "inconclusive" else entry.colour
                marker = "o" if statistic == "mean" else "s"
                mark(panel.axes.plot([low, high], [row + offset] * 2, color=entry.colour, linewidth=1.4), entry.place)
                mark(
                    panel.axes.plot(
                        [value], [row + offset], marker, color=entry.colour, markerfacecolor=face, markersize=6
                    ),
                    entry.place,
                )
                word = f"{entry.name} {statistic}: {value:+.1f}% [{low:+.1f}, {high:+.1f}], {verdict}"
                panel.add(word, entry.place, [value], [row + offset])
                reach += [low, high]
        pad = 0.06 * (max(reach) - min(reach)) or 1.0
        drawing.numbers(
            panel.axes, "x", min(reach) - pad, max(reach) + pad, form=lambda value: f"{value:+g}%" if value else "0"
        )
        panel.axes.axvline(0, color=QUIET, linewidth=1.0)
    base = shown.key[shown.summary.baseline].name
    text = (
        "Paired by request, with 95% intervals: left of 0 is better. Circle: mean; square: 90th percentile; hollow: may be "
        "noise."
    )
    if grew := [entry.name for entry in arms if not any(_pairs(shown, entry, name) for name in SHOWN)]:
        text += f" Not compared, as the queue grew or too few requests were answered: {', '.join(grew)}."
    return Chart(canvas.figure, f"How much better than {base} is each arm?", text, panels, is_wide=True)


def _pairs(shown: Comparison, entry: Entry, name: str) -> dict[str, tuple[float, float, float, str]]:
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
    names = [name for name in SHOWN if any(figures.metric(name).count for _, _, figures in shown.arms)]
    if not names:
        return None
    entries = [entry for entry, _, _ in shown.arms]
    canvas, panels = _rows(entries, [metrics.LABELS[name] for name in names])
    markers = {"mean": "|", "p50": "o", "p90": "s", "p99": "D"}
    for panel, name in zip(panels, names, strict=True):
        panel.x_unit = "ms"
        reach: list[float] = []
        for row, (entry, _, figures) in enumerate(shown.arms):
            metric = figures.metric(name)
            known = {key: value * 1000 for key in markers if (value := metric.at(key)) is not None}
            if not known:
                at = min(reach, default=1.0)
                panel.axes.annotate("n/a", (at, row), color=QUIET, va="center", fontsize=drawing.SIZE)
                continue
            mark(
                panel.axes.plot([min(known.values()), max(known.values())], [row] * 2, color=REST, linewidth=1),
                entry.place,
            )
            for key, value in known.items():
                interval = getattr(metric.intervals, key, None)
                if interval is not None:
                    low, high = interval[0] * 1000, interval[1] * 1000
                    mark(
                        panel.axes.plot([low, high], [row] * 2, color=entry.colour, linewidth=4, alpha=0.35),
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
                        color=entry.colour,
                        markerfacecolor=face,
                        markersize=size,
                        markeredgewidth=1.6,
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
        text += f" No intervals, as the queue grew: {', '.join(grew)}."
    return Chart(canvas.figure, "How long do requests take, and how sure is that?", text, panels, is_wide=True)


def _rows(entries: Sequence[Entry], headings: Sequence[str], *, is_wide: bool = True) -> tuple[Canvas, list[Panel]]:
    """Begin a chart with a row for each arm, and a panel for each heading beside one another."""
    height = ROW * len(entries) + 8
    canvas = Canvas(height + 54, is_wide=is_wide)
    left = drawing.widest(entry.name for entry in entries) + 14
    gap = 34
    width = (canvas.width - left - 24 - gap * (len(headings) - 1)) / len(headings)
    panels = []
    for place, heading in enumerate(headings):
        axes = canvas.axes(left + place * (width + gap), 24, width, height, heading=heading)
        drawing.categories(axes, "y", [""] * len(entries))
        panels.append(Panel(axes))
    for row, entry in enumerate(entries):
        _, y = canvas.place(panels[0].axes, 0, row)
        canvas.text(0, y + 4, entry.name, colour=entry.colour, arm=entry.place)
    return canvas, panels


def ttft_split(shown: Comparison) -> Chart | None:
    """The parts of the mean TTFT, a stacked bar per arm, in the order in which requests meet them."""
    known = [(entry, found) for entry, _, figures in shown.arms if (found := figures.split)]
    if not known:
        return None
    canvas, (panel,) = _rows([entry for entry, _ in known], ["mean TTFT from sent"], is_wide=False)
    panel.x_unit = "ms"
    axes = panel.axes
    longest = max(found.ttft for _, found in known) * 1000
    for row, (entry, found) in enumerate(known):
        begin = 0.0
        for part, seconds in found.parts.items():
            width = seconds * 1000
            if width > 0:
                mark(list(axes.barh(row, width, 0.62, left=begin, color=PART_COLOURS[part])), entry.place)
                panel.add(
                    f"{entry.name}, {split.LABELS[part]}: {milliseconds(seconds)} ms",
                    entry.place,
                    [begin + width / 2],
                    [row],
                )
            begin += width
    drawing.numbers(axes, "x", 0, longest * 1.2 or 1.0, form=duration)
    axes.grid(visible=False)
    parts = [part for part in split.PARTS if any(found.parts.get(part) for _, found in known)]
    for row, (entry, found) in enumerate(known):
        x, y = canvas.place(axes, found.ttft * 1000, row)
        canvas.text(x + 5, y + 4, duration(float(f"{found.ttft * 1000:.3g}")), colour=QUIET, arm=entry.place)
    _part_labels(canvas, axes, known[0][1], parts)
    text = "; ".join(f"{split.LABELS[part]}: {split.PARTS[part]}" for part in parts)
    return Chart(canvas.figure, "Where does the time to the first token go?", f"{text[:1].upper()}{text[1:]}.", [panel])


def _part_labels(canvas: Canvas, axes: Axes, found: split.Split, parts: Sequence[str]) -> None:
    """Name the parts in a line above the bars, each in its colour."""
    x = axes.get_position().x1 * canvas.width
    for part in reversed(parts):
        x -= drawing.text_width(split.LABELS[part])
        canvas.text(x, 15, split.LABELS[part], colour=PART_COLOURS[part])
        x -= 14


def ttft_tail(shown: Comparison) -> Chart | None:
    """TTFT by percentile."""
    return _tail(
        shown,
        "ttft_sched",
        "How long do requests wait for their first token?",
        "Percentile of requests",
        _of_requests("ttft_sched"),
    )


def itl_tail(shown: Comparison) -> Chart | None:
    """ITL by percentile."""
    return _tail(shown, "itl", "How long do tokens take to come?", "Percentile of the times between tokens", _of_gaps)


def e2e_tail(shown: Comparison) -> Chart | None:
    """E2E latency by percentile."""
    return _tail(
        shown, "e2e_sched", "How long do whole answers take?", "Percentile of requests", _of_requests("e2e_sched")
    )


Quantiles = Callable[[Record], tuple[int, Callable[[Floats], Floats]]]
"""How many values a run has, and their quantiles (s)."""


def _of_requests(name: str) -> Quantiles:
    def found(run: Record) -> tuple[int, Callable[[Floats], Floats]]:
        values = metrics.per_request(run.requests)[name]
        values = np.sort(values[~np.isnan(values)])
        return len(values), lambda shares: np.quantile(values, shares)

    return found


def _of_gaps(run: Record) -> tuple[int, Callable[[Floats], Floats]]:
    gaps = metrics.TokenGaps(run.gaps)
    return (gaps.count if len(run.gaps) else 0), gaps.quantiles


def _tail(shown: Comparison, name: str, title: str, what: str, quantiles: Quantiles) -> Chart | None:
    """Draw times by percentile, the share of slower ones on a log scale: what is right is the tail."""
    lines = []
    for entry, run, _ in shown.arms:
        count, at = quantiles(run)
        if count >= 2:
            slower = np.geomspace(1.0, max(1 / count, 1e-4), 70)
            values = np.maximum(at(1 - slower) * 1000, 1e-3)
            lines.append((entry, slower * 100, values))
    if not lines or all(np.ptp(values) == 0 for _, _, values in lines):
        return None
    last = min(float(slower[-1]) for _, slower, _ in lines)
    limits = shown.limits_of(name)
    height = max(230, LINE * len(lines))
    canvas = Canvas(height + 50)
    right = drawing.widest(entry.name for entry, _, _ in lines) + 14
    left = 58
    axes = canvas.axes(
        left, 24, HALF - left - right, height, heading="TTFT" if name == "ttft_sched" else metrics.LABELS[name]
    )
    panel = Panel(axes, "% slower", "ms")
    together = np.concatenate([values for _, _, values in lines])
    drawing.times(
        axes,
        "y",
        [float(np.quantile(together, 0.02)), float(together.max()), *(limit.value * 1000 for limit in limits)],
    )
    axes.set_xscale("log")
    ticks = {50: "p50", 10: "p90", 1: "p99", 0.1: "p99.9", 0.01: "p99.99"}
    drawing.fixed(axes, "x", 100, last, {at: text for at, text in ticks.items() if at >= last * 0.99})
    for entry, slower, values in lines:
        drawing.line(axes, entry, slower, values)
        panel.add(entry.name, entry.place, slower, values)
    for limit in limits:
        _limit(canvas, axes, limit)
    canvas.label_ends(axes, [(slower[-1], values[-1], entry) for entry, slower, values in lines])
    text = f"{what}, the tail stretched: a tenth as many are slower at each step from p90 on. Lower is better."
    return Chart(canvas.figure, title, text, [panel])


def _limit(canvas: Canvas, axes: Axes, limit: Condition) -> None:
    """Draw a limit: a line across, and a ring at the percentile that must be below it."""
    value = limit.value * 1000
    drawing.limit_line(axes, value)
    statistic = limit.statistic or ""
    if statistic.startswith("p"):
        axes.plot([100 - float(statistic[1:])], [value], "v", color=LIMIT, markersize=7, clip_on=False)
    box = axes.get_position()
    _, y = canvas.place(axes, 100, value)
    above = y - 5 > (1 - box.y1) * canvas.height + 8
    canvas.text(box.x0 * canvas.width + 6, y - 5 if above else y + 14, str(limit), colour=LIMIT)


def hit_waterfall(shown: Comparison) -> Chart | None:
    """Where prefix hits were lost: from an unlimited cache to what the engine found."""
    names = {"endless": "unlimited cache", "best": "best worker", "predicted": "predicted", "actual": "found"}
    known = []
    for entry, _, figures in shown.arms:
        shares = [getattr(figures.waterfall, stage) for stage in names]
        if sum(share is not None for share in shares) > 1 and any(shares):
            known.append((entry, np.array([np.nan if share is None else share * 100 for share in shares])))
    if not known:
        return None
    height = max(200, LINE * len(known))
    canvas = Canvas(height + 50)
    right, left = drawing.widest(entry.name for entry, _ in known) + 14, 46
    axes = canvas.axes(left, 24, HALF - left - right, height, heading="share of prompt tokens")
    panel = Panel(axes, "", "%")
    drawing.categories(axes, "x", list(names.values()))
    drawing.numbers(
        axes, "y", 0, max(float(np.nanmax(shares)) for _, shares in known) * 1.05, form=lambda value: f"{value:g}%"
    )
    for entry, shares in known:
        there = np.flatnonzero(~np.isnan(shares))
        drawing.line(axes, entry, there, shares[there], marker=entry.marker, markersize=5, clip_on=False)
        panel.add(entry.name, entry.place, [f"{entry.name}, {name}" for name in names.values()], shares)
    canvas.label_ends(
        axes,
        [
            (float(there[-1]), float(shares[there[-1]]), entry)
            for entry, shares in known
            for there in [np.flatnonzero(~np.isnan(shares))]
        ],
    )
    text = "; ".join(f"{names[key]}: {text}" for key, text in insight.WATERFALL.items())
    return Chart(canvas.figure, "Where are prefix hits lost?", f"{text[:1].upper()}{text[1:]}.", [panel])


Measure = tuple[str, str, Callable[[Record, Floats], Floats | None]]
"""What is shown over time: its heading, its unit, and how it is found."""

OVER_TIME: tuple[Measure, ...] = (
    ("requests waiting", "", lambda run, edges: over_time.queued(run.requests, edges)),
    ("requests running (batch)", "", lambda run, edges: over_time.running(run.requests, edges)),
    ("output tokens/s", "tokens/s", lambda run, edges: over_time.output_rate(run.requests, edges)),
)


def arrivals(shown: Comparison) -> Chart | None:
    """Requests that came per second, and that failed."""
    edges = over_time.windows(list(shown.runs.values()), WINDOWS)
    seen: list[tuple[Entry, Floats]] = []
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
    centres = (edges[1:] + edges[:-1]) / 2
    drawing.seconds(axes, "x", 0, float(edges[-1]))
    drawing.numbers(axes, "y", 0, max(float(rate.max()) for _, rate in seen) * 1.08, most=4)
    for entry, rate in seen:
        if len(seen) == 1:
            axes.fill_between(centres, rate, color=REST, linewidth=0)
            panel.add("arrivals", None, centres, rate)
        else:
            drawing.line(axes, entry, centres, rate, linewidth=1.2)
            panel.add(entry.name, entry.place, centres, rate)
    if len(seen) > 1:
        canvas.label_ends(axes, [(float(centres[-1]), float(rate[-1]), entry) for entry, rate in seen])
    text = "By when each was to be sent." + (
        " All arms saw the same arrivals." if len(seen) == 1 < len(shown.arms) else ""
    )
    return Chart(canvas.figure, "When do requests come?", text, [panel])


def failures(shown: Comparison) -> Chart | None:
    """Requests that failed over time."""
    if all(run.requests.succeeded.all() for run in shown.runs.values()):
        return None
    return _over_time(
        shown, "When do requests fail?", "By when each was to be sent.",
        [("failed requests", "", lambda run, edges: np.histogram(run.requests.intended_s[~run.requests.succeeded], edges)[0].astype(float))],
    )  # fmt: skip


def load(shown: Comparison) -> Chart | None:
    """What waits, what runs and what comes out, over time."""
    return _over_time(
        shown, "Does the load settle?",
        "In all workers together, over the time in which requests come. A queue that grows to the end does not settle.",
        OVER_TIME,
    )  # fmt: skip


def ttft_over_time(shown: Comparison) -> Chart | None:
    """TTFT of requests by when they came."""

    def of(quantile: float) -> Callable[[Record, Floats], Floats | None]:
        def found(run: Record, edges: Floats) -> Floats | None:
            values = metrics.per_request(run.requests)["ttft_sched"] * 1000
            coarse = edges[:: WINDOWS // 40]
            known = ~np.isnan(values)
            place = np.clip(
                np.searchsorted(coarse, run.requests.intended_s[known], side="right") - 1, 0, len(coarse) - 2
            )
            order = np.argsort(place, kind="stable")
            groups = np.split(values[known][order], np.searchsorted(place[order], np.arange(1, len(coarse) - 1)))
            levels = [float(np.quantile(group, quantile)) if len(group) else np.nan for group in groups]
            return np.repeat(np.array(levels), WINDOWS // 40)

        return found

    return _over_time(
        shown, "Does TTFT change during the run?", "Of the requests that were to be sent in each of 40 windows.",
        [("TTFT median", "ms", of(0.5)), ("TTFT p90", "ms", of(0.9))], is_log=True,
    )  # fmt: skip


def _over_time(
    shown: Comparison, title: str, text: str, measures: Sequence[Measure], *, is_log: bool = False
) -> Chart | None:
    """Draw what changes with time: a panel per measure with a line per arm, or for many arms a panel for each of them."""
    edges = over_time.windows(list(shown.runs.values()), WINDOWS)
    known = []
    for measure in measures:
        values = {arm: found for arm, run in shown.runs.items() if (found := measure[2](run, edges)) is not None}
        if any(np.nanmax(found, initial=0) > np.nanmin(found, initial=np.inf) for found in values.values()):
            known.append((measure, values))
    if not known:
        return None
    centres = (edges[1:] + edges[:-1]) / 2
    draw_it = _overlaid if len(shown.arms) <= TANGLE else _side_by_side
    canvas, panels = draw_it(shown, known, centres, float(edges[-1]), is_log=is_log)
    if len(shown.arms) > TANGLE:
        text += " Grey: the range of all arms."
    return Chart(canvas.figure, title, text, panels, is_wide=True)


Known = Sequence[tuple[Measure, dict[str, Floats]]]


def _scale(axes: Axes, values: Iterable[Floats], *, is_log: bool) -> None:
    """Give the y axes of one measure the same scale."""
    together = np.concatenate(list(values))
    together = together[~np.isnan(together)]
    if is_log:
        drawing.times(axes, "y", [float(together.min()), float(together.max())], most=5)
    else:
        drawing.numbers(axes, "y", 0, float(together.max()) * 1.08, most=4)


def _overlaid(
    shown: Comparison, known: Known, centres: Floats, end: float, *, is_log: bool
) -> tuple[Canvas, list[Panel]]:
    """Draw a panel per measure, beside one another, with a line per arm."""
    across = min(len(known), 3)
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
        _scale(axes, values.values(), is_log=is_log)
        for arm, found in values.items():
            entry = shown.key[arm]
            drawing.line(axes, entry, centres, found, linewidth=1.4)
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
    """Draw a row per measure and a column per arm, all of a row with one scale and the range of all arms in grey."""
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
            _scale(axes, values.values(), is_log=is_log)
            table = np.array(list(values.values()))
            axes.fill_between(
                centres, np.nanmin(table, axis=0), np.nanmax(table, axis=0), color=REST, alpha=0.6, linewidth=0
            )
            if entry.arm in values:
                drawing.line(axes, entry, centres, values[entry.arm], linewidth=1.4, linestyle="-")
                panel.add(entry.name, entry.place, centres, values[entry.arm])
            if column:
                drawing.no_labels(axes, "y")
            if row < len(known) - 1:
                drawing.no_labels(axes, "x")
            panels.append(panel)
    return canvas, panels


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
    """Share of prompt tokens each worker found in its cache, over time."""
    return _heat(
        shown, "Which workers find prompts in their cache?", "%", lambda run, edges: over_time.hits(run, edges) * 100,
        "Share of prompt tokens found; nothing is drawn where no prompt came.",
    )  # fmt: skip


def _heat(
    shown: Comparison, title: str, unit: str, measure: Callable[[Record, Floats], Floats], text: str
) -> Chart | None:
    """Draw a map per arm, a row per worker and a column per window, all with one scale of colours."""
    known = [(entry, run) for entry, run, _ in shown.arms if run.requests.worker.count() and run.num_workers > 1]
    if not known:
        return None
    edges = over_time.windows([run for _, run in known], 60)
    tables = [(entry, run, measure(run, edges)) for entry, run in known]
    values = np.concatenate([table[~np.isnan(table)] for _, _, table in tables])
    if not len(values) or np.ptp(values) == 0:
        return None
    top = float(np.quantile(values, 0.995)) or float(values.max())
    most = max(run.num_workers for _, run in known)
    per_row = -(-most // MAX_ROWS)
    across, left, gap = min(len(known), 4), 40, 18
    height = min(max(9 * -(-most // per_row), 64), 240)
    row_height = height + 58
    down = -(-len(known) // across)
    canvas = Canvas(down * row_height + 4, is_wide=True)
    width = (WIDE - left - 86 - gap * (across - 1)) / across
    panels = []
    for place, (entry, run, table) in enumerate(tables):
        x, y = left + place % across * (width + gap), place // across * row_height + 24
        axes = canvas.axes(x, y, width, height)
        canvas.text(x, y - 9, entry.name, colour=entry.colour)
        rows = _rows_of(table, per_row)
        axes.imshow(
            np.ma.masked_invalid(rows), aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=top,
            interpolation="none", extent=(0, float(edges[-1]), -0.5, len(rows) - 0.5),
        )  # fmt: skip
        drawing.seconds(axes, "x", 0, float(edges[-1]), most=4)
        drawing.fixed(
            axes, "y", -0.5, len(rows) - 0.5, {0: "0", len(rows) - 1: str(run.num_workers - 1)} if per_row == 1 else {}
        )
        axes.grid(visible=False)
        if place % across and per_row == 1 and run.num_workers == known[0][1].num_workers:
            drawing.no_labels(axes, "y")
        panel = Panel(axes, "s", unit)
        centres = (edges[1:] + edges[:-1]) / 2
        for worker, row in enumerate(rows[:8]):
            panel.add(f"worker {worker}" if per_row == 1 else f"row {worker + 1}", None, centres, row)
        panels.append(panel)
    canvas.text(0, 15, "worker" if left > 60 else "", colour=QUIET)
    _scale_of_colours(canvas, top, unit, height)
    text += (
        " A row per worker, from 0 below."
        if per_row == 1
        else (
            f" A row is the mean of {per_row} workers, which are in the order of their means: the busiest are at the top."
        )
    )
    return Chart(canvas.figure, title, text, panels, is_wide=True)


def _rows_of(table: Floats, per_row: int) -> Floats:
    """Take the mean of so many workers at a time, those alike together."""
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
    """Draw what the colours stand for, right of the maps."""
    axes = canvas.axes(WIDE - 72, 24, 12, height)
    axes.imshow(
        np.linspace(0, 1, 64)[:, None],
        aspect="auto",
        origin="lower",
        cmap="viridis",
        interpolation="none",
        extent=(0, 1, 0, top),
    )
    drawing.numbers(axes, "y", 0, top, most=4)
    drawing.fixed(axes, "x", 0, 1, {})
    axes.yaxis.tick_right()
    axes.tick_params(axis="y", right=False)
    axes.grid(visible=False)
    canvas.text(WIDE - 4, 15, unit, colour=QUIET, align="right")


CHARTS: dict[str, Callable[[Comparison], Chart | None]] = {
    "differences": differences,
    "percentiles": percentiles,
    "ttft_tail": ttft_tail,
    "itl_tail": itl_tail,
    "e2e_tail": e2e_tail,
    "ttft_split": ttft_split,
    "hit_waterfall": hit_waterfall,
    "arrivals": arrivals,
    "load": load,
    "ttft_over_time": ttft_over_time,
    "failures": failures,
    "worker_work": worker_work,
    "worker_load": worker_load,
    "worker_hits": worker_hits,
}
"""Every chart by file name, in the order of the report."""


def draw(runs: Runs, summary: Summary, folder: Path) -> list[Drawn]:
    """Draw all charts that say something into a folder as SVG; return what the page shows."""
    shown = Comparison(
        {arm: run for arm, run in runs.items() if len(run.requests)} or runs, summary, key_of(list(summary.arms))
    )
    with mpl.rc_context(rc=STYLE):
        charts = {name: chart for name, make in CHARTS.items() if (chart := make(shown)) is not None}
        return drawing.draw(charts, folder)
