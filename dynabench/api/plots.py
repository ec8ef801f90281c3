"""The report's charts as axes of matplotlib, for `Result.plot`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foundation.errors import UserError
from foundation.extras import needed

if TYPE_CHECKING:
    from reports.record.records import Record
    from reports.summary import Summary


class Plots:
    """The charts of a result. Each method draws one, and returns its axes, or a list if it has several pairs of axes.

    The figure is `axes.figure`; a notebook shows it, and `axes.figure.savefig("chart.png")` writes it.

    Raises:
        UserError: the chart would be empty for this result, or matplotlib is not installed.
    """

    def __init__(self, runs: "Sequence[Record]", summary: "Summary") -> None:
        self._runs, self._summary = runs, summary

    def __call__(self) -> list[str]:
        """Return the names of the charts that are not empty."""
        from reports.charts import CHARTS

        return [METHODS.get(name, name) for name, make in CHARTS.items() if make(self._shown()) is not None]

    def ttft_tails(self) -> Any:
        """Draw TTFT by percentile, with the tail stretched (ms)."""
        return self._draw("ttft_tail")

    def itl_tails(self) -> Any:
        """Draw the times between tokens by percentile (ms)."""
        return self._draw("itl_tail")

    def e2e_tails(self) -> Any:
        """Draw the times of whole answers by percentile (ms)."""
        return self._draw("e2e_tail")

    def differences(self) -> Any:
        """Draw how the arms differ from the first, with intervals (%)."""
        return self._draw("differences")

    def percentiles(self) -> Any:
        """Draw TTFT, TPOT and E2E latency of each arm by percentile (ms)."""
        return self._draw("percentiles")

    def hit_waterfall(self) -> Any:
        """Draw where prefix hits were lost, from an unlimited cache to what engines found (%)."""
        return self._draw("hit_waterfall")

    def hits_by_tier(self) -> Any:
        """Draw where prompt tokens came from: GPUs, host memory, disk, a store (%)."""
        return self._draw("hits_by_tier")

    def ttft_split(self) -> Any:
        """Draw where TTFT goes: queues, prefill, transfers (ms)."""
        return self._draw("ttft_split")

    def tier_savings(self) -> Any:
        """Draw what KV tiers saved."""
        return self._draw("tier_savings")

    def arrivals(self) -> Any:
        """Draw requests and tokens that arrived over time."""
        return self._draw("arrivals")

    def load(self) -> Any:
        """Draw requests in flight and waiting over time."""
        return self._draw("load")

    def ttft_over_time(self) -> Any:
        """Draw TTFT over time (ms)."""
        return self._draw("ttft_over_time")

    def server_load(self) -> Any:
        """Draw what a measured server says of itself over time."""
        return self._draw("server_load")

    def failures(self) -> Any:
        """Draw failed requests over time."""
        return self._draw("failures")

    def fleet(self) -> Any:
        """Draw the number of workers over time."""
        return self._draw("fleet")

    def worker_work(self) -> Any:
        """Draw the work of each worker over time."""
        return self._draw("worker_work")

    def worker_load(self) -> Any:
        """Draw the requests at each worker over time."""
        return self._draw("worker_load")

    def worker_hits(self) -> Any:
        """Draw the cache hit share of each worker over time (%)."""
        return self._draw("worker_hits")

    def _shown(self) -> Any:
        from reports import charts
        from reports.folder import first_runs

        return charts.compared(first_runs(self._runs, self._summary), self._summary)

    def _draw(self, name: str) -> Any:
        from reports.charts import CHARTS

        try:
            from reports.charts.figure import figure_of

            chart = CHARTS[name](self._shown())
            if chart is None:
                raise UserError(f"{METHODS.get(name, name)} would be empty; these are not: {', '.join(self())}")
            axes = figure_of(chart).axes
        except ImportError as error:
            raise UserError(needed(error.name or "matplotlib", "result.plot", "notebook")) from None
        return axes[0] if len(axes) == 1 else axes


METHODS: dict[str, str] = {"ttft_tail": "ttft_tails", "itl_tail": "itl_tails", "e2e_tail": "e2e_tails"}
"""Charts with another name than their file."""
