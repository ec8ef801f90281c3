"""vLLM's line about the throughput and the queues of each engine, every so often.

There is a timer only while there is something to say: the first step of a busy time starts it, and it ends with a line that
says that nothing happens any more.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from serving.engines.mock.rank import MockEngine
from serving.frontend.series import Series
from serving.runtime.world import world

log = logging.getLogger(__name__)

RECENT_REQUESTS = 1000
"""The hit rate is that of so many requests."""


class StatsTotals(NamedTuple):
    """What one engine has counted since its start."""

    num_computed: float
    num_generated: float
    num_preemptions: float
    num_requests: float
    num_queried: float
    num_hits: float

    def since(self, before: "StatsTotals") -> "StatsTotals":
        """Return what was counted since then."""
        return StatsTotals(*(now - then for now, then in zip(self, before, strict=True)))


def totals_of(rank: MockEngine, series: Series) -> StatsTotals:
    """Return what an engine has counted."""
    found = rank.prefix_cache_stats
    return StatsTotals(
        series.total("vllm:prompt_tokens_by_source", "local_compute"),
        series.total("vllm:generation_tokens"),
        series.total("vllm:num_preemptions"),
        found.num_prompts,
        found.num_tokens,
        found.num_hits,
    )


class EngineStats:
    """The lines of one engine."""

    def __init__(self, number: int, rank: MockEngine, series: Series) -> None:
        self._number = number
        self._rank = rank
        self._series = series
        self._totals = totals_of(rank, series)
        self._recent: deque[StatsTotals] = deque()

    def line(self, seconds: float) -> tuple[str, bool]:
        """Return what to say about the time since the last line, and whether anything happened in it."""
        totals = totals_of(self._rank, self._series)
        new, self._totals = totals.since(self._totals), totals
        queues = self._rank.queues()
        parts = [
            f"Avg prompt throughput: {new.num_computed / seconds:.1f} tokens/s",
            f"Avg generation throughput: {new.num_generated / seconds:.1f} tokens/s",
            f"Running: {queues.num_running} reqs",
            f"Waiting: {queues.num_waiting} reqs",
        ]
        if queues.num_deferred:
            parts.append(f"Deferred: {queues.num_deferred} reqs")
        if new.num_preemptions:
            parts.append(f"Preemptions: {new.num_preemptions:.0f}")
        parts.append(f"GPU KV cache usage: {queues.kv_usage:.1%}")
        if self._rank.config.enable_prefix_caching and totals.num_requests:
            parts.append(f"Prefix cache hit rate: {self._hit_rate(new):.1%}")
        return f"Engine {self._number:03d}: {', '.join(parts)}", bool(new.num_computed or new.num_generated)

    def _hit_rate(self, new: StatsTotals) -> float:
        """Return the hit rate of recent requests, these included."""
        if new.num_requests:
            self._recent.append(new)
        while len(self._recent) > 1 and sum(each.num_requests for each in self._recent) > RECENT_REQUESTS:
            self._recent.popleft()
        queried = sum(each.num_queried for each in self._recent)
        return sum(each.num_hits for each in self._recent) / queried if queried else 0.0


class StatsLog:
    """The lines of all engines."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._engines: list[EngineStats] = []
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether there will be another line."""
        return self._timer is not None

    def follow(self, engines: Mapping[int, tuple[MockEngine, Series]]) -> None:
        """Log these from now on, by their numbers."""
        self._engines = [EngineStats(number, rank, series) for number, (rank, series) in engines.items()]

    def wake(self) -> None:
        """Note that an engine is busy."""
        if self._timer is None:
            self._since_s = world().now()
            self._wait()

    def close(self) -> None:
        """Log nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._say)

    def _say(self) -> None:
        now = world().now()
        seconds, self._since_s = now - self._since_s, now
        lines = [engine.line(seconds) for engine in self._engines]
        for line, _ in lines:
            log.info("%s", line)
        if any(is_busy for _, is_busy in lines):
            self._wait()
        else:
            self._timer = None
