"""The charts of a comparison. Each function draws one chart that answers one question; empty charts are left out.

Lines are labelled by arm. Where they would tangle, each arm has its own panel, with the range of all arms in grey.
"""

from collections.abc import Callable
from pathlib import Path

from reports.charts import drawing, fleet, heat, rows, tails, tiers, timelines
from reports.charts.comparison import Comparison, Runs
from reports.charts.drawing import Chart, Drawn
from reports.key import key_of
from reports.summary import Summary

CHARTS: dict[str, Callable[[Comparison], Chart | None]] = {
    "fleet": fleet.fleet,
    "differences": rows.differences,
    "percentiles": rows.percentiles,
    "ttft_tail": tails.ttft_tail,
    "itl_tail": tails.itl_tail,
    "e2e_tail": tails.e2e_tail,
    "hit_waterfall": tails.hit_waterfall,
    "hits_by_tier": tiers.hits,
    "ttft_split": rows.ttft_split,
    "tier_savings": tiers.savings,
    "arrivals": timelines.arrivals,
    "load": timelines.load,
    "ttft_over_time": timelines.ttft_over_time,
    "server_load": timelines.server_load,
    "failures": timelines.failures,
    "worker_work": heat.worker_work,
    "worker_load": heat.worker_load,
    "worker_hits": heat.worker_hits,
}
"""Every chart by file name, in the order of the report."""


def draw(runs: Runs, summary: Summary, folder: Path) -> list[Drawn]:
    """Draw all non-empty charts into a folder as SVG; return what the page shows."""
    shown = compared(runs, summary)
    charts = {name: chart for name, make in CHARTS.items() if (chart := make(shown)) is not None}
    return drawing.draw(charts, folder)


def compared(runs: Runs, summary: Summary) -> Comparison:
    """Return what charts show: the arms that answered any request, if there are such."""
    answered = {arm: run for arm, run in runs.items() if len(run.requests)} or runs
    return Comparison(answered, summary, key_of(list(summary.arms)))
