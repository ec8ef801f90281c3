"""The frontend's Prometheus metrics, under Dynamo's names.

The hot path only adds to plain lists; the counts of several frontend processes are added up on request (`merge`).
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry

from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.choice import Choice
from serving.frontend.series import Collected, Series
from serving.runtime.world import world

PREFIX = "dynamo_frontend_"
COMPONENT = "dynamo_component_"
DURATIONS_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (50, 100, 500, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000)
TTFTS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120, 240, 480)
ITLS_S = (0.001, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)

STAGES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TRANSFERS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_duration_seconds": ("Time from a request's arrival to its end", DURATIONS_S),
    "input_sequence_tokens": ("Prompt tokens of a request", LENGTHS),
    "output_sequence_tokens": ("Generated tokens of a request", LENGTHS),
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token", TTFTS_S),
    "inter_token_latency_seconds": ("Time between tokens, one sample per token", ITLS_S),
    "router_overlap_share": (
        "Share of a prompt's tokens that the router expected in the worker's cache",
        (0.1, 0.25, 0.5, 0.75, 0.9, 1),
    ),
    "request_queue_time_seconds": (
        "Time from sending a request to a worker until the worker starts on its prompt",
        STAGES_S,
    ),
    "request_prefill_time_seconds": ("Time to compute a prompt", STAGES_S),
    "request_decode_queue_time_seconds": (
        "Time from sending a computed prompt to its decode worker until the worker starts to read the KV",
        STAGES_S,
    ),
    "kv_transfer_seconds": (
        "Time that a decode worker took to read a prompt's KV, as the worker reports it",
        TRANSFERS_S,
    ),
    "kv_transfer_estimated_latency_seconds": (
        "Time from the end of a prompt's prefill to the first token of its decode worker",
        TRANSFERS_S,
    ),
}
STAGES = {
    "request_queue_time_seconds": ("queued", "admitted"),
    "request_prefill_time_seconds": ("admitted", "prefill_end"),
    "request_decode_queue_time_seconds": ("decode_queued", "transfer_start"),
    "kv_transfer_seconds": ("transfer_start", "transfer_end"),
}
"""Histograms of the time between two of a request's stamps."""

COUNTERS: dict[str, tuple[str, list[str]]] = {
    "requests": ("Requests by outcome", ["endpoint", "request_type", "status"]),
    "output_tokens": ("Generated tokens, counted as they arrive", []),
    "input_tokens": ("Prompt tokens", []),
    "ended_input_tokens": ("Prompt tokens of the requests that have ended", []),
    "cached_tokens": ("Prompt tokens that the engine found in its cache", []),
    "kv_tier_tokens": ("Cached prompt tokens that came from host memory, a disk or a store", ["tier"]),
    "router_decisions": ("Requests sent to each worker", ["worker"]),
    "model_migration": ("Requests that continued on another instance", ["migration_type"]),
    "model_cancellation": ("Requests whose client hung up", ["endpoint", "request_type"]),
    "model_rejection": ("Requests rejected because of load", ["endpoint"]),
    "remote_prefills": ("Prompts that a prefill worker computed", []),
    "prefill_bypasses": ("Prompts that a decode worker computed although there are prefill workers", []),
    "kv_transfer_bytes": (
        "Bytes of KV that decode workers read from prefill workers, as the decode workers report them",
        [],
    ),
}

WORKER = ("worker_id", "dp_rank", "worker_type")
LAST = {
    "time_to_first_token_seconds": "Time from a request's arrival to its first token, for the last prompt computed there",
    "input_sequence_tokens": "Tokens of the last prompt computed there",
    "inter_token_latency_seconds": "Mean time between tokens of the last answer from there",
}


class ModelMetrics(Series):
    """One model's counts."""

    def __init__(self) -> None:
        super().__init__({name: bounds for name, (_, bounds) in HISTOGRAMS.items()})
        self.inflight = 0
        self.last: dict[tuple[str, ...], float] = {}
        """The last value observed of a worker, by the metric's name and then the worker's labels."""

    def count_choice(self, choice: Choice, started: float) -> None:
        """Count how a choice was answered; its request arrived at `started`."""
        attempts = choice.attempts
        self.observe("output_sequence_tokens", choice.num_completion)
        self.count("ended_input_tokens", by=choice.num_prompt)
        if choice.num_cached:
            self.count("cached_tokens", by=choice.num_cached)
        for tier, count in choice.tier_tokens.items():
            self.count("kv_tier_tokens", tier, by=count)
        if num_migrations := attempts.flight.num_migrations:
            self.count("model_migration", "ongoing_request", by=num_migrations)
        if attempts.decode is None or not attempts.first_token_s:
            return
        computed, said = attempts.prefill or attempts.decode, attempts.decode
        self.last["time_to_first_token_seconds", *computed.worker_labels] = attempts.first_token_s - started
        self.last["input_sequence_tokens", *computed.worker_labels] = choice.num_prompt
        if choice.num_completion > 1:
            decoding_s = attempts.last_token_s - attempts.first_token_s
            self.last["inter_token_latency_seconds", *said.worker_labels] = decoding_s / (choice.num_completion - 1)
        stamps = attempts.stamps() | {"queued": computed.sent_s}
        for name, (begin, end) in STAGES.items():
            if begin in stamps and end in stamps:
                self.observe(name, max(stamps[end] - stamps[begin], 0.0))
        self._count_hand_over(attempts)

    def _count_hand_over(self, attempts: Attempts) -> None:
        """Count where a prompt was computed, and how its KV reached the worker that answered, as far as known."""
        if attempts.flight.is_bypassed:
            self.count("prefill_bypasses")
        if attempts.prefill is None or attempts.decode is None:
            return
        self.count("remote_prefills")
        self.count("router_decisions", attempts.decode.worker_labels[0])
        if attempts.hand_over_s is not None:
            self.observe("kv_transfer_estimated_latency_seconds", attempts.hand_over_s)
        if attempts.decode.num_transfer_bytes:
            self.count("kv_transfer_bytes", by=attempts.decode.num_transfer_bytes)

    def state(self) -> dict[str, Any]:
        """Return everything as plain values."""
        counters = {name: [[list(labels), value] for labels, value in s.items()] for name, s in self.counters.items()}
        last = [[list(labels), value] for labels, value in self.last.items()]
        histograms = {name: [each.counts, each.total] for name, each in self.histograms.items()}
        return {"inflight": self.inflight, "counters": counters, "histograms": histograms, "last": last}

    def merge(self, state: dict[str, Any]) -> None:
        """Add the counts of another process."""
        self.inflight += state["inflight"]
        for name, series in state["counters"].items():
            for labels, value in series:
                self.count(name, *labels, by=value)
        for name, (counts, total) in state["histograms"].items():
            self.histograms[name].add(counts, total)
        self.last |= {tuple(labels): value for labels, value in state["last"]}


class TokenTimer:
    """Times the tokens of one choice; the request arrived at `started`."""

    __slots__ = ("_has_begun", "_last", "_metrics", "_now")

    def __init__(self, metrics: ModelMetrics, started: float) -> None:
        self._metrics = metrics
        self._last = started
        self._now = world().now
        self._has_begun = False

    def count(self, num_tokens: int) -> None:
        """Count tokens that have just arrived."""
        if not num_tokens:
            return
        now = self._now()
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
        if (found := self.models.get(model)) is None:
            found = self.models[model] = ModelMetrics()
        return found

    def state(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {name: metrics.state() for name, metrics in self.models.items()}

    def keep_workers(self, workers: Collection[str]) -> None:
        """Forget the counts of workers other than these."""
        for metrics in self.models.values():
            decisions = metrics.counters.get("router_decisions", {})
            for labels in [labels for labels in decisions if labels[0] not in workers]:
                del decisions[labels]
            metrics.last = {labels: value for labels, value in metrics.last.items() if labels[1] in workers}

    def exposition(self, others: Iterable[dict[str, Any]], workers: Iterable[Metric]) -> bytes:
        """Return the metrics of this process and others as Prometheus text."""
        total = FrontendMetrics()
        for state in (self.state(), *others):
            for name, model in state.items():
                total.of(name).merge(model)
        registry = CollectorRegistry()
        registry.register(Collected([*total.families(), *workers]))
        return generate_latest(registry)

    def families(self) -> Iterator[Metric]:
        """Yield each metric with the samples of every model."""
        gauge = GaugeMetricFamily(f"{PREFIX}inflight_requests", "Requests in progress", labels=["model"])
        for model, metrics in self.models.items():
            gauge.add_metric([model], metrics.inflight)
        yield gauge
        yield from self._counters()
        yield from self._histograms()
        yield from self._last()

    def _last(self) -> Iterator[Metric]:
        for name, text in LAST.items():
            gauge = GaugeMetricFamily(f"{PREFIX}worker_last_{name}", text, labels=["model", *WORKER])
            for model, metrics in self.models.items():
                for labels, value in metrics.last.items():
                    if labels[0] == name:
                        gauge.add_metric([model, *labels[1:]], value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model", *labels])
            for model, metrics in self.models.items():
                for values, count in metrics.counters.get(name, {}).items():
                    counter.add_metric([model, *values], count)
            yield counter

    def _histograms(self) -> Iterator[Metric]:
        for name, (text, bounds) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(PREFIX + name, text, labels=["model"])
            for model, metrics in self.models.items():
                total, buckets = 0.0, []
                for bound, count in zip([*map(str, bounds), "+Inf"], metrics.histograms[name].counts, strict=True):
                    total += count
                    buckets.append((bound, total))
                histogram.add_metric([model], buckets=buckets, sum_value=metrics.histograms[name].total)
            yield histogram
