"""summary.json: per arm counts and metrics, the differences to the first arm with a verdict each, and one in words."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from reports.fleet_figures import FleetFigures
from reports.insight import Imbalance, Waterfall
from reports.metrics import Cache, Goodput, Statistics, Throughput
from reports.outcomes import Outcome
from reports.pools import LinkUse, PoolUse, TierUse
from reports.split import Split
from reports.stability import Stability
from reports.statistics import PairedDifference
from reports.tiers import Avoided, Hits, Saved

SCHEMA = "dynabench.summary/2"
PAIRED = ("ttft_sched", "tpot", "e2e_sched")
SHARES = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
NOISE_FLOOR = " (A/A)"
"""Ends the name of an arm that repeats the first to show how far two equal runs differ."""
WAYS = {"stop": "EOS"}
"""What finish reasons are called that do not say it themselves."""
Verdict = Literal["better", "worse", "equal", "inconclusive", "unstable"]
WANTED = 0.03
"""A difference that one may want to find."""
SMALLEST = 0.01
"""Relative difference below which two arms are equal in practice."""


@dataclass(frozen=True)
class Difference(PairedDifference):
    """A paired difference (s) and what it is worth."""

    verdict: Verdict


class ArmSummary(msgspec.Struct, frozen=True):
    """The figures of one arm, all repeats together; times in s."""

    requests: int
    failed: int
    errors: dict[str, int]
    """How often each error occurred."""
    repeats: int
    is_complete: bool
    notes: list[str]
    """What spoils its runs."""
    remarks: list[str]
    stability: Stability
    """Of its least stable run."""
    preemptions: int | None
    ttft_sched: Statistics
    ttft: Statistics
    tpot: Statistics
    e2e_sched: Statistics
    e2e: Statistics
    itl: Statistics
    schedule_lag: Statistics
    throughput: Throughput
    cache: Cache
    imbalance: Imbalance
    waterfall: Waterfall
    client: dict[str, float | None]
    """What else is known of its runs, such as `cpu_share`."""
    affinity_breaks: float | None
    ends: dict[str, int] | UnsetType = UNSET
    """Answers by their finish reason; only where it is known."""
    goodput: Goodput | UnsetType = UNSET
    """Only with limits."""
    outcomes: list[Outcome] | UnsetType = UNSET
    """What became of each limit of a run; only with limits."""
    split: Split | UnsetType = UNSET
    """Where TTFT goes; only where it is known when a worker began with a request."""
    ttst: Statistics | UnsetType = UNSET
    """Only where the second token's time is known."""
    pools: list[PoolUse] | UnsetType = UNSET
    """Only where it is known how busy workers were."""
    links: list[LinkUse] | UnsetType = UNSET
    """Only where KV is transferred over links of a known capacity."""
    tiers: list[TierUse] | UnsetType = UNSET
    """Only where it has KV tiers beyond the GPUs."""
    hits: Hits | UnsetType = UNSET
    """Where prompt tokens came from; only where one of the arms has tiers, as the next three."""
    avoided: Avoided | UnsetType = UNSET
    """The prefill that hits in its tiers made unnecessary."""
    gpu_s: float | UnsetType = UNSET
    """GPU-seconds."""
    saved: Saved | UnsetType = UNSET
    """What it took less than an arm without tiers, or with smaller ones, if both did the same work."""
    fleet: FleetFigures | UnsetType = UNSET
    """What its workers took; only where those of one of the arms came or went, or a planner was at work."""

    @property
    def is_apart(self) -> bool:
        """Whether some of its workers only prefill."""
        return any(pool.role == "prefill" for pool in self.pools or ())

    def metric(self, name: str) -> Statistics:
        """Return the statistics of a metric by its name."""
        found: Statistics | UnsetType = getattr(self, name)
        return Statistics(0) if isinstance(found, UnsetType) else found


class Bound(msgspec.Struct, frozen=True):
    """What no router could have beaten; figures of arms only where they are known."""

    ttft_mean_s: float | None
    covered: dict[str, float]
    """How much of the way from `random` to that mean TTFT each arm covers."""
    hit_shares: dict[str, dict[str, float]] | UnsetType = UNSET
    """By arm: the highest hit share with its GPU memory, and with each further tier too."""
    reached: dict[str, float] | UnsetType = UNSET
    """How much of the highest hit share with all its memory each arm reached."""


class Summary(msgspec.Struct, frozen=True):
    """What summary.json holds."""

    schema: str
    is_valid: bool
    verdict: str
    baseline: str
    arms: dict[str, ArmSummary]
    differences: dict[str, dict[str, dict[str, Difference | None]]]
    """By arm, metric (`PAIRED`) and statistic (`SHARES`); None where too few requests are paired."""
    noise_floor: dict[str, dict[str, float | None]]
    """By metric and statistic: how far two runs of the first arm differ (s)."""
    limits: list[str]
    bound: Bound
    num_blocks: int
    formulas: dict[str, str]
    is_complete: bool
    is_stable: bool

    @property
    def shows_ttst(self) -> bool:
        """Whether the time to the second token is worth a look, and known."""
        is_asked = any(arm.is_apart for arm in self.arms.values()) or any("ttst" in limit for limit in self.limits)
        return is_asked and any(arm.ttst for arm in self.arms.values())

    @property
    def has_tiers(self) -> bool:
        """Whether any arm keeps KV beyond its GPUs."""
        return any(arm.tiers for arm in self.arms.values())

    @property
    def has_fleet(self) -> bool:
        """Whether workers came or went, or a planner was at work."""
        return any(arm.fleet for arm in self.arms.values())

    @property
    def is_exact(self) -> bool:
        """Whether two runs of the first arm came out exactly alike."""
        floor = [value for statistics in self.noise_floor.values() for value in statistics.values()]
        return bool(floor) and all(value == 0 for value in floor)

    @property
    def power(self) -> str:
        """Say how small a difference a run like this one finds; empty where nothing differs."""
        pair = next((self.difference(arm, "ttft_sched", "mean") for arm in self.differences), None)
        if pair is None or pair.detectable < 5e-4:
            return ""
        text = f"A run like this finds a difference of mean TTFT from about {pair.detectable:.1%} on"
        return (
            f"{text}."
            if pair.detectable <= WANTED
            else f"{text}; to find {WANTED:.0%}, take about {float(f'{pair.count_to_find(WANTED):.2g}'):,.0f} requests."
        )

    def difference(self, arm: str, metric: str, statistic: str) -> Difference | None:
        """Return how an arm differs from the baseline; None for figures that are not paired, or too few pairs."""
        return self.differences.get(arm, {}).get(metric, {}).get(statistic)

    def as_json(self) -> Any:
        """Return what JSON can hold."""
        return msgspec.to_builtins(self)
