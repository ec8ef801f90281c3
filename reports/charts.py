"""The pictures of an experiment: one function, one chart."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reports import drawing, insight, metrics, split
from reports.drawing import STYLE, Chart, Drawn, Panel, colour, grid_of, logarithmic, mark, new
from reports.records import Floats, Record
from reports.stability import in_system
from reports.summary import Summary
from reports.tables import milliseconds

Runs = dict[str, Record]
MAX_WORKERS = 32
POINTS = 161
PART_COLOURS = {
    "queue": "#a9a9a9",
    "prefill": "#6a5acd",
    "decode_queue": "#d8c98a",
    "transfer": "#e0703a",
    "first_step": "#2a9d8f",
}
"""Of the parts of TTFT: none is the colour of an arm."""


def ttft_distribution(runs: Runs, summary: Summary) -> Chart:
    """Cumulative distribution of TTFT."""
    return _distribution(runs, "ttft_sched", "TTFT", "share of requests that waited at most this long")


def itl_distribution(runs: Runs, summary: Summary) -> Chart:
    """Cumulative distribution of ITL."""
    title = "ITL: share of tokens that came at most this long after the one before"
    figure, axes = new(title, "ITL (ms)", "share")
    panel = Panel(axes, "ms")
    for place, (arm, run) in enumerate(runs.items()):
        gaps = metrics.TokenGaps(run.gaps)
        if len(run.gaps) and gaps.count:
            low, middle, high = gaps.quantiles([0.0, 0.5, 0.999])
            around = np.linspace(low, 2 * middle - low, POINTS // 2)  # most gaps are alike, and a few are long
            values = np.unique(
                np.concatenate([around, np.geomspace(max(low, 1e-6), max(high, gaps.max(), 2e-6), POINTS // 2)])
            )
            shares = gaps.counts_below(values) / gaps.count
            values = np.maximum(values * 1000, 1e-3)
            mark(axes.plot(values, shares, color=colour(place), label=arm), place)
            panel.add(arm, place, values, shares)
    return _logarithmic(figure, panel, title)


def e2e_distribution(runs: Runs, summary: Summary) -> Chart:
    """Cumulative distribution of E2E latency."""
    return _distribution(runs, "e2e_sched", "E2E", "share of requests that took at most this long")


def percentiles(runs: Runs, summary: Summary) -> Chart:
    """Mean and percentiles side by side, with their intervals."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4))
    keys = ("mean", "p50", "p90", "p99")
    shown = []
    for axes, name in zip(panels, ("ttft_sched", "tpot", "e2e_sched"), strict=True):
        panel = Panel(axes, "", "ms")
        width = 0.8 / max(len(runs), 1)
        for place, arm in enumerate(runs):
            figures = summary.arms[arm].metric(name)
            heights = np.array([figures.at(key) for key in keys], float) * 1000  # None, too few samples: NaN, no bar
            bars = np.arange(4) + place * width
            mark(list(axes.bar(bars, heights, width, color=colour(place), label=arm)), place)
            intervals = [getattr(figures.intervals, key, None) for key in keys]
            known = [spot for spot, interval in enumerate(intervals) if interval is not None]
            if known:
                low, high = np.array([intervals[spot] for spot in known]).T * 1000
                below, above = np.maximum(heights[known] - low, 0), np.maximum(high - heights[known], 0)
                error = axes.errorbar(
                    bars[known], heights[known], [below, above], fmt="none", ecolor=drawing.INK, elinewidth=0.8
                )
                mark(list(error.lines[2]), place)
            panel.add(arm, place, [f"{arm} {key}" for key in keys], heights)
        axes.set_xticks(np.arange(4) + 0.4 - width / 2, keys)
        axes.set_xlim(-0.1 - width / 2, 3.9 - width / 2)  # room for those without a bar
        axes.set_title(f"{metrics.LABELS[name]} (ms)", loc="left", fontsize=11)
        axes.grid(visible=False, axis="x")
        shown.append(panel)
    panels[0].legend(fontsize=8)
    text = "Bars per arm of TTFT, TPOT and E2E latency."
    if grew := [arm for arm in runs if not summary.arms[arm].stability.is_stable]:
        text += f" No intervals, as the queue grew: {', '.join(grew)}."
    return Chart(figure, "Mean and percentiles with 95% intervals", text, shown, True)


def ttft_split(runs: Runs, summary: Summary) -> Chart | None:
    """The parts of the mean TTFT, a stacked bar per arm, in the order in which requests meet them."""
    known = {arm: found for arm in runs if (found := summary.arms[arm].split)}
    if not known:
        return None
    title = "Where does TTFT go? (mean, ms)"
    figure, axes = new(title, "time since the request was sent (ms)", "", size=(7, max(3.6, 1.8 + 0.35 * len(known))))
    panel = Panel(axes, "ms")
    shown = {name for found in known.values() for name in found.parts}
    for row, (arm, found) in enumerate(known.items()):
        place, begin = list(runs).index(arm), 0.0
        for part, seconds in found.parts.items():
            width = seconds * 1000
            mark(list(axes.barh(row, width, 0.6, left=begin, color=PART_COLOURS[part])), place)
            panel.add(f"{arm}, {split.LABELS[part]}: {milliseconds(seconds)} ms", place, [begin + width / 2], [row])
            begin += width
        total = axes.annotate(
            milliseconds(found.ttft), (begin, row), (4, 0), textcoords="offset points", va="center", fontsize=9
        )
        mark(total, place)
    axes.set_yticks(range(len(known)), list(known))
    axes.set_ylim(len(known) - 0.4, -0.6)
    axes.set_xlim(0, max(found.ttft for found in known.values()) * 1150 or 1)
    axes.grid(visible=False, axis="y")
    keys = [Patch(color=PART_COLOURS[part], label=split.LABELS[part]) for part in split.PARTS if part in shown]
    axes.legend(handles=keys, fontsize=8, ncols=len(keys), loc="upper left", bbox_to_anchor=(0, -0.2), borderpad=0)
    text = "; ".join(f"{split.LABELS[part]}: {split.PARTS[part]}" for part in split.PARTS if part in shown)
    return Chart(figure, title, f"{text}.", [panel])


def differences(runs: Runs, summary: Summary) -> Chart | None:
    """Each arm's difference to the baseline, with its interval: left is better."""
    arms = [arm for arm in runs if arm != summary.baseline]
    if not arms:
        return None
    figure, panels = plt.subplots(1, 3, figsize=(11, 1.2 + 0.5 * len(arms)), sharey=True)
    shown = []
    for axes, name in zip(panels, ("ttft_sched", "tpot", "e2e_sched"), strict=True):
        panel = Panel(axes, "%")
        axes.axvline(0, color=drawing.INK, linewidth=0.8)
        for row, arm in enumerate(arms):
            place = list(runs).index(arm)
            for offset, statistic, marker in ((0.13, "mean", "o"), (-0.13, "p90", "s")):
                pair = summary.difference(arm, name, statistic)
                if pair is None or pair.verdict == "unstable":
                    continue
                scale = pair.relative / pair.mean * 100 if pair.mean else 0.0
                low, value, high = pair.low * scale, pair.mean * scale, pair.high * scale
                face = "none" if pair.verdict == "inconclusive" else colour(place)
                mark(axes.plot([low, high], [row + offset] * 2, color=colour(place), linewidth=1.2), place)
                mark(axes.plot([value], [row + offset], marker, color=colour(place), markerfacecolor=face), place)
                word = f"{arm} {statistic}: {value:+.1f}% [{low:+.1f}, {high:+.1f}], {pair.verdict}"
                panel.add(word, place, [value], [row + offset])
        axes.set_title(f"{metrics.LABELS[name]} vs {summary.baseline} (%)", loc="left", fontsize=10)
        axes.set_yticks(range(len(arms)), arms)
        axes.set_ylim(len(arms) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        shown.append(panel)
    text = "Paired differences: left is better; circle mean, square 90th percentile, hollow where it may be noise"
    return Chart(figure, text, "Difference of each arm to the baseline in percent, with 95% intervals.", shown, True)


def timeline(runs: Runs, summary: Summary) -> Chart:
    """Arrivals, requests in the system, and failures over time."""
    has_failures = any(not run.requests.succeeded.all() for run in runs.values())
    number = 2 + has_failures
    figure, rows = plt.subplots(number, 1, figsize=(11, 1.7 * number + 0.6), sharex=True, squeeze=False)
    panels = [Panel(axes, "s") for axes in rows[:, 0]]
    end = max(float(run.requests.intended_s.max(initial=0.0)) for run in runs.values())
    edges = np.linspace(0, max(end, 1e-3), 121)
    centres = (edges[1:] + edges[:-1]) / 2
    seen: list[Floats] = []
    for place, (arm, run) in enumerate(runs.items()):
        rate = np.histogram(run.requests.intended_s, edges)[0] / np.diff(edges)
        if not any(np.array_equal(rate, other) for other in seen):  # arms mostly see the same arrivals
            seen.append(rate)
            mark(panels[0].axes.plot(centres, rate, color=colour(place), linewidth=0.9), place)
            panels[0].add(arm if len(seen) > 1 else "arrivals", place if len(seen) > 1 else None, centres, rate)
        waiting = in_system(run.requests, edges)
        mark(panels[1].axes.plot(centres, waiting, color=colour(place), label=arm, linewidth=1.1), place)
        panels[1].add(arm, place, centres, waiting)
        if has_failures:
            failed = np.histogram(run.requests.intended_s[~run.requests.succeeded], edges)[0]
            mark(panels[2].axes.step(centres, failed, color=colour(place), where="mid"), place)
            panels[2].add(arm, place, centres, failed.astype(float))
    for panel, label in zip(panels, ("arrivals/s", "in the system", "failed"), strict=False):
        panel.axes.set_ylabel(label)
        panel.axes.set_ylim(bottom=0)
    panels[1].axes.legend(fontsize=8)
    panels[-1].axes.set_xlabel("time (s)")
    return Chart(
        figure,
        "Timeline: arrivals, requests in the system, failures",
        "Over the time of the run, per arm.",
        panels,
        True,
    )


def ttft_over_time(runs: Runs, summary: Summary) -> Chart:
    """TTFT of requests by when they arrived."""
    title = "TTFT over time: median (line) and 90th percentile (dots)"
    figure, axes = new(title, "intended arrival (s)", "TTFT (ms)")
    panel = Panel(axes, "s", "ms")
    for place, (arm, run) in enumerate(runs.items()):
        values = np.maximum(metrics.per_request(run.requests)["ttft_sched"] * 1000, 1e-3)
        centres, groups = drawing.windows(run.requests.intended_s, values)
        medians = [float(np.median(group)) for group in groups]
        mark(axes.plot(centres, medians, color=colour(place), label=arm), place)
        mark(
            axes.plot(centres, [np.percentile(group, 90) for group in groups], ".", color=colour(place), markersize=4),
            place,
        )
        panel.add(f"{arm} median", place, centres, medians)
    axes.set_yscale("log")
    logarithmic(axes.yaxis)
    axes.legend(fontsize=8)
    return Chart(figure, title, "The run is divided into 60 windows.", [panel])


def hit_waterfall(runs: Runs, summary: Summary) -> Chart | None:
    """Where prefix hits were lost: from an unlimited cache to what the engine found."""
    stages = list(insight.WATERFALL)
    if all(summary.arms[arm].waterfall.endless is None for arm in runs):
        return None
    title = "Prefix hits: where they were lost (share of prompt tokens)"
    figure, axes = new(title, "", "share of prompt tokens (%)")
    panel = Panel(axes, "", "%")
    width = 0.8 / max(len(runs), 1)
    for place, arm in enumerate(runs):
        shares = [getattr(summary.arms[arm].waterfall, stage) for stage in stages]
        heights = np.array([np.nan if share is None else share * 100 for share in shares])
        mark(
            list(axes.bar(np.arange(4) + place * width, np.nan_to_num(heights), width, color=colour(place), label=arm)),
            place,
        )
        panel.add(arm, place, [f"{arm}, {insight.WATERFALL[stage]}" for stage in stages], heights)
    axes.set_xticks(np.arange(4) + 0.4 - width / 2, ["unlimited cache", "best worker", "predicted", "engine found"])
    axes.grid(visible=False, axis="x")
    axes.legend(fontsize=8)
    return Chart(figure, title, "; ".join(f"{key}: {text}" for key, text in insight.WATERFALL.items()), [panel])


def worker_heat(runs: Runs, summary: Summary) -> Chart | None:
    """Work sent to each worker over time, dark is much."""
    known = {arm: run for arm, run in runs.items() if run.requests.worker.count()}
    if not known:
        return None
    figure, panels = grid_of(len(known), height=1.2 + 0.16 * min(max(run.num_workers for run in known.values()), 32))
    shown = []
    tables = {}
    for arm, run in known.items():
        end = max(float(run.requests.intended_s.max(initial=0.0)), 1e-3)
        edges = np.linspace(0, end, 61)
        tables[arm] = (edges, insight.work_over_time(run, edges)[:MAX_WORKERS])
    most = max(float(np.percentile(table, 99)) for _, table in tables.values()) or 1.0
    for axes, (arm, (edges, table)) in zip(panels, tables.items(), strict=True):
        panel = Panel(axes, "s", "tokens/s")
        axes.imshow(
            table, aspect="auto", origin="lower", cmap="Blues", vmin=0, vmax=most, interpolation="nearest",
            extent=(0, edges[-1], -0.5, len(table) - 0.5),
        )  # fmt: skip
        centres = (edges[1:] + edges[:-1]) / 2
        for worker, row in enumerate(table):
            panel.add(f"worker {worker}", None, centres, row)
        axes.set_title(arm, loc="left", fontsize=10)
        axes.set_xlabel("time (s)")
        axes.grid(visible=False)
        shown.append(panel)
    panels[0].set_ylabel("worker")
    return Chart(
        figure,
        "Work sent to each worker over time (uncached prompt and output tokens per second)",
        "A row per worker.",
        shown,
        True,
    )


def hits_over_time(runs: Runs, summary: Summary) -> Chart:
    """Share of prompt tokens each worker found in its cache, over time."""
    return _per_worker(runs, "Cache hits of each worker over time (share of prompt tokens)", "", _hits)


def running_over_time(runs: Runs, summary: Summary) -> Chart:
    """Requests running on each worker, over time."""
    return _per_worker(runs, "Requests on each worker over time", "", _running)


CHARTS: dict[str, Callable[[Runs, Summary], Chart | None]] = {
    "differences": differences,
    "percentiles": percentiles,
    "ttft_split": ttft_split,
    "ttft_distribution": ttft_distribution,
    "itl_distribution": itl_distribution,
    "e2e_distribution": e2e_distribution,
    "hit_waterfall": hit_waterfall,
    "timeline": timeline,
    "ttft_over_time": ttft_over_time,
    "worker_heat": worker_heat,
    "hits_over_time": hits_over_time,
    "running_over_time": running_over_time,
}
"""Every chart by file name, in the order of the report."""


def draw(runs: Runs, summary: Summary, folder: Path) -> list[Drawn]:
    """Draw all charts that say something, into a folder as PNG and SVG; return what the page shows."""
    with plt.rc_context(rc=STYLE):
        charts = {name: chart for name, make in CHARTS.items() if (chart := make(runs, summary)) is not None}
        return drawing.draw(charts, folder)


def _distribution(runs: Runs, name: str, label: str, what: str) -> Chart:
    title = f"{label}: {what}"
    figure, axes = new(title, f"{label} from intended arrival (ms)", "share")
    panel = Panel(axes, "ms")
    for place, (arm, run) in enumerate(runs.items()):
        values = metrics.per_request(run.requests)[name] * 1000
        values = values[~np.isnan(values)]
        if len(values):
            shares = np.linspace(0, 1, min(max(len(values), 2), POINTS))
            points = np.maximum(np.quantile(values, shares), 1e-3)
            mark(axes.plot(points, shares, color=colour(place), label=arm), place)
            panel.add(arm, place, points, shares)
    return _logarithmic(figure, panel, title)


def _logarithmic(figure: Figure, panel: Panel, title: str) -> Chart:
    panel.axes.set_xscale("log")
    logarithmic(panel.axes.xaxis)
    panel.axes.tick_params(axis="x", labelsize=9)
    if panel.axes.get_legend_handles_labels()[0]:
        panel.axes.legend(fontsize=8)
    return Chart(figure, title, "Cumulative distribution per arm; further left is better.", [panel])


def _hits(run: Record, worker: int, edges: Floats) -> Floats:
    requests = run.requests
    mine = requests[(requests.prompt_worker == worker).filled(False) & ~requests.cached_tokens.mask]
    tokens, _ = np.histogram(mine.intended_s, edges, weights=mine.isl)
    cached, _ = np.histogram(mine.intended_s, edges, weights=mine.cached_tokens.data)
    with np.errstate(invalid="ignore"):
        result: Floats = cached / tokens
    return result


def _running(run: Record, worker: int, edges: Floats) -> Floats:
    """Count the requests on a worker; one that another prefills comes when it is sent there to be decoded."""
    requests = run.requests[run.requests.succeeded]
    prefilled = requests[(requests.prefill_worker == worker).filled(False)]
    answered = requests[(requests.worker == worker).filled(False)]
    came_s = np.where(answered.prefill_worker.mask, answered.intended_s, answered.decode_queued_s.filled(0))
    return in_system(answered.replace(intended_s=came_s), edges) + in_system(
        prefilled.replace(done_s=prefilled.prefill_end_s), edges
    )


def _per_worker(runs: Runs, title: str, unit: str, measure: Callable[[Record, int, Floats], Floats]) -> Chart:
    figure, panels = grid_of(len(runs), height=2.3)
    shown = []
    for place, (axes, (arm, run)) in enumerate(zip(panels, runs.items(), strict=True)):
        end = max(float(run.requests.intended_s.max(initial=0.0)), 1e-3)
        edges = np.linspace(0, end, 41)
        centres = (edges[1:] + edges[:-1]) / 2
        panel = Panel(axes, "s", unit)
        for worker in range(min(run.num_workers, MAX_WORKERS)):
            values = measure(run, worker, edges)
            mark(axes.plot(centres, values, color=colour(place), alpha=0.55, linewidth=0.9), place)
            if worker < 8:
                panel.add(f"worker {worker}", None, centres, values)
        axes.set_title(arm, loc="left", fontsize=10)
        axes.set_xlabel("time (s)")
        shown.append(panel)
    return Chart(figure, title, "A line per worker.", shown, True)
