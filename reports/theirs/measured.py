"""One run, or one arm, that some tool measured: its figures in our terms, and what is not known of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
from msgspec import structs

from reports.figures import metrics
from reports.figures.insight import Imbalance, Waterfall
from reports.figures.load import Load
from reports.figures.metrics import LEAST_SAMPLES, Cache, Intervals, Statistics, Throughput
from reports.figures.stability import Stability
from reports.figures.statistics import blocks_of, mean_interval
from reports.record.records import Floats, Record
from reports.summarize import summarize
from reports.summary import ArmSummary

FROM_SENT = ("ttft", "tpot", "e2e")
"""The metrics that every tool has, from sending."""
NO_REQUESTS = "it has no values of single requests, so there are no intervals"
UNKNOWN_QUEUE = "it is not known whether its queue grew"


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a run."""

    tool: str
    arm: ArmSummary
    isl: float | None
    """Mean prompt length (tokens)."""
    osl: float | None
    load: Load | None = None
    """How requests were sent; None if that is not known."""
    lacks: tuple[str, ...] = ()
    """What is not there, or means something else, in words."""


def of_runs(runs: Sequence[Record], *, tool: str, load: Load | None = None, lacks: tuple[str, ...] = ()) -> Measured:
    """Return the repeats of an arm whose requests are known."""
    measured = [run.measured for run in runs]
    arm = next(iter(summarize(list(runs), with_intervals=False).arms.values()))
    known = {name: np.concatenate([metrics.of_each(run.requests, name) for run in measured]) for name in FROM_SENT}
    places, blocks = 0, []
    for run in measured:
        if len(run.requests):
            blocks.append(places + blocks_of(run.requests.intended_s, metrics.of_each(run.requests, "e2e_sched")))
            places = int(blocks[-1].max()) + 1
    if arm.stability.is_stable:  # in a growing queue, there is no true mean for an interval to include
        together = np.concatenate(blocks)
        arm = structs.replace(
            arm,
            **{
                name: structs.replace(
                    arm.metric(name), intervals=Intervals(mean_interval(values, together), None, None, None)
                )
                for name, values in known.items()
                if arm.metric(name).count
            },
        )
    return Measured(tool, arm, _mean(measured, "isl"), _mean(measured, "osl"), load, lacks)


def _mean(runs: Sequence[Record], column: str) -> float | None:
    """Return the mean of a column over the requests that were answered."""
    values = np.concatenate([getattr(run.requests, column)[run.requests.succeeded] for run in runs])
    return float(values.mean()) if len(values) else None


def of_figures(
    figures: Mapping[str, Statistics],
    *,
    answered: int,
    failed: int,
    rates: Throughput,
    tokens: tuple[float | None, float | None],
    tool: str,
    load: Load | None,
    lacks: tuple[str, ...],
) -> Measured:
    """Return a run of which only figures are known; `tokens` are the mean lengths of prompts and answers."""
    nothing = Statistics(0)
    arm = ArmSummary(
        requests=answered + failed,
        failed=failed,
        errors={"not said": failed} if failed else {},
        repeats=1,
        is_complete=True,
        notes=[] if answered else ["no request succeeded"],
        remarks=[],
        stability=Stability(True, 0.0, 0.0),
        preemptions=None,
        ttft_sched=nothing,
        ttft=figures.get("ttft", nothing),
        tpot=figures.get("tpot", nothing),
        e2e_sched=nothing,
        e2e=figures.get("e2e", nothing),
        itl=figures.get("itl", nothing),
        schedule_lag=nothing,
        throughput=rates,
        cache=Cache(None, None, None),
        imbalance=Imbalance(),
        waterfall=Waterfall(None, None, None, None),
        client={},
        affinity_breaks=None,
    )
    return Measured(tool, arm, *tokens, load, (NO_REQUESTS, *lacks, UNKNOWN_QUEUE))


def with_itl(measured: Measured, itl: Statistics) -> Measured:
    """Return it with another ITL."""
    return replace(measured, arm=structs.replace(measured.arm, itl=itl))


def statistics(count: int, found: Mapping[str, float | None], *, scale: float = 1e-3) -> Statistics:
    """Return statistics in s from values in another unit (default: ms), without percentiles of too small a sample."""
    if not count or found.get("mean") is None:
        return Statistics(0)
    known = {name: value * scale for name, value in found.items() if value is not None}
    too_few = {f"p{share}" for share, least in LEAST_SAMPLES.items() if count < least}
    return msgspec.convert(
        {"count": count} | {name: value for name, value in known.items() if name not in too_few}, Statistics
    )


def gap_rows(gaps_s: Sequence[float] | Floats) -> Floats:
    """Return times between chunks of one token each as rows of a record."""
    rows = np.zeros((len(gaps_s), 5))
    rows[:, 0], rows[:, 3:] = gaps_s, 1
    return rows
