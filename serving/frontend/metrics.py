"""What the frontend counts, as Prometheus metrics under Dynamo's names.

The hot path only adds to plain lists; several frontend processes add up theirs when asked (`merge`).
"""

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

PREFIX = "dynamo_frontend_"
DURATIONS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (50, 100, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
TTFTS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 240, 480)
ITLS_S = (0.001, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_duration_seconds": ("Time from a request's arrival to its end", DURATIONS_S),
    "input_sequence_tokens": ("Prompt tokens of a request", LENGTHS),
    "output_sequence_tokens": ("Generated tokens of a request", LENGTHS),
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token", TTFTS_S),
    "inter_token_latency_seconds": ("Time between tokens, one sample a token", ITLS_S),
    "router_overlap_share": (
        "Share of a prompt's tokens that the router expected in the worker's cache",
        (0.1, 0.25, 0.5, 0.75, 0.9, 1),
    ),
}
COUNTERS: dict[str, tuple[str, list[str]]] = {
    "requests": ("Requests by outcome", ["endpoint", "request_type", "status"]),
    "output_tokens": ("Generated tokens, as they come", []),
    "input_tokens": ("Prompt tokens", []),
    "cached_tokens": ("Prompt tokens that the engine found in its cache", []),
    "router_decisions": ("Requests sent to each worker", ["worker"]),
    "model_migration": ("Requests that went on at another instance", ["migration_type"]),
    "model_cancellation": ("Requests whose client hung up", ["endpoint", "request_type"]),
    "model_rejection": ("Requests turned away because of load", ["endpoint"]),
}


class ModelMetrics:
    """One model's counts."""

    def __init__(self) -> None:
        self.inflight = 0
        self.counters: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in COUNTERS}
        self.buckets = {name: [0.0] * (len(bounds) + 1) for name, (_, bounds) in HISTOGRAMS.items()}
        self.sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        series = self.counters[name]
        series[labels] = series.get(labels, 0) + by

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Add samples to a histogram."""
        self.buckets[name][bisect_left(HISTOGRAMS[name][1], value)] += times
        self.sums[name] += value * times

    def state(self) -> dict[str, Any]:
        """Return everything as plain values."""
        counters = {name: [[list(labels), value] for labels, value in s.items()] for name, s in self.counters.items()}
        return {"inflight": self.inflight, "counters": counters, "buckets": self.buckets, "sums": self.sums}

    def merge(self, state: dict[str, Any]) -> None:
        """Add what another process counted."""
        self.inflight += state["inflight"]
        for name, series in state["counters"].items():
            for labels, value in series:
                self.count(name, *labels, by=value)
        for name, buckets in state["buckets"].items():
            self.buckets[name] = [mine + its for mine, its in zip(self.buckets[name], buckets, strict=True)]
            self.sums[name] += state["sums"][name]


class TokenTimer:
    """Times the tokens of one choice; the request came at `started`."""

    __slots__ = ("_has_begun", "_last", "_metrics")

    def __init__(self, metrics: ModelMetrics, started: float) -> None:
        self._metrics = metrics
        self._last = started
        self._has_begun = False

    def count(self, num_tokens: int) -> None:
        """Count tokens that have come just now."""
        if not num_tokens:
            return
        now = time.perf_counter()
        if self._has_begun:
            self._metrics.observe("inter_token_latency_seconds", (now - self._last) / num_tokens, num_tokens)
        else:
            self._metrics.observe("time_to_first_token_seconds", now - self._last)
        self._metrics.count("output_tokens", by=num_tokens)
        self._has_begun, self._last = True, now


class FrontendMetrics:
    """The counts of every model served."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}

    def of(self, model: str) -> ModelMetrics:
        """Return a served model's counts."""
        return self.models.setdefault(model, ModelMetrics())

    def state(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {name: metrics.state() for name, metrics in self.models.items()}

    def keep_workers(self, workers: Collection[str]) -> None:
        """Forget what was counted for workers other than these."""
        for metrics in self.models.values():
            decisions = metrics.counters["router_decisions"]
            for labels in [labels for labels in decisions if labels[0] not in workers]:
                del decisions[labels]

    def exposition(self, others: Iterable[dict[str, Any]], workers: Iterable[Metric]) -> bytes:
        """Return the metrics of this process and others as Prometheus text."""
        total = FrontendMetrics()
        for state in (self.state(), *others):
            for name, model in state.items():
                total.of(name).merge(model)
        registry = CollectorRegistry()
        registry.register(_Collected([*total.families(), *workers]))
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        """Yield each metric with the samples of every model."""
        gauge = GaugeMetricFamily(f"{PREFIX}inflight_requests", "Requests in progress", labels=["model"])
        for model, metrics in self.models.items():
            gauge.add_metric([model], metrics.inflight)
        yield gauge
        yield from self._counters()
        yield from self._histograms()

    def _counters(self) -> Iterator[Metric]:
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model", *labels])
            for model, metrics in self.models.items():
                for values, count in metrics.counters[name].items():
                    counter.add_metric([model, *values], count)
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        for name, (text, bounds) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=["model"])
            for model, metrics in self.models.items():
                total, buckets = 0.0, []
                for bound, count in zip([*map(str, bounds), "+Inf"], metrics.buckets[name], strict=True):
                    total += count
                    buckets.append((bound, total))
                histogram.add_metric([model], buckets=buckets, sum_value=metrics.sums[name])
            yield histogram


class _Collected:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
