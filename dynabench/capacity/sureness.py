"""The certainty that a limit is met: the sample's interval, and what is known about the model's error."""

from collections.abc import Sequence

import numpy as np

from dynabench.experiment.model_error import ModelError, model_error
from dynabench.experiment.source import Source
from dynabench.plan import Arm, Plan
from dynabench.virtual.run import run as simulate
from reports.capacity import Sureness
from reports.conditions import METRICS, Condition
from reports.metrics import LEAST_SAMPLES, goodput, per_request
from reports.outcomes import of_requests, of_run, percent
from reports.records import Floats, Record
from reports.slo import good
from reports.statistics import Blocks, blocks_of, mean_interval, quantile_interval
from reports.summarize import summarize


def sureness_of(arm: Arm, source: Source, seed: int, limits: Sequence[Condition], attainment: float) -> list[Sureness]:
    """Return the certainty that each limit is met: the workload is only a sample, and a simulation is only a model."""
    record = simulate(Plan(arm, seed=seed), source(arm.settings.shape))
    figures = summarize([record], list(limits), with_intervals=False).arms[arm.name]
    values = per_request(record.requests)
    blocks = blocks_of(record.requests.intended_s, values["e2e_sched"])
    timing = next(pool for pool in arm.settings.deployment.pools if pool.role != "prefill").timing
    found = []
    for limit in limits:
        if limit.statistic is None:
            continue
        outcome = of_run(limit, figures.metric(METRICS[limit.metric]))
        if outcome.value is None:
            continue
        interval = _interval(limit, values, blocks)
        found.append(_sureness(limit, outcome.value, interval, model_error(timing)))
    return found + _sure_of_requests(record, blocks, limits, attainment)


def _sure_of_requests(record: Record, blocks: Blocks, limits: Sequence[Condition], attainment: float) -> list[Sureness]:
    """Return the certainty that enough requests are within the per-request limits; nothing if there are none."""
    is_good = good(record, [limit for limit in limits if limit.statistic is None])
    outcome = of_requests(list(limits), goodput(record, is_good), attainment)
    if outcome is None or outcome.value is None:
        return []
    text = f"{outcome.limit} is {outcome}"
    interval = mean_interval(is_good.astype(float), blocks)
    if interval is None:
        return [
            Sureness(
                outcome.limit,
                outcome.value,
                None,
                None,
                None,
                text=f"{text}; there is no interval (too few requests).",
                is_share=True,
            )
        ]
    low, high = interval[0], min(interval[1], 1.0)
    if outcome.value == 1:
        # If none exceeded its limits, resampling finds none either, but up to 3 in this many may (the rule of three).
        low = max(1 - 3 / len(is_good), 0.0)
    lies = "is within" if low >= attainment else "is beyond" if high < attainment else "includes"
    text += f"; the sample's 95% interval, {low:.2%} to {high:.2%}, {lies} the limit."
    is_open = low < attainment <= high
    return [Sureness(outcome.limit, outcome.value, low, high, None, text=text, is_open=is_open, is_share=True)]


def _interval(limit: Condition, values: dict[str, Floats], blocks: Blocks) -> tuple[float, float] | str:
    """Return the interval of the limited metric, or why there is none."""
    of = values.get(METRICS[limit.metric])
    if of is None:
        return "gaps between tokens are not stored by request"
    if limit.statistic == "max":
        return "a maximum comes from one request"
    if limit.statistic == "mean":
        return mean_interval(of, blocks) or "too few requests"
    percentile = int((limit.statistic or "p50")[1:])
    known = int((~np.isnan(of)).sum())
    if known < LEAST_SAMPLES[percentile]:
        return f"{known:,} requests are too few"
    return quantile_interval(of, blocks, percentile / 100) or "too few requests"


def _sureness(
    limit: Condition, value: float, interval: tuple[float, float] | str, known: ModelError | None
) -> Sureness:
    """Say how far a value is from its limit, and how much that means."""
    margin = 1 - value / limit.value
    text = f"{limit} is {'met' if margin >= 0 else 'missed'} by {percent(abs(margin))}"
    error, is_within_error = None, False
    if known is not None:
        error, metric = (known.ttft, "TTFT") if limit.metric in ("ttft", "ttst") else (known.tpot, "TPOT")
        is_within_error = 0 <= margin < error
        text += ", within the model's error" * is_within_error
        text += f"; for {known}, mean {metric} was {percent(error)} off"
        if limit.statistic != "mean":
            text += f", and the error of a {limit.statistic} is not known"
    low, high = (None, None) if isinstance(interval, str) else interval
    if low is not None and high is not None:
        lies = "is within" if high <= limit.value else "is beyond" if low > limit.value else "includes"
        text += f"; the sample's 95% interval, {low * 1000:,.4g} to {high * 1000:,.4g} ms, {lies} the limit"
    else:
        text += f"; there is no interval ({interval})"
    text += "." if known is not None else "; the model's error is not known for this case."
    is_open = low is not None and high is not None and low <= limit.value < high
    return Sureness(str(limit), value, low, high, error, str(known or ""), text, is_open, is_within_error)
