"""Which data-parallel rank gets a request, as the client of vLLM's engines chooses (`DPLBAsyncMPClient`).

It knows exactly which of its requests are in progress, and what the ranks had to do when they last reported. A coordinator
passes reports on, at most every `REPORT_S`; until then the client adds what it sends.
"""

from collections.abc import Sequence

from serving.worker.engine import EngineLoad

REPORT_S = 0.1

USAGE_FROM = 0.5
"""Waiting requests count more from this share of KV blocks in use ..."""
USAGE_WEIGHT = 6.0
"""... by this much for each further share: four times as much when all are in use."""


class Balance:
    """Chooses for one client; pure."""

    def __init__(self, num_ranks: int) -> None:
        self._reports = [EngineLoad()] * num_ranks
        self._in_progress = [0] * num_ranks
        self._first = 0  # of equal ranks, the next from here on is chosen

    def choose(self) -> int:
        """Return the rank for the next request."""
        num_ranks = len(self._reports)
        ranks = [(self._first + number) % num_ranks for number in range(num_ranks)]
        chosen = min(ranks, key=self._score)
        report = self._reports[chosen]
        self._reports[chosen] = report._replace(num_waiting=report.num_waiting + 1)
        self._first = (self._first + 1) % num_ranks
        return chosen

    def begin(self, rank: int) -> None:
        """Count a request that is sent."""
        self._in_progress[rank] += 1

    def end(self, rank: int) -> None:
        """Count a request that has ended."""
        self._in_progress[rank] -= 1

    def hear(self, reports: Sequence[EngineLoad]) -> None:
        """Replace what is known of the ranks."""
        self._reports = list(reports)

    def _score(self, rank: int) -> float:
        report = self._reports[rank]
        usage = report.kv_active_blocks / report.kv_total_blocks if report.kv_total_blocks else 0.0
        penalty = report.num_waiting * USAGE_WEIGHT * max(0.0, usage - USAGE_FROM)
        return max(self._in_progress[rank], report.num_waiting + report.num_running) + penalty
