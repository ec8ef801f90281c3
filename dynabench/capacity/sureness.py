"""The certainty that a limit is met: the sample's interval, and what is known about the model's error."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from dynabench.arm import Arm, Run
from dynabench.experiment.model_error import ModelError, Ratios, load_of, model_error
from dynabench.experiment.source import Source
from dynabench.virtual.run import simulate
from reports.capacity.answer import SURE, Sureness, likely
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
    pool = next(pool for pool in arm.settings.deployment.pools if pool.role != "prefill")
    error = model_error(pool.timing, load_of(record, pool.replicas))
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
    record: Record, blocks: Blocks, limits: Sequence[Condition], attainment: float, known: ModelError | None
) -> list[Sureness]:
    """Return the certainty that enough requests are within the per-request limits; nothing if there are none."""
    each = [limit for limit in limits if limit.statistic is None]
    is_good = good_requests(record, each)
    outcome = of_requests(list(limits), goodput(record, is_good), attainment)
    if outcome is None or outcome.value is None:
        return []
    text, error, chance = f"{outcome.limit} is {outcome}", None, None
    interval = attainment_interval(is_good, blocks)
    if known is not None:
        ratios, metric = max((known.of(limit.metric) for limit in each), key=lambda one: one[0].mean_error)
        factor = _longest(record, each, attainment)
        error, chance = ratios.mean_error, ratios.below(factor)
        text += f"; it holds if all times are up to {factor:.2f} times as long"
        text += _by(chance, ratios, metric, known)
    sure = Sureness(
        outcome.limit,
        outcome.value,
        None,
        None,
        error,
        str(known or ""),
        chance=chance,
        is_within_error=chance is not None and outcome.value >= attainment and chance < SURE,
        is_share=True,
    )
    end = "." if known is not None else UNKNOWN
    if interval is None:
        return [structs.replace(sure, text=f"{text}; not certain: no interval ({FEW}){end}")]
    low, high = interval
    lies = "is within" if low >= attainment else "is beyond" if high < attainment else "includes"
    text += f"; the sample's 95% interval, {low:.2%} to {high:.2%}, {lies} the limit{end}"
    return [structs.replace(sure, low=low, high=high, text=text, is_open=low < attainment <= high)]


def _longest(record: Record, limits: Sequence[Condition], attainment: float) -> float:
    """Return how many times as long all times may be so that enough requests are within the limits, from 1/20 to 20."""

    def is_met(factor: float) -> bool:
        stricter = [replace(limit, number=limit.number / factor) for limit in limits]
        return bool(good_requests(record, stricter).mean() >= attainment)

    return float(
        np.exp(bisect_left(np.linspace(-3, 3, 601), True, key=lambda log: not is_met(float(np.exp(log)))) / 100 - 3)
    )


def _by(chance: float, ratios: Ratios, metric: str, known: ModelError) -> str:
    """Say what the chance is, and which measurements say so."""
    low, high = ratios.interval
    return f"; for a real engine, the chance of that is {likely(chance)}: 9 of 10 real mean {metric}s are {low:.2f} to {high:.2f} times the simulated, by {known}"


def _sureness(
    limit: Condition, value: float, interval: tuple[float, float] | str, known: ModelError | None
) -> Sureness:
    """Say how far a value is from its limit, and how much that means."""
    margin = 1 - value / limit.value
    text = f"{limit} is {'met' if margin >= 0 else 'missed'} by {percent(abs(margin))}"
    error, chance, real_low, real_high = None, None, None, None
    if known is not None and np.isfinite(value) and value > 0:
        ratios, metric = known.of(limit.metric)
        error, chance = ratios.mean_error, ratios.below(limit.value / value, _spread(interval))
        real_low, real_high = (value * ratio for ratio in ratios.interval)
        text += _by(chance, ratios, metric, known)
        if limit.statistic != "mean":
            text += f", and a {limit.statistic} was not measured"
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
    is_within_error = margin >= 0 and chance is not None and chance < SURE
    return Sureness(
        *(str(limit), value, low, high, error, str(known or ""), text, real_low, real_high, chance),
        is_open=is_open,
        is_within_error=is_within_error,
    )


def _spread(interval: tuple[float, float] | str) -> float:
    """Return the standard deviation of the logarithm of a value with a 95% interval; 0 if there is none."""
    if isinstance(interval, str) or not 0 < interval[0] <= interval[1] < np.inf:
        return 0.0
    return float(np.log(interval[1] / interval[0])) / (2 * 1.96)
