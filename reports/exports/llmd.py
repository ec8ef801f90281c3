"""llm-d's Benchmark Report, one per arm: github.com/llm-d/llm-d-benchmark."""

from typing import Any

import msgspec
import numpy as np

from reports.figures import metrics
from reports.figures.metrics import Statistics
from reports.folder import Manifest, SentWorkload, as_said
from reports.record.records import Record
from reports.summary import ArmSummary, Summary

LLMD_VERSION = "0.2"


class LlmdSaid(msgspec.Struct, frozen=True):
    """The parts of experiment.json that llm-d's report needs."""

    class Versions(msgspec.Struct, frozen=True):
        """The part of the versions that it needs."""

        dynabench: str

    created: str
    title: str
    subtitle: str
    command: str
    workload: SentWorkload
    versions: Versions
    arms: dict[str, dict[str, Any]]
    workers: dict[str, int]
    engine: dict[str, Any]
    router: dict[str, Any]
    load: dict[str, Any]


class LlmdSpread(msgspec.Struct, frozen=True, omit_defaults=True):
    """Mean and percentiles of something."""

    units: str
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, figures: Statistics, units: str) -> "LlmdSpread":
        """Return the figures that are known."""
        return cls(units, **{name: figures.at(name) for name in ("mean", "p50", "p90", "p95", "p99", "max")})


class LlmdRequests(msgspec.Struct, frozen=True):
    """The number of requests, and their lengths."""

    total: int
    failures: int
    input_length: LlmdSpread
    output_length: LlmdSpread


class LlmdLatency(msgspec.Struct, frozen=True):
    """Times, measured from sending."""

    time_to_first_token: LlmdSpread
    time_per_output_token: LlmdSpread
    inter_token_latency: LlmdSpread
    request_latency: LlmdSpread


class LlmdRate(msgspec.Struct, frozen=True):
    """A rate over the whole run."""

    mean: float | None
    units: str


class LlmdAggregate(msgspec.Struct, frozen=True):
    """The figures of one arm under llm-d's names."""

    requests: LlmdRequests
    latency: LlmdLatency
    throughput: dict[str, LlmdRate]


def llmd(manifest: Manifest, runs: list[Record], summary: Summary) -> list[dict[str, Any]]:
    """Return llm-d's Benchmark Report (github.com/llm-d/llm-d-benchmark), one per arm; times in s.

    Raises:
        ValueError: the manifest lacks a field, or has the wrong type of value there.
    """
    said = as_said(manifest, LlmdSaid)
    reports = []
    for arm, figures in summary.arms.items():
        its_runs = [run for run in runs if run.arm == arm]
        aggregate = msgspec.to_builtins(_aggregate(figures, its_runs))
        reports.append(
            {
                "version": LLMD_VERSION,
                "run": {
                    "uid": f"{said.created}/{arm}",
                    "eid": said.title,
                    "time": {"start": said.created, "duration": f"PT{sum(run.wall_s for run in its_runs):.3f}S"},
                    "description": said.subtitle,
                },
                "scenario": _scenario(said, arm),
                "results": {"request_performance": {"aggregate": aggregate}},
            }
        )
    return reports


def _scenario(said: LlmdSaid, arm: str) -> dict[str, Any]:
    """Return what was run, as llm-d describes it."""
    engine = {
        "standardized": {"kind": "inference_engine", "replicas": said.workers.get(arm)},
        "native": {"config": said.engine | said.arms.get(arm, {})},
    }
    router = {"standardized": {"kind": "router", "name": arm}, "native": {"config": said.router}}
    load = {
        "standardized": {
            "tool": "dynabench",
            "tool_version": said.versions.dynabench,
            "source": said.workload.name,
        },
        "native": {"args": {"command": said.command, **said.load}},
    }
    return {"stack": [engine, router], "load": load}


def _aggregate(figures: ArmSummary, runs: list[Record]) -> LlmdAggregate:
    isl, osl = (
        metrics.describe(np.concatenate([getattr(run.measured.requests, name) for run in runs]).astype(float))
        for name in ("isl", "osl")
    )
    return LlmdAggregate(
        requests=LlmdRequests(
            figures.requests, figures.failed, LlmdSpread.of(isl, "count"), LlmdSpread.of(osl, "count")
        ),
        latency=LlmdLatency(
            time_to_first_token=LlmdSpread.of(figures.ttft, "s"),
            time_per_output_token=LlmdSpread.of(figures.tpot, "s/token"),
            inter_token_latency=LlmdSpread.of(figures.itl, "s/token"),
            request_latency=LlmdSpread.of(figures.e2e, "s"),
        ),
        throughput={
            "request_rate": LlmdRate(figures.throughput.requests_per_s, "queries/s"),
            "output_token_rate": LlmdRate(figures.throughput.output_tokens_per_s, "tokens/s"),
        },
    )
