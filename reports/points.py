"""What a sweep found at each of its points; points are kept in files as JSON."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from reports.fleet_figures import FleetFigures
from reports.grid import Grid
from reports.insight import Imbalance
from reports.metrics import Cache, Goodput, Statistics, Throughput
from reports.outcomes import Outcome, State, state_of
from reports.pools import TierUse
from reports.split import Split
from reports.stability import Stability
from reports.tiers import Hits, Spent


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


class Point(msgspec.Struct, frozen=True, tag="point", tag_field="kind"):
    """What one combination of settings gave, all repeats together."""

    name: str
    changes: dict[str, Any]
    """The settings that are varied, by name."""
    workers: int
    gpus: int
    offered_per_s: float | None
    stability: Stability
    outcomes: list[Outcome]
    """What became of each limit; a queue that may not grow is one."""
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
    repeats: list[bool] = []
    """Whether each repeat alone meets all limits; empty where there is one run, or one is too short to tell."""
    hits: Hits | None = None
    """Where prompt tokens came from; None where that is not known."""
    tiers: list[TierUse] = []
    """What KV tiers held and moved; empty where there are none."""
    gpu_s: float | None = None
    """GPU-seconds, the mean over the repeats."""
    spent: list[Spent] = []
    """What each repeat took, for comparison with others that did the same work."""
    fleet: FleetFigures | UnsetType = UNSET
    """What its workers took; older folders do not say it."""

    @property
    def is_stable(self) -> bool:
        """Whether no queue grew."""
        return self.stability.is_stable

    @property
    def state(self) -> State:
        """Whether all limits are met."""
        return state_of(self.outcomes)


class Impossible(msgspec.Struct, frozen=True, tag="impossible", tag_field="kind"):
    """A combination of settings that there cannot be."""

    name: str
    changes: dict[str, Any]
    reason: str

    @property
    def outcomes(self) -> list[Outcome]:
        """What became of the limits."""
        return [Outcome("a deployment that is possible", "missed", reason=self.reason)]

    @property
    def state(self) -> State:
        """Whether all limits are met."""
        return "missed"

    @property
    def is_complete(self) -> bool:
        """Whether nothing interrupted it."""
        return True


class Cut(msgspec.Struct, frozen=True, tag="cut", tag_field="kind"):
    """A combination of settings that part of the workload showed to miss the limits, so that the rest was spared."""

    name: str
    changes: dict[str, Any]
    outcomes: list[Outcome]

    @property
    def state(self) -> State:
        """Whether all limits are met."""
        return "missed"

    @property
    def is_complete(self) -> bool:
        """Whether nothing interrupted it."""
        return True


AnyPoint = Point | Impossible | Cut


class Found(msgspec.Struct, frozen=True):
    """The highest or lowest value of a setting at which a combination meets the limits."""

    arm: str
    changes: dict[str, Any]
    find: str
    sense: Literal["highest", "lowest"] | None
    """None where both ends of the search gave the same."""
    met: float | None
    missed_at: float | None
    """The nearest value to it that was tried and does not."""
    is_at_end: bool
    """Whether the limits are met as far as was tried."""
    point: Point | None
    """What `met` gave."""
    missed: AnyPoint | None
    """What `missed_at` gave."""
    interval: tuple[float, float] | None = None
    """The 95% interval over repeats of what was looked for; None where there is one run, or an end was met."""
    is_over: bool = True
    """Whether the search came to its end."""

    @property
    def tried(self) -> list[float]:
        """The values at which the limits cease to be met."""
        return [value for value in (self.met, self.missed_at) if value is not None]


class Sweep(msgspec.Struct, frozen=True):
    """The table of a sweep, and what it says."""

    title: str
    columns: list[str]
    num_axes: int
    """How many of the columns are settings."""
    rows: list[list[str]]
    verdict: str
    schema: str
    is_complete: bool
    limits: list[str]
    points: list[AnyPoint] | list[Found]
    split: Grid | None
    """Where TTFT goes at each of them; only where some workers only prefill."""
    tiers: Grid | None = None
    """What KV tiers gave at each of them; only where there are any."""
