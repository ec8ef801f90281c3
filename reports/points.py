"""What a sweep found at each of its points; points are kept in files as JSON."""

from typing import Any

import msgspec

from reports.grid import Grid
from reports.insight import Imbalance
from reports.metrics import Cache, Goodput, Statistics, Throughput
from reports.split import Split
from reports.stability import Stability


class Quantiles(msgspec.Struct, frozen=True):
    """A latency at one point (s)."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, figures: Statistics) -> "Quantiles":
        """Take them from all statistics."""
        return cls(figures.mean, figures.p50, figures.p90, figures.p99)


class Point(msgspec.Struct, frozen=True):
    """What one combination of settings gave, all repeats together."""

    name: str
    changes: dict[str, Any]
    """The settings that are varied, by name."""
    workers: int
    offered_per_s: float | None
    is_stable: bool
    stability: Stability
    missed: list[str]
    """Limits that it misses; a queue that grows is one."""
    is_complete: bool
    ttft_sched: Quantiles
    ttft: Quantiles
    split: Split | None
    """Where TTFT goes; None where no request was answered."""
    is_apart: bool
    """Whether some of its workers only prefill."""
    ttst: Quantiles
    itl: Quantiles
    tpot: Quantiles
    e2e_sched: Quantiles
    throughput: Throughput
    goodput: Goodput | None
    """Only with limits."""
    cache: Cache
    imbalance: Imbalance
    preemptions: int | None
    wall_s: float


class Highest(msgspec.Struct, frozen=True):
    """The highest value of a setting at which a combination meets the limits."""

    arm: str
    changes: dict[str, Any]
    find: str
    met: float | None
    missed_at: float | None
    """The lowest value at which it does not."""
    point: Point | None
    """What `met` gave."""


class Sweep(msgspec.Struct, frozen=True):
    """The table of a sweep, and what it says."""

    title: str
    columns: list[str]
    num_axes: int
    """How many of the columns are settings."""
    rows: list[list[str]]
    verdict: str
    only_wide: list[str]
    schema: str
    is_complete: bool
    limits: list[str]
    points: list[Point] | list[Highest]
    split: Grid | None
    """Where TTFT goes at each of them; only where some workers only prefill."""
