"""The certainty that a limit is met: the sample's interval, and what is known about the model's error."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
from msgspec import structs

from dynabench.arm import Arm, Run
from dynabench.deployment.description import Deployment, Pool
from dynabench.experiment.model_error import ModelError, Ratios, has_errors_of_ttft, load_of, model_error
from dynabench.experiment.source import Source
from dynabench.virtual.run import simulate
from reports.capacity.answer import SURE, Held, Sureness, likely
from reports.figures.conditions import METRICS, Condition
from reports.figures.limit_intervals import FEW, attainment_interval, limit_interval
from reports.figures.metrics import goodput, per_request
from reports.figures.outcomes import format_ms, of_requests, of_run, percent
from reports.figures.slo import good_requests
from reports.figures.statistics import Blocks, blocks_of
from reports.record.records import Record
from reports.summarize import summarize
from serving.role import Role

CHANCE = "for a real engine, the chance that it holds is"
HIGH_END = 0.95
"""The share of real values up to the end of an interval of 9 in 10."""
UNKNOWN = "; the model's error is not known for this case."


def sureness_of(arm: Arm, source: Source, seed: int, limits: Sequence[Condition], attainment: float) -> list[Sureness]:
    """Return the certainty that each limit is met: the workload is only a sample, and a simulation is only a model."""
    return sureness_in(simulate(Run(arm, seed=seed), source(arm.settings.shape)), arm, limits, attainment)


def sureness_in(record: Record, arm: Arm, limits: Sequence[Condition], attainment: float) -> list[Sureness]:
    """Return the same from a run that was simulated."""
    record = record.measured
    figures = summarize([record], list(limits), with_intervals=False).arms[arm.name]
    blocks = blocks_of(record.requests.intended_s, per_request(record.requests)["e2e_sched"])
    errors = Errors.of_deployment(arm.settings.deployment, record)
    found = []
    for limit in limits:
        if limit.statistic is None:
            continue
        outcome = of_run(limit, figures.metric(METRICS[limit.metric]))
        if outcome.value is None:
            continue
        found.append(_sureness(limit, outcome.value, limit_interval(limit, record, blocks), errors.of(limit)))
    return found + _sure_of_requests(record, blocks, limits, attainment, errors)


class Errors(NamedTuple):
    """How far simulated times are known to be off, where the first token comes from and where the others do."""

    first: ModelError | None
    others: ModelError | None

    @classmethod
    def of_deployment(cls, deployment: Deployment, record: Record) -> Self:
        """Return what is known of a deployment under the load of a record."""

        def of_pool(other: Role) -> ModelError | None:
            pool = next(pool for pool in deployment.pools if pool.role != other)
            return model_error(pool.timing, load_of(record, pool.replicas, pool.role))

        return cls(of_pool("decode"), of_pool("prefill"))

    def of(self, limit: Condition) -> ModelError | None:
        """Return what is known of the metric of a limit."""
        return self.first if has_errors_of_ttft(limit.metric) else self.others


def at_cliff(sureness: Sequence[Sureness], held: Held | None, deployment: Deployment) -> list[Sureness]:
    """Return the certainty of limits that are met, when the load that the deployment holds to is known, too.

    An engine that is slower by some factor takes that much less load. So where the queue grows, or a limit is missed, at
    slightly more load, a real engine that is slower by as much misses it here, however far off the limit seems.
    """
    speeds = [_speed(pool) for pool in deployment.pools]
    if held is None or held.misses_at is None or None in speeds:
        return list(sureness)
    keeps_up = min(speed.below(held.holds_to) for speed in speeds if speed is not None)
    missed = {outcome.limit for outcome in held.outcomes if outcome.state == "missed"}
    found = []
    for sure in sureness:
        waits = any(not part.startswith(("tpot", "itl")) for part in sure.limit.split(" and "))
        if sure.chance is not None and keeps_up < sure.chance and (sure.limit in missed or (missed and waits)):
            text = sure.text
            if likely(keeps_up) != likely(sure.chance):
                slower = f"A real engine that is {percent(held.holds_to - 1)} slower than simulated cannot keep up with this load"
                text += f" {slower}, which lowers the chance to {likely(keeps_up)}."
            real_high = math.inf if sure.real_high is not None and keeps_up < HIGH_END else sure.real_high
            sure = structs.replace(
                sure, chance=keeps_up, text=text, real_high=real_high, is_within_error=keeps_up < SURE
            )
        found.append(sure)
    return found


def _speed(pool: Pool) -> Ratios | None:
    """Return how many times as long as simulated the steps of a pool may take; None if that is not known."""
    error = model_error(pool.timing)
    return error and (error.ttft if pool.role == "prefill" else error.tpot)


def _sure_of_requests(
    record: Record, blocks: Blocks, limits: Sequence[Condition], attainment: float, errors: Errors
) -> list[Sureness]:
    """Return the certainty that enough requests are within the per-request limits; nothing if there are none."""
    each = [limit for limit in limits if limit.statistic is None]
    is_good = good_requests(record, each)
    outcome = of_requests(list(limits), goodput(record, is_good), attainment)
    if outcome is None or outcome.value is None:
        return []
    interval = attainment_interval(is_good, blocks)
    known = {limit: error.of(limit.metric) for limit in each if (error := errors.of(limit)) is not None}
    text, chance = f"{outcome.limit} is {outcome}", None
    if is_known := len(known) == len(each):
        said, chance = _chance_of_requests(record, known, attainment, outcome.value, interval)
        text += said + f", by {'; '.join(dict.fromkeys(str(errors.of(limit)) for limit in each))}"
    sure = Sureness(
        outcome.limit,
        outcome.value,
        None,
        None,
        max(ratios.mean_error for ratios, _ in known.values()) if is_known else None,
        "; ".join(dict.fromkeys(str(errors.of(limit)) for limit in known)),
        chance=chance,
        is_within_error=chance is not None and outcome.value >= attainment and chance < SURE,
        is_share=True,
    )
    end = "." if is_known else UNKNOWN
    if interval is None:
        return [structs.replace(sure, text=f"{text}; not certain: no interval ({FEW}){end}")]
    low, high = interval
    lies = "is within" if low >= attainment else "is beyond" if high < attainment else "includes"
    text += f"; the sample's 95% interval, {low:.2%} to {high:.2%}, {lies} the limit{end}"
    return [structs.replace(sure, low=low, high=high, text=text, is_open=low < attainment <= high)]


def _chance_of_requests(
    record: Record,
    known: Mapping[Condition, tuple[Ratios, str]],
    attainment: float,
    share: float,
    interval: tuple[float, float] | None,
) -> tuple[str, float | None]:
    """Say by how much times may grow so that enough requests are within the limits, and how likely that is, at least.

    Where limits are on TTFT and on later tokens, too, one of the two may grow more than both together: the better of
    these two answers counts.
    """
    by_metric = {metric: ratios for ratios, metric in known.values()}

    def room(attainment: float, free: str | None = None, others: float = 1.0) -> float:
        return _longest(record, {limit: metric for limit, (_, metric) in known.items()}, attainment, free, others)

    both, spread = room(attainment), 0.0
    if interval is not None:
        low, high = interval
        best, worst = room(max(attainment - (high - share), 0.0)), room(min(attainment + (share - low), 1.0))
        spread = float(np.log(best / worst)) / (2 * 1.96)
    answers = []
    for free in by_metric:
        factors = dict.fromkeys(by_metric, both) | {free: room(attainment, free, both)}
        misses = sum(1 - ratios.blurred(spread).below(factors[metric]) for metric, ratios in by_metric.items())
        answers.append((max(1 - misses, 0.0), factors))
    chance, factors = max(answers, key=lambda answer: answer[0])
    told = " and ".join(f"{metric}s up to {factor:.2f} times as long" for metric, factor in factors.items())
    intervals = ", ".join(_real_means(ratios, metric) for metric, ratios in by_metric.items())
    if interval is None:
        return f"; it holds with {told}; {intervals}", None
    at_least = "at least " * (len(by_metric) > 1)
    return f"; it holds with {told}; {CHANCE} {at_least}{likely(chance)}: {intervals}", chance


def _longest(
    record: Record, metrics: Mapping[Condition, str], attainment: float, free: str | None, others: float
) -> float:
    """Return how many times as long times may be so that enough requests are within the limits, from 1/20 to 20.

    Args:
        record: the requests.
        metrics: the limits, each with whose error its metric has.
        attainment: the share of requests that is to be within them.
        free: which times grow (None: all).
        others: how many times as long the others are.
    """

    def is_met(factor: float) -> bool:
        stricter = [
            replace(limit, number=limit.number / (factor if free in (None, metric) else others))
            for limit, metric in metrics.items()
        ]
        return bool(good_requests(record, stricter).mean() >= attainment)

    grid = np.exp(np.linspace(-3, 3, 601))
    return float(grid[max(bisect_left(grid, True, key=lambda factor: not is_met(factor)) - 1, 0)])


def _real_means(ratios: Ratios, metric: str) -> str:
    low, high = ratios.interval
    return f"9 of 10 real mean {metric}s are {low:.2f} to {high:.2f} times the simulated"


def _sureness(
    limit: Condition, value: float, interval: tuple[float, float] | str, known: ModelError | None
) -> Sureness:
    """Say how far a value is from its limit, and how much that means."""
    margin = 1 - value / limit.value
    text = f"{limit} is {'met' if margin >= 0 else 'missed'} by {percent(abs(margin))}"
    error, chance, real_low, real_high = None, None, None, None
    if known is not None and np.isfinite(value) and value > 0:
        ratios, metric = known.of(limit.metric)
        error = ratios.mean_error
        if (spread := _spread(interval)) is not None:
            of_samples = ratios.blurred(spread)
            chance = of_samples.below(limit.value / value)
            real_low, real_high = (value * ratio for ratio in of_samples.interval)
            text += f"; {CHANCE} {likely(chance)}"
        text += f": {_real_means(ratios, metric)}, by {known}"
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


def _spread(interval: tuple[float, float] | str) -> float | None:
    """Return the standard deviation of the logarithm of a value with a 95% interval; None if that is not known."""
    if isinstance(interval, str) or not 0 < interval[0] <= interval[1] < np.inf:
        return None
    return float(np.log(interval[1] / interval[0])) / (2 * 1.96)
