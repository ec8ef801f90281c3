"""Charts with a line per arm: how long the slowest take, and where prefix hits are lost."""

from collections.abc import Callable

import numpy as np

from reports.charts import drawing
from reports.charts.axes import Axes
from reports.charts.comparison import Comparison
from reports.charts.drawing import HALF, LIMIT, LINE, Canvas, Chart, Panel
from reports.figures import insight, metrics
from reports.figures.conditions import Condition
from reports.record.records import Floats, Record


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
"""The number of values of a run, and their quantiles (s)."""


def _of_requests(name: str) -> Quantiles:
    def found(run: Record) -> tuple[int, Callable[[Floats], Floats]]:
        values = metrics.of_each(run.requests, name)
        values = np.sort(values[~np.isnan(values)])
        return len(values), lambda shares: np.quantile(values, shares)

    return found


def _of_gaps(run: Record) -> tuple[int, Callable[[Floats], Floats]]:
    gaps = metrics.TokenGaps(run.gaps)
    return (gaps.count if len(run.gaps) else 0), gaps.quantiles


def _tail(shown: Comparison, name: str, title: str, what: str, quantiles: Quantiles) -> Chart | None:
    """Draw times by percentile, with the share of slower ones on a log scale, so that the tail is on the right."""
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
    axes.x.is_log = True
    ticks = {50: "p50", 10: "p90", 1: "p99", 0.1: "p99.9", 0.01: "p99.99"}
    drawing.fixed(axes, "x", 100, last, {at: text for at, text in ticks.items() if at >= last * 0.99})
    for entry, slower, values in lines:
        drawing.line(axes, entry, slower, values)
        panel.add(entry.name, entry.place, slower, values)
    for limit in limits:
        _limit(canvas, axes, limit)
    canvas.label_ends(axes, [(slower[-1], values[-1], entry) for entry, slower, values in lines])
    text = (
        f"{what}, with the tail stretched: from p90 on, each step leaves a tenth as many slower ones. Lower is better."
    )
    return Chart(canvas, title, text, [panel])


def _limit(canvas: Canvas, axes: Axes, limit: Condition) -> None:
    """Draw a limit as a line across, with a ring at the percentile that must be below it."""
    value = limit.value * 1000
    statistic = limit.statistic or ""
    if statistic.startswith("p"):
        axes.plot([100 - float(statistic[1:])], [value], "v", colour=LIMIT, size=7, is_clipped=False)
    canvas.label_limit(axes, value, str(limit))


def hit_waterfall(shown: Comparison) -> Chart | None:
    """Where prefix hits were lost: from an unlimited cache to what the engine found."""
    names = {"endless": "unlimited cache", "best": "best worker", "predicted": "predicted", "actual": "found"}
    known = []
    for entry, _, figures in shown.arms:
        found = [getattr(figures.waterfall, stage) for stage in names]
        if sum(share is not None for share in found) > 1 and any(found):
            known.append((entry, np.array([np.nan if share is None else share * 100 for share in found], float)))
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
        drawing.line(axes, entry, there, shares[there], marker=entry.marker, size=5, is_clipped=False)
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
    return Chart(canvas, "Where are prefix hits lost?", f"{text[:1].upper()}{text[1:]}.", [panel])
