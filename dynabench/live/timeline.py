"""A client's record of each request, written while it runs."""

from array import array
from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from reports.figures import metrics
from reports.record.records import Floats, RequestLog, Requests
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.reuse import reuse_of


class Stats(NamedTuple):
    """The progress of a run, for the live view."""

    now_s: float
    num_sent: int
    num_ended: int
    num_failed: int
    num_tokens: int
    ttft_ms: tuple[float, float] | None
    """Median and 90th percentile of recent requests."""
    tpot_ms: tuple[float, float] | None
    workers: dict[int, int]
    """Recent requests by worker."""


class Timeline(RequestLog):
    """The log of a client with additional counts; `isl` is 0 until the server reports a prompt's length."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.gaps = array("d")  # rows as in Record: gap per token, 0, 0, 1, tokens
        self.num_sent = self.num_ended = self.num_failed = 0
        self.total_tokens = self.num_together = 0
        self.num_unstated = 0
        """Requests without usage."""
        self.num_wrong = 0
        """Requests whose usage has numbers that cannot be."""
        self.num_without_tokens = 0
        """Answers of APIs whose answers have no tokens."""
        self.num_as_whole = 0
        """Generated answers that were not streamed."""
        self.num_uncounted = 0
        """Those of them whose number of tokens is not known."""
        self.num_without_last = 0
        """Answers without the event that ends a stream."""
        self.num_reasoning = 0
        """Tokens that are reasoning."""
        self.num_hidden = 0
        """Answers with reasoning that was not sent."""
        self.last_numbers: deque[int] = deque(maxlen=500)
        """The most recently ended requests, for the live view."""

    def stats(self, now_s: float) -> Stats:
        """Return the progress."""
        recent = self.finish(np.array(self.last_numbers, int))
        times = metrics.per_request(recent)
        return Stats(
            now_s,
            self.num_sent,
            self.num_ended,
            self.num_failed,
            self.total_tokens,
            _spread_ms(times["ttft_sched"]),
            _spread_ms(times["tpot"]),
            dict(sorted(Counter(recent.worker[recent.succeeded].compressed().tolist()).items())),
        )


def requests_of(timeline: Timeline, workload: Workload, load: LoadConfig) -> Requests:
    """Return the records of the requests that were answered or failed."""
    ended = ~np.isnan(timeline.done_s) | np.array([bool(error) for error in timeline.error])
    columns = workload.columns
    planned = columns.input_length
    stated = np.array(timeline.isl)
    isl = np.where(stated > 0, stated, planned)
    requests = timeline.finish(
        isl=isl,
        planned_isl=planned,
        planned_osl=None if timeline.num_without_tokens else columns.output_length,
        priority=np.array(columns.values("priority"), np.int32),
        adapter=np.array(columns.values("adapter"), object),
        endless_tokens=np.rint(reuse_of(workload).endless_hits() * (isl / planned))  # in the server's tokens
        if workload.knows_prefixes
        else None,
        is_measured=load.are_measured(timeline.noted("intended_s")),
    )
    cached = requests.cached_tokens
    if not cached.mask.all():  # servers that report hits leave out zeros, as vLLM does
        requests = requests.replace(cached_tokens=cached.filled(0))
    return requests[ended]


def _spread_ms(values: Floats) -> tuple[float, float] | None:
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    p50, p90 = np.percentile(known, [50, 90]) * 1000
    return float(p50), float(p90)
