"""summary.json: counts and metrics per arm, the differences to the first arm with a verdict each, and a verdict in words."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from reports.figures.conditions import Condition
from reports.figures.fleet import FleetFigures
from reports.figures.insight import Imbalance, Waterfall
from reports.figures.metrics import Cache, Goodput, Statistics, Throughput
from reports.figures.outcomes import Outcome
from reports.figures.server import ServerFigures
from reports.figures.slo import parse_slo
from reports.figures.split import Split
from reports.figures.stability import Stability
from reports.figures.statistics import PairedDifference
from reports.figures.tiers import Avoided, Hits, Saved
from reports.record.pools import AdapterUse, DraftUse, EncoderUse, LinkUse, PoolUse, TierUse

SCHEMA = "dynabench.summary/2"
PAIRED = ("ttft_sched", "tpot", "e2e_sched")
SHARES = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
NOISE_FLOOR = " (A/A)"
"""The suffix of an arm that repeats the first to show how far two equal runs differ."""
WAYS = {"stop": "EOS"}
"""Names for finish reasons that do not explain themselves."""
Verdict = Literal["better", "worse", "equal", "inconclusive", "unstable"]
WANTED = 0.03
"""The relative difference that a user may want to find."""
SMALLEST = 0.01
"""Relative difference below which two arms are equal in practice."""


@dataclass(frozen=True)
class Difference(PairedDifference):
    """A paired difference (s) and its verdict."""

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
    """What makes its runs invalid."""
    remarks: list[str]
    stability: Stability
    """The stability of its least stable run."""
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
    """What else is known about its runs, such as `cpu_share`."""
    affinity_breaks: float | None
    ends: dict[str, int] | UnsetType = UNSET
    """Answers by their finish reason; only if it is known."""
    goodput: Goodput | UnsetType = UNSET
    """Only with limits."""
    outcomes: list[Outcome] | UnsetType = UNSET
    """The result for each limit on a run; only with limits."""
    split: Split | UnsetType = UNSET
    """Where TTFT goes; only if it is known when a worker started on a request."""
    ttst: Statistics | UnsetType = UNSET
    """Only if the second token's time is known."""
    pools: list[PoolUse] | UnsetType = UNSET
    """Only if it is known how busy workers were."""
    links: list[LinkUse] | UnsetType = UNSET
    """Only if KV is transferred over links of a known capacity."""
    tiers: list[TierUse] | UnsetType = UNSET
    """Only if it has KV tiers beyond the GPUs."""
    adapters: list[AdapterUse] | UnsetType = UNSET
    """Only if requests asked for LoRA adapters."""
    drafts: list[DraftUse] | UnsetType = UNSET
    """Only if it speculates."""
    encoders: list[EncoderUse] | UnsetType = UNSET
    """Only if requests had images or other media."""
    server: ServerFigures | UnsetType = UNSET
    """What the measured server says of itself; only if it was asked."""
    hits: Hits | UnsetType = UNSET
    """Where prompt tokens came from; like the next three, only if one of the arms has tiers."""
    avoided: Avoided | UnsetType = UNSET
    """The prefill that hits in its tiers avoided."""
    gpu_s: float | UnsetType = UNSET
    """GPU-seconds."""
    saved: Saved | UnsetType = UNSET
    """What it saved compared to an arm without tiers, or with smaller ones, if both did the same work."""
    fleet: FleetFigures | UnsetType = UNSET
    """What its workers used; only if the number of workers changed in one of the arms, or a planner was running."""

    @property
    def is_apart(self) -> bool:
        """Whether some of its workers only prefill."""
        return any(pool.role == "prefill" for pool in self.pools or ())

    def metric(self, name: str) -> Statistics:
        """Return the statistics of a metric by its name."""
        found: Statistics | UnsetType = getattr(self, name)
        return Statistics(0) if isinstance(found, UnsetType) else found


class Bound(msgspec.Struct, frozen=True):
    """What no router could have beaten; figures of arms only if they are known."""

    ttft_mean_s: float | None
    covered: dict[str, float]
    """How far each arm is on the way from `random` to that mean TTFT."""
    hit_shares: dict[str, dict[str, float]] | UnsetType = UNSET
    """By arm: the highest possible hit share with its GPU memory, and with each further tier."""
    reached: dict[str, float] | UnsetType = UNSET
    """The share of the highest possible hit share, with all its memory, that each arm reached."""


class RankingStep(msgspec.Struct, frozen=True):
    """Which arms are best in one metric, among those that are still compared."""

    metric: str
    """One of `PAIRED`, or `out_of_limits`: the share of the requests that are not within the limits on each request."""
    best: str
    """The arm with the lowest mean."""
    ties: list[str]
    """The arms that tie with it, itself first, then by their means: the difference may be noise, or is too small to matter."""
    differences: dict[str, Difference]
    """Every other arm minus the best, by mean; the 95% intervals hold for all arms together.

    That of an arm that is worse may include zero, if it left only after others had.
    """


class Ranking(msgspec.Struct, frozen=True):
    """Which arm is best: within the limits first, then by each metric among the arms that tie in the one before."""

    compared: list[str]
    set_aside: dict[str, str]
    """Arms that cannot be best, and why: they failed more requests, could not keep up, or missed a limit."""
    steps: list[RankingStep]
    """In order of the metrics; the last has one arm left, or is the last metric."""
    winner: str | None
    """The best arm; None if several tie in every metric."""
    ties: list[str]
    """The winner, or the arms that no metric separates."""
    tpot: RankingStep | None = None
    """The time per output token of all arms that are compared, whatever the first metric says."""
    elsewhere: dict[str, str] = {}
    """Of the best arms, those whose mode other routers have, and its names and flags there; else each router's best."""


class Summary(msgspec.Struct, frozen=True):
    """What summary.json holds."""

    schema: str
    is_valid: bool
    verdict: str
    baseline: str
    arms: dict[str, ArmSummary]
    differences: dict[str, dict[str, dict[str, Difference | None]]]
    """By arm, metric (`PAIRED`) and statistic (`SHARES`); None if too few requests are paired."""
    noise_floor: dict[str, dict[str, float | None]]
    """By metric and statistic: how far two runs of the first arm differ (s)."""
    limits: list[str]
    bound: Bound
    num_blocks: int
    formulas: dict[str, str]
    is_complete: bool
    is_stable: bool
    ranking: Ranking | UnsetType = UNSET
    """Which arm is best; only if there are several."""

    @property
    def conditions(self) -> list[Condition]:
        """The limits."""
        return list(map(parse_slo, self.limits))

    @property
    def shows_ttst(self) -> bool:
        """Whether the time to the second token is of interest, and known."""
        is_asked = any(arm.is_apart for arm in self.arms.values()) or any("ttst" in limit for limit in self.limits)
        return is_asked and any(arm.ttst for arm in self.arms.values())

    @property
    def has_tiers(self) -> bool:
        """Whether any arm keeps KV beyond its GPUs."""
        return any(arm.tiers for arm in self.arms.values())

    @property
    def has_fleet(self) -> bool:
        """Whether the number of workers changed, or a planner was running."""
        return any(arm.fleet for arm in self.arms.values())

    @property
    def is_exact(self) -> bool:
        """Whether two runs of the first arm are exactly equal."""
        floor = [value for statistics in self.noise_floor.values() for value in statistics.values()]
        return bool(floor) and all(value == 0 for value in floor)

    @property
    def power(self) -> str:
        """Say how small a difference a run like this one finds; empty if nothing differs."""
        pair = next((self.difference(arm, "ttft_sched", "mean") for arm in self.differences), None)
        if pair is None or pair.detectable < 5e-4:
            return ""
        text = f"A run like this finds differences in mean TTFT of about {pair.detectable:.1%} or more"
        return (
            f"{text}."
            if pair.detectable <= WANTED
            else f"{text}; finding {WANTED:.0%} needs about {float(f'{pair.count_to_find(WANTED):.2g}'):,.0f} requests."
        )

    def difference(self, arm: str, metric: str, statistic: str) -> Difference | None:
        """Return how an arm differs from the baseline; None for unpaired figures or too few pairs."""
        return self.differences.get(arm, {}).get(metric, {}).get(statistic)

    def as_json(self) -> Any:
        """Convert to what JSON can hold."""
        return msgspec.to_builtins(self)
