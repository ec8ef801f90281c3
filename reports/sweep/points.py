"""What a sweep found at each of its points; points are stored as JSON files."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from reports.figures.fleet import FleetFigures
from reports.figures.insight import Imbalance
from reports.figures.metrics import Cache, Goodput, Statistics, Throughput
from reports.figures.outcomes import Outcome, State, state_of
from reports.figures.server import ServerFigures
from reports.figures.split import Split
from reports.figures.stability import Stability
from reports.figures.tiers import Hits, Spent
from reports.record.pools import DraftUse, TierUse
from reports.tables.grid import Grid


class Quantiles(msgspec.Struct, frozen=True):
    """A latency at one point (s)."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    p95: float | None = None
    """Older folders do not have it."""

    @classmethod
    def of(cls, figures: Statistics) -> "Quantiles":
        """Select them from all statistics."""
        return cls(figures.mean, figures.p50, figures.p90, figures.p99, figures.p95)

    @classmethod
    def with_failures(cls, figures: Statistics) -> "Quantiles":
        """Select them with each failure counted as infinite; None if that makes one infinite."""
        return cls(*map(figures.with_failures, ("mean", "p50", "p90", "p99", "p95")))


class PointSeries(msgspec.Struct, frozen=True):
    """The values of a point by 40 equal shares of the workload's requests, for comparison with other points (s)."""

    requests: int
    num_blocks: int
    """How many blocks of these requests count as independent."""
    sums: dict[str, list[float]]
    """By metric."""
    counts: dict[str, list[float]]
    quantiles: dict[str, dict[str, list[float | None]]] = {}
    """By metric and percentile: that of each block; older points do not have it."""


class Point(msgspec.Struct, frozen=True, tag="point", tag_field="kind"):
    """The results of one combination of settings, all repeats together."""

    name: str
    changes: dict[str, Any]
    """The settings that are varied, by name."""
    workers: int
    gpus: int
    """0, as of workers: not known."""
    offered_per_s: float | None
    stability: Stability
    outcomes: list[Outcome]
    """The result for each limit; a queue that may not grow is one."""
    is_complete: bool
    ttft_sched: Quantiles
    ttft: Quantiles
    split: Split | None
    """Where TTFT goes; None if no request was answered."""
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
    repeats: list[bool] = []
    """Whether each repeat alone meets all limits; empty if there is one run, or if one is too short to judge."""
    hits: Hits | None = None
    """Where prompt tokens came from; None if that is not known."""
    tiers: list[TierUse] = []
    """What KV tiers held and moved; empty if there are none."""
    drafts: list[DraftUse] = []
    """What came of drafts, by pool; empty without speculation."""
    gpu_s: float | None = None
    """GPU-seconds, the mean over the repeats."""
    spent: list[Spent] = []
    """What each repeat used, for comparison with others that did the same work."""
    fleet: FleetFigures | UnsetType = UNSET
    """What its workers used; like what follows, older folders do not have it."""
    requests: int | None = None
    failed: int | None = None
    """Requests that failed."""
    with_failures: dict[str, Quantiles] = {}
    """Latencies with failures counted as infinite, by name; only if requests failed."""
    series: PointSeries | UnsetType = UNSET
    server: ServerFigures | UnsetType = UNSET
    """What the measured server says of itself; only if it was asked."""
    notes: list[str] = []
    """What makes its runs invalid."""
    too_little: list[str] = []
    """What its runs are too short for."""
    held: str = ""
    """That prompts waited for decodes, if they did, and the way out."""

    @property
    def is_stable(self) -> bool:
        """Whether no queue grew."""
        return self.stability.is_stable

    @property
    def state(self) -> State:
        """Whether all limits are met."""
        return state_of(self.outcomes)


class _Unmeasured(msgspec.Struct, frozen=True):
    """A combination of settings that misses the limits without all of its runs."""

    name: str
    changes: dict[str, Any]

    @property
    def state(self) -> State:
        """Whether all limits are met."""
        return "missed"

    @property
    def is_complete(self) -> bool:
        """Whether nothing interrupted it."""
        return True


class Impossible(_Unmeasured, frozen=True, tag="impossible", tag_field="kind"):
    """A combination of settings that is impossible."""

    reason: str

    @property
    def outcomes(self) -> list[Outcome]:
        """The result for the limits."""
        return [Outcome("a deployment that is possible", "missed", reason=self.reason)]


class Cut(_Unmeasured, frozen=True, tag="cut", tag_field="kind"):
    """A combination whose run was cut, because it had missed a limit for certain."""

    outcomes: list[Outcome]
    requests: int | None = None
    """The requests that had ended by then."""


AnyPoint = Point | Impossible | Cut


class FoundLoad(msgspec.Struct, frozen=True):
    """The highest load within the limits on a curve of measured loads."""

    line: str
    """The endpoint or deployment, empty if there is one."""
    axis: str
    """What loads are: concurrency, or rate (requests/s)."""
    load: float | None
    """None if no load that was tried is known to hold the limits."""
    missed_at: float | None
    """The lowest load that misses one; None if none does."""
    interval: tuple[float | None, float | None]
    """The highest load below the lowest that misses them for certain which holds them for certain (95% intervals of a
    load's own sample), and that one; None: no such load was tried."""


class SearchResult(msgspec.Struct, frozen=True):
    """The highest or lowest value of a setting at which a combination meets the limits."""

    arm: str
    changes: dict[str, Any]
    find: str
    sense: Literal["highest", "lowest"] | None
    """None if both ends of the search gave the same result."""
    met: float | None
    missed_at: float | None
    """The nearest value tried that misses a limit."""
    is_at_end: bool
    """Whether the limits are met at the end of the range that was tried."""
    point: Point | None
    """The result at `met`."""
    missed: AnyPoint | None
    """The result at `missed_at`."""
    interval: tuple[float, float] | None = None
    """The 95% interval over repeats of the value; None if there is one run, or an end of the range was met."""
    is_over: bool = True
    """Whether the search finished."""

    @property
    def tried(self) -> list[float]:
        """The values at which the limits are no longer met."""
        return [value for value in (self.met, self.missed_at) if value is not None]


def name_and_point(row: AnyPoint | SearchResult) -> tuple[str, Point | None]:
    """Return the name of a line of the table, and the point that it shows, if there is one."""
    name, point = (row.arm, row.point) if isinstance(row, SearchResult) else (row.name, row)
    return name, point if isinstance(point, Point) else None


class Sweep(msgspec.Struct, frozen=True):
    """The table of a sweep, and its verdict."""

    title: str
    columns: list[str]
    num_axes: int
    """The number of columns that are settings."""
    rows: list[list[str]]
    verdict: str
    schema: str
    is_complete: bool
    limits: list[str]
    points: list[AnyPoint] | list[SearchResult]
    split: Grid | None
    """Where TTFT goes at each point; only if some workers only prefill."""
    tiers: Grid | None = None
    """What KV tiers contributed at each point; only if there are any."""
    drafts: Grid | None = None
    """What came of drafts at each point; only if any speculates."""
    gains: Grid | None = None
    """Where speculation pays, by point."""
    server: Grid | None = None
    """What measured servers say of themselves at each point; only if any does."""
    found: list[FoundLoad] = []
    """The highest load within the limits, by curve; only of benchmarks with limits."""
    best: dict[str, list[str]] = {}
    """The points that tie as best (within the limits, if any are), by the settings other than the router mode, as JSON."""

    @property
    def grids(self) -> list[Grid]:
        """The small tables after the table that are not empty."""
        return [grid for grid in (self.split, self.drafts, self.gains, self.tiers, self.server) if grid is not None]
