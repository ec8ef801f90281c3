"""The pictures: one function, one chart."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from reports import metrics
from reports.records import ArmResult, Floats

COLOURS = ["#3b6fb6", "#d1605e", "#4b9b6e", "#b07aa1", "#e1a23b", "#5fa2ad", "#8c6d4f", "#777777"]
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "svg.fonttype": "none",
    "svg.hashsalt": "dynabench",
    "font.family": "sans-serif",
    "legend.frameon": False,
}
Runs = dict[str, ArmResult]


def ttft_distribution(runs: Runs) -> Figure:
    """Cumulative distribution of TTFT."""
    figure, axes = _new(
        "TTFT: share of requests that waited at most this long", "TTFT from intended arrival (ms)", "share"
    )
    for colour, (arm, run) in zip(_colours(), runs.items(), strict=False):
        values = metrics.per_request(run)["ttft_sched"] * 1000
        values = np.sort(values[~np.isnan(values)])
        if len(values):
            shares = _shares(len(values))
            axes.plot(np.quantile(values, shares), shares, color=colour, label=arm)
    return _finish(figure, axes, logarithmic=True)


def itl_distribution(runs: Runs) -> Figure:
    """Cumulative distribution of ITL."""
    figure, axes = _new("ITL: share of tokens that came at most this long after the one before", "ITL (ms)", "share")
    for colour, (arm, run) in zip(_colours(), runs.items(), strict=False):
        gaps = metrics.TokenGaps(run.gaps)
        if len(run.gaps) and gaps.count:
            least, most = gaps.quantiles([0.0, 1.0])
            values = np.geomspace(max(least, 1e-6), max(most, 2e-6), 160)
            axes.plot(values * 1000, gaps.counts_below(values) / gaps.count, color=colour, label=arm)
    return _finish(figure, axes, logarithmic=True)


def percentiles(runs: Runs) -> Figure:
    """TTFT and ITL percentiles side by side."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6))
    for axes, name in zip(panels, ("ttft_sched", "itl"), strict=True):
        width = 0.8 / max(len(runs), 1)
        for place, (arm, run) in enumerate(runs.items()):
            figures = (
                metrics.describe_gaps(metrics.TokenGaps(run.gaps))
                if name == "itl"
                else metrics.describe(metrics.per_request(run)[name])
            )
            heights = [(figures[key] or 0) * 1000 for key in ("mean", "p50", "p90", "p99")]
            axes.bar(np.arange(4) + place * width, heights, width, color=COLOURS[place % len(COLOURS)], label=arm)
        axes.set_xticks(np.arange(4) + 0.4 - width / 2, ["mean", "p50", "p90", "p99"])
        axes.set_title(f"{metrics.LABELS[name]} (ms)", loc="left", fontsize=11)
        axes.grid(visible=False, axis="x")
    panels[0].legend()
    figure.tight_layout()
    return figure


def ttft_over_time(runs: Runs) -> Figure:
    """TTFT of requests by when they arrived."""
    figure, axes = _new("TTFT over time: median (line) and 90th percentile (dots)", "intended arrival (s)", "TTFT (ms)")
    for colour, (arm, run) in zip(_colours(), runs.items(), strict=False):
        values = metrics.per_request(run)["ttft_sched"] * 1000
        centres, groups = _windows(run.columns["intended_s"], values)
        axes.plot(centres, [np.median(group) for group in groups], color=colour, label=arm)
        axes.plot(centres, [np.percentile(group, 90) for group in groups], ".", color=colour, markersize=4)
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    return _finish(figure, axes)


def hits_over_time(runs: Runs) -> Figure:
    """Share of prompt tokens each worker found in its cache, over time."""
    return _per_worker(runs, "Cache hits of each worker (share of prompt tokens)", _hits)


def running_over_time(runs: Runs) -> Figure:
    """Requests running on each worker, over time."""
    return _per_worker(runs, "Running requests on each worker", _running)


CHARTS: dict[str, Callable[[Runs], Figure]] = {
    "ttft_distribution": ttft_distribution,
    "itl_distribution": itl_distribution,
    "percentiles": percentiles,
    "ttft_over_time": ttft_over_time,
    "hits_over_time": hits_over_time,
    "running_over_time": running_over_time,
}
"""Every chart by file name, in the order of the report."""


def draw(runs: Runs, folder: Path) -> dict[str, str]:
    """Draw all charts into a folder as PNG and SVG; return the SVG texts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    with plt.rc_context(rc=STYLE):
        for name, chart in CHARTS.items():
            figure = chart(runs)
            figure.savefig(folder / f"{name}.png", dpi=110, metadata={"Software": None})
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            (folder / f"{name}.svg").write_text(text.getvalue())
            texts[name] = text.getvalue()[text.getvalue().index("<svg") :]
            plt.close(figure)
    return texts


def _hits(run: ArmResult, worker: int, edges: Floats) -> Floats:
    c = run.columns
    mine = c["worker"] == worker
    tokens, _ = np.histogram(c["intended_s"][mine], edges, weights=c["isl"][mine])
    cached, _ = np.histogram(c["intended_s"][mine], edges, weights=c["cached_tokens"][mine])
    with np.errstate(invalid="ignore"):
        result: Floats = cached / tokens
    return result


def _running(run: ArmResult, worker: int, edges: Floats) -> Floats:
    """Mean number running in each window: time in the engine that falls into it, over its length."""
    c = run.columns
    mine = (c["worker"] == worker) & (c["error"] == "")
    start, stop = np.sort(c["admitted_s"][mine]), np.sort(c["last_token_s"][mine])
    # Integral of the number of intervals begun (ended) before t.
    begun = np.array([np.clip(edge - start, 0, None).sum() for edge in edges])
    ended = np.array([np.clip(edge - stop, 0, None).sum() for edge in edges])
    result: Floats = np.diff(begun - ended) / np.diff(edges)
    return result


def _per_worker(runs: Runs, title: str, measure: Callable[[ArmResult, int, Floats], Floats]) -> Figure:
    figure, panels = plt.subplots(1, len(runs), figsize=(3.1 * max(len(runs), 2), 3.2), sharey=True, squeeze=False)
    for axes, colour, (arm, run) in zip(panels[0], _colours(), runs.items(), strict=False):
        end = max(float(run.columns["intended_s"].max(initial=0.0)), 1e-3)
        edges = np.linspace(0, end, 41)
        for worker in range(min(run.num_workers, 32)):
            axes.plot(
                (edges[1:] + edges[:-1]) / 2, measure(run, worker, edges), color=colour, alpha=0.55, linewidth=0.9
            )
        axes.set_title(arm, loc="left", fontsize=10)
        axes.set_xlabel("time (s)")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def _new(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(7, 3.6))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _finish(figure: Figure, axes: Axes, *, logarithmic: bool = False) -> Figure:
    if logarithmic:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.tight_layout()
    return figure


def _plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers at 1, 2 and 5."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _colours() -> list[str]:
    return COLOURS * 8


def _shares(count: int) -> Floats:
    return np.linspace(0, 1, min(max(count, 2), 201))


def _windows(times: Floats, values: Floats, number: int = 60) -> tuple[Floats, list[Floats]]:
    known = ~np.isnan(values)
    times, values = times[known], values[known]
    if not len(times):
        return np.empty(0), []
    edges = np.linspace(times.min(), times.max() + 1e-9, number + 1)
    place = np.digitize(times, edges) - 1
    groups = [values[place == window] for window in range(number)]
    centres = (edges[1:] + edges[:-1]) / 2
    kept = [window for window in range(number) if len(groups[window])]
    return centres[kept], [groups[window] for window in kept]
