"""The certainty that a limit is met: the sample's interval, and what is known about the model's error."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from dynabench.arm import Arm, Run
from dynabench.experiment.model_error import MeasuredError, model_error
from dynabench.experiment.source import Source
from dynabench.virtual.run import simulate
from reports.capacity.answer import Sureness
from reports.figures.conditions import METRICS, Condition
from reports.figures.limit_intervals import FEW, attainment_interval, limit_interval
from reports.figures.metrics import goodput, per_request
from reports.figures.outcomes import format_ms, of_requests, of_run, percent
from reports.figures.slo import good_requests
from reports.figures.statistics import Blocks, blocks_of
from reports.record.records import Record
from reports.summarize import summarize

UNKNOWN = "; the model's error is not known for this case."


def sureness_of(arm: Arm, source: Source, seed: int, limits: Sequence[Condition], attainment: float) -> list[Sureness]:
    """Return the certainty that each limit is met: the workload is only a sample, and a simulation is only a model."""
    return sureness_in(simulate(Run(arm, seed=seed), source(arm.settings.shape)), arm, limits, attainment)


def sureness_in(record: Record, arm: Arm, limits: Sequence[Condition], attainment: float) -> list[Sureness]:
    """Return the same from a run that was simulated."""
    record = record.measured
    figures = summarize([record], list(limits), with_intervals=False).arms[arm.name]
    blocks = blocks_of(record.requests.intended_s, per_request(record.requests)["e2e_sched"])
    timing = next(pool for pool in arm.settings.deployment.pools if pool.role != "prefill").timing
    error = model_error(timing)
    found = []
    for limit in limits:
        if limit.statistic is None:
            continue
        outcome = of_run(limit, figures.metric(METRICS[limit.metric]))
        if outcome.value is None:
            continue
        found.append(_sureness(limit, outcome.value, limit_interval(limit, record, blocks), error))
    return found + _sure_of_requests(record, blocks, limits, attainment, error)


def _sure_of_requests(
    record: Record, blocks: Blocks, limits: Sequence[Condition], attainment: float, known: MeasuredError | None
) -> list[Sureness]:
    """Return the certainty that enough requests are within the per-request limits; nothing if there are none."""
    each = [limit for limit in limits if limit.statistic is None]
    is_good = good_requests(record, each)
    outcome = of_requests(list(limits), goodput(record, is_good), attainment)
    if outcome is None or outcome.value is None:
        return []
    text, error, is_within_error = f"{outcome.limit} is {outcome}", None, False
    if known is not None:
        error = max(_error(limit, known)[0] for limit in each)
        share = float(good_requests(record, [_stricter(limit, known) for limit in each]).mean())
        is_within_error = share < attainment <= outcome.value
        text += f"; if every time were longer by the mean error for {known}, it would be {share:.2%}"
    sure = Sureness(
        outcome.limit,
        outcome.value,
        None,
        None,
        error,
        str(known or ""),
        is_within_error=is_within_error,
        is_share=True,
    )
    end = "." if known is not None else UNKNOWN
    interval = attainment_interval(is_good, blocks)
    if interval is None:
        return [structs.replace(sure, text=f"{text}; not certain: no interval ({FEW}){end}")]
    low, high = interval
    lies = "is within" if low >= attainment else "is beyond" if high < attainment else "includes"
    text += f"; the sample's 95% interval, {low:.2%} to {high:.2%}, {lies} the limit{end}"
    return [structs.replace(sure, low=low, high=high, text=text, is_open=low < attainment <= high)]


def _stricter(limit: Condition, known: MeasuredError) -> Condition:
    """Return a limit that a time within it still meets if it is longer by the model's error."""
    return replace(limit, number=limit.number / (1 + _error(limit, known)[0]))


def _error(limit: Condition, known: MeasuredError) -> tuple[float, str]:
    """Return the model's error for the limited metric, and the metric that it is the error of."""
    return (known.ttft, "TTFT") if limit.metric in ("ttft", "ttst") else (known.tpot, "TPOT")


def _sureness(
    limit: Condition, value: float, interval: tuple[float, float] | str, known: MeasuredError | None
) -> Sureness:
    """Say how far a value is from its limit, and how much that means."""
    margin = 1 - value / limit.value
    text = f"{limit} is {'met' if margin >= 0 else 'missed'} by {percent(abs(margin))}"
    error, is_within_error = None, False
    if known is not None:
        error, metric = _error(limit, known)
        is_within_error = 0 <= margin < error
        text += ", within the model's error" * is_within_error
        text += f"; for {known}, mean {metric} was {percent(error)} off"
        if limit.statistic != "mean":
            text += f", and the error of a {limit.statistic} is not known"
    if isinstance(interval, str):
        text += f"; not certain: no interval ({interval})"
        low, high, is_open = None, None, False
    else:
        low, high = interval
        lies = "is within" if high <= limit.value else "is beyond" if low > limit.value else "includes"
        to = f"{format_ms(high)} ms" if np.isfinite(high) else "infinite, because requests failed"
        text += f"; the sample's 95% interval, {format_ms(low)} to {to}, {lies} the limit"
        is_open = low <= limit.value < high
    text += "." if known is not None else UNKNOWN
    return Sureness(str(limit), value, low, high, error, str(known or ""), text, is_open, is_within_error)
