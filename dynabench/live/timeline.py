"""What a client notes of each request while it runs."""

from array import array
from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from workloads import Workload
from workloads.describe import endless_hits
from workloads.pacing import LoadConfig


class Stats(NamedTuple):
    """How a run is going, for the live view."""

    now_s: float
    num_sent: int
    num_ended: int
    num_failed: int
    num_tokens: int
    ttft_ms: tuple[float, float] | None
    """Median and 90th percentile of the last few hundred requests."""
    tpot_ms: tuple[float, float] | None
    workers: dict[int, int]
    """Recent requests by worker."""


class Timeline:
    """What became of each request, in seconds from the start of the run; -1 for what did not happen."""

    def __init__(self, count: int) -> None:
        self.intended_s = array("d", [-1.0]) * count
        self.sent_s = array("d", [-1.0]) * count
        self.first_byte_s = array("d", [-1.0]) * count
        self.first_token_s = array("d", [-1.0]) * count
        self.last_token_s = array("d", [-1.0]) * count
        self.done_s = array("d", [-1.0]) * count
        self.num_tokens = array("i", [0]) * count
        self.prompt_tokens = array("i", [-1]) * count
        self.first_chunk_tokens = array("i", [0]) * count
        self.worker = array("i", [-1]) * count
        self.cached_tokens = array("i", [0]) * count
        self.predicted_tokens = array("i", [0]) * count
        self.best_tokens = array("i", [-1]) * count
        self.queue_depth = array("i", [-1]) * count
        self.errors = [""] * count
        self.gaps = array("d")  # rows as in ArmResult: gap per token, 0, 0, 1, tokens
        self.num_sent = self.num_ended = self.num_failed = 0
        self.total_tokens = self.num_together = 0
        self.num_unstated = 0
        """Requests whose usage was not given."""
        self.last_numbers: deque[int] = deque(maxlen=500)
        """Requests that ended last, for the live view."""

    def stats(self, now_s: float) -> Stats:
        """Tell how it is going."""
        recent = [number for number in self.last_numbers if not self.errors[number]]
        ttfts = [self.first_token_s[number] - self.intended_s[number] for number in recent]
        tpots = [
            (self.last_token_s[number] - self.first_token_s[number]) / more
            for number in recent
            if (more := self.num_tokens[number] - self.first_chunk_tokens[number]) > 0
        ]
        return Stats(
            now_s,
            self.num_sent,
            self.num_ended,
            self.num_failed,
            self.total_tokens,
            _spread_ms(ttfts),
            _spread_ms(tpots),
            dict(sorted(Counter(self.worker[number] for number in recent).items())),
        )


def as_columns(timeline: Timeline, workload: Workload, load: LoadConfig) -> dict[str, np.ndarray]:
    """Return the columns of requests.parquet, for the requests that were answered or failed."""
    requests = workload.requests
    planned = np.array([request.input_length for request in requests], np.int32)
    stated = np.array(timeline.prompt_tokens)
    isl = np.where(stated >= 0, stated, planned)
    columns = {
        "request": np.arange(len(requests), dtype=np.int32),
        "worker": np.array(timeline.worker),
        "intended_s": np.array(timeline.intended_s),
        "sent_s": np.array(timeline.sent_s),
        "admitted_s": np.array(timeline.first_byte_s),
        "first_byte_s": np.array(timeline.first_byte_s),
        "first_token_s": np.array(timeline.first_token_s),
        "last_token_s": np.array(timeline.last_token_s),
        "done_s": np.array(timeline.done_s),
        "isl": isl,
        "osl": np.array(timeline.num_tokens),
        "planned_isl": planned,
        "planned_osl": np.array([request.output_length for request in requests], np.int32),
        "first_chunk_tokens": np.array(timeline.first_chunk_tokens),
        "cached_tokens": np.array(timeline.cached_tokens),
        "predicted_tokens": np.array(timeline.predicted_tokens),
        "best_tokens": np.array(timeline.best_tokens),
        "endless_tokens": np.rint(endless_hits(workload) * (isl / planned)).astype(np.int64),  # in the server's tokens
        "queue_depth": np.array(timeline.queue_depth),
        "preemptions": np.full(len(requests), -1, np.int32),  # not told over HTTP
        "error": np.array(timeline.errors, dtype=object),
        "is_measured": np.array([load.is_measured(time) for time in timeline.intended_s], bool),
    }
    ended = (columns["done_s"] >= 0) | (columns["error"] != "")
    return {name: column[ended] for name, column in columns.items()}


def _spread_ms(values: list[float]) -> tuple[float, float] | None:
    if not values:
        return None
    p50, p90 = np.percentile(values, [50, 90]) * 1000
    return float(p50), float(p90)
