"""guidellm's report: a benchmark for each load, with the times of its requests unless they were sampled or left out."""

from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from reports.figures.load import Load, sent_as
from reports.figures.metrics import Statistics, Throughput
from reports.record.records import MAX_S, Record, Requests
from reports.theirs.measured import Measured, gap_rows, of_figures, of_runs, statistics, with_itl

TOOL = "guidellm"
MEAN_ITL = "of ITL, only the mean is known: its percentiles are of means over requests"
SAMPLED = "it keeps {kept:,} of {all:,} requests, so its figures are taken as they are"
OTHER_TPOT = "its TPOT includes the prompt, so it is not shown"
OF_STREAM = "its requests end with their stream, which may be after the last token: in E2E"
Time = Annotated[float, Meta(ge=0, le=MAX_S)]


class Summary(msgspec.Struct, frozen=True):
    """A distribution; of `count` 0, nothing is known."""

    mean: float
    median: float
    max: float
    count: int
    total_sum: float
    percentiles: dict[str, float]


class ByStatus(msgspec.Struct, frozen=True):
    """A metric by the status of its requests."""

    successful: Summary | None = None


class Totals(msgspec.Struct, frozen=True):
    """Numbers of requests by their status."""

    successful: int = 0
    errored: int = 0
    incomplete: int = 0


class Metrics(msgspec.Struct, frozen=True):
    """The metrics that have a counterpart here."""

    request_totals: Totals
    requests_per_second: ByStatus
    request_latency: ByStatus
    time_to_first_token_ms: ByStatus
    inter_token_latency_ms: ByStatus
    output_tokens_per_second: ByStatus
    prompt_token_count: ByStatus
    output_token_count: ByStatus


class Timings(msgspec.Struct, frozen=True):
    """When things happened to a request (s)."""

    request_start: Time
    targeted_start: Time | None = None
    first_token_iteration: Time | None = None
    last_token_iteration: Time | None = None
    request_end: Time | None = None


class Info(msgspec.Struct, frozen=True):
    """The part of a request's information that is needed."""

    timings: Timings


class Tokens(msgspec.Struct, frozen=True):
    """Tokens of a prompt or an answer."""

    text_tokens: int | None = None
    total_tokens: int | None = None

    @property
    def count(self) -> int:
        """All of them, if it is known."""
        return self.total_tokens or self.text_tokens or 0


class Request(msgspec.Struct, frozen=True):
    """A request that was answered."""

    info: Info
    input_metrics: Tokens
    output_metrics: Tokens


class Kept(msgspec.Struct, frozen=True):
    """Requests by their status."""

    successful: list[Request] | None = None


class Strategy(msgspec.Struct, frozen=True):
    """How requests were sent."""

    type_: str
    streams: int | None = None
    rate: float | None = None

    @property
    def has_schedule(self) -> bool:
        """Whether requests should be sent at times that do not depend on answers."""
        return self.type_ in ("constant", "poisson", "trace")

    @property
    def load(self) -> Load | None:
        """What it sends; None if that is not known."""
        match self.type_:
            case "trace":
                return Load(is_trace=True)
            case "synchronous":
                return Load(1)
            case "concurrent":
                return sent_as(self.streams, None)
            case _:
                return sent_as(None, self.rate)


class Config(msgspec.Struct, frozen=True):
    """The part of a benchmark's settings that is needed."""

    strategy: Strategy
    environment: dict[str, Any] | UnsetType = UNSET


class Benchmark(msgspec.Struct, frozen=True):
    """One load."""

    config: Config
    metrics: Metrics
    requests: Kept = Kept()


def is_like(first: dict[str, Any]) -> bool:
    """Return whether it is a report."""
    benchmarks = first.get("benchmarks")
    return isinstance(benchmarks, list) and all(isinstance(one, dict) and "metrics" in one for one in benchmarks)


def read(objects: list[dict[str, Any]]) -> dict[str, Measured]:
    """Return its benchmarks by their load, or by the arm that we wrote there.

    Raises:
        ValueError: there are none.
    """
    benchmarks = msgspec.convert(objects[0]["benchmarks"], list[Benchmark])
    if not benchmarks:
        raise ValueError("it has no benchmarks")
    names = [_name(one.config) for one in benchmarks]
    return {
        name if names.count(name) == 1 else f"{name} ({place})": _measured(one)
        for place, (name, one) in enumerate(zip(names, benchmarks, strict=True), 1)
    }


def _name(config: Config) -> str:
    return str((config.environment or {}).get("arm") or config.strategy.load or config.strategy.type_)


def _measured(benchmark: Benchmark) -> Measured:
    kept = benchmark.requests.successful or []
    totals = benchmark.metrics.request_totals
    if not kept or len(kept) != totals.successful or totals.errored or totals.incomplete:
        return _figures(benchmark, len(kept))
    record = _record(kept, benchmark.config.strategy)
    measured = of_runs([record], tool=TOOL, load=benchmark.config.strategy.load, lacks=(MEAN_ITL,))
    # Weighted by tokens, its mean over requests is the mean time between tokens.
    return with_itl(measured, _itl(benchmark.metrics))


def _record(kept: list[Request], strategy: Strategy) -> Record:
    times = [request.info.timings for request in kept]
    base = min(each.request_start for each in times)

    def column(name: str) -> Any:
        values = [getattr(each, name) for each in times]
        return np.array([np.nan if value is None else value - base for value in values])

    sent = column("request_start")
    intended = column("targeted_start") if strategy.has_schedule else sent
    requests = Requests.of(
        intended_s=np.where(np.isnan(intended), sent, intended),
        sent_s=sent,
        first_token_s=column("first_token_iteration"),
        last_token_s=column("last_token_iteration"),
        done_s=column("request_end"),
        isl=[request.input_metrics.count for request in kept],
        osl=[request.output_metrics.count for request in kept],
        first_chunk_tokens=[1] * len(kept),
    )
    order = requests.sent_s.argsort(kind="stable")
    wall_s = float(np.nanmax(requests.done_s.filled(np.nan)) - sent.min())
    return Record("", requests[order].replace(request=np.arange(len(kept))), gap_rows([]), wall_s, 1, is_live=True)


def _itl(metrics: Metrics) -> Statistics:
    found = metrics.inter_token_latency_ms.successful
    return Statistics(found.count, mean=found.mean / 1e3) if found and found.count else Statistics(0)


def _figures(benchmark: Benchmark, kept: int) -> Measured:
    found, totals = benchmark.metrics, benchmark.metrics.request_totals

    def of(metric: ByStatus, scale: float) -> Statistics:
        one = metric.successful
        if one is None:
            return Statistics(0)
        known = {"mean": one.mean, "max": one.max} | {p: one.percentiles.get(p) for p in ("p50", "p90", "p95", "p99")}
        return statistics(one.count, known, scale=scale)

    def mean(metric: ByStatus) -> float | None:
        return metric.successful.mean if metric.successful and metric.successful.count else None

    said = (SAMPLED.format(kept=kept, all=totals.successful + totals.errored + totals.incomplete),) if kept else ()
    return of_figures(
        {
            "ttft": of(found.time_to_first_token_ms, 1e-3),
            "e2e": of(found.request_latency, 1.0),
            "itl": _itl(found),
        },
        answered=totals.successful,
        failed=totals.errored + totals.incomplete,
        rates=Throughput(mean(found.requests_per_second), mean(found.output_tokens_per_second)),
        tokens=(mean(found.prompt_token_count), mean(found.output_token_count)),
        tool=TOOL,
        load=benchmark.config.strategy.load,
        lacks=(*said, MEAN_ITL, OTHER_TPOT, OF_STREAM),
    )
