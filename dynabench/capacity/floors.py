"""Lower bounds of a layout's workers, and limits that no number of workers meets, from the trace and the step times.

Nothing is simulated. A prompt that is alone on a worker takes as long as its chunks. A token of an answer that is alone
takes as long as a decode step of one sequence. And all workers together must do the whole work in the time of the
trace.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynabench.capacity.refused import missed_by_refusals
from dynabench.deployment.engines import answered, check_fits, engines_of, max_model_len_of
from dynabench.deployment.prefill import prefill_s
from dynabench.experiment.bounds import token_s
from dynabench.experiment.source import Source
from dynabench.plan import Settings
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import chunk
from reports.conditions import Condition
from workloads import Workload, WorkloadError
from workloads.reuse import reuse_of

SHARES = {None: 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}
SAMPLE = 256
"""The number of requests whose prompts are timed."""
SAFETY = 0.9
"""The share of the estimated work that counts as certain: a sample is not the whole, and a mean is not a
distribution."""


class Floor(NamedTuple):
    """The minimum that a layout needs."""

    workers: int = 1
    """The fewest workers of the kind whose number is searched for."""
    rank: float = 0.0
    """How far a step with a whole chunk exceeds the limit on the time between tokens; smaller is more promising."""
    impossible: str = ""
    """Why no number of workers is enough."""
    expected: int = 1
    """The number of workers that it probably needs."""


def floor_of(settings: Settings, source: Source, limits: Sequence[Condition], attainment: float = 1.0) -> Floor:
    """Return the minimum that a layout needs for a workload of its shape."""
    workload, deployment = source(settings.shape), settings.deployment
    try:
        engines = engines_of(deployment)
        for engine in set(engines):
            check_fits(workload, engine, fail_on_too_long=settings.load.fail_on_too_long)
    except (ValueError, WorkloadError) as error:
        return Floor(impossible=str(error))
    context = max_model_len_of(engines)
    if (reason := missed_by_refusals(workload, context, limits, attainment)) is not None:
        return Floor(impossible=reason)
    workload = answered(workload, context)
    if not len(workload):
        return Floor(impossible=f"every request is longer than the context of {context:,} tokens (max_model_len)")
    if settings.load.is_closed or not workload.duration_s:
        return Floor()
    prefilling = [engine for engine in engines if engine.config.kv_role != "kv_consumer"]
    decoding = [engine for engine in engines if engine.config.kv_role != "kv_producer"]
    alone = _alone(workload, prefilling[0])
    step_s = decoding[0].timing.decode(1, int(alone.context)).first
    for limit in limits:
        if (reason := _beyond(limit, alone.times, step_s)) is not None:
            return Floor(impossible=reason)
    prompts_s, answers_s = _work(workload, prefilling[0], decoding[0])
    available_s = workload.duration_s + _longest_s(limits, workload)
    expected = 1
    if prefilling[0] is decoding[0]:
        expected = max((_diluting(limit, workload, decoding[0], alone, step_s) for limit in limits), default=1)
    else:
        busy = SAFETY * prompts_s / available_s / prefilling[0].config.dp_size
        if busy > len(prefilling):
            return Floor(impossible=f"its prompts alone keep {busy:.3g} prefill workers busy")
        prompts_s = 0.0
    rank = max(
        (_chunk_s(prefilling[0]) / limit.value for limit in limits if limit.metric in ("itl", "tpot")), default=0
    )
    num_ranks = decoding[0].config.dp_size
    needed = max(int(np.ceil(SAFETY * (prompts_s + answers_s) / available_s / num_ranks)), 1)
    expected = -(-expected // num_ranks)
    return Floor(needed, max(rank - 1, 0.0), expected=expected)


def _longest_s(limits: Sequence[Condition], workload: Workload) -> float:
    """Return how long the limits allow a request to take: work may continue this long after the last arrival (s)."""
    whole = max((limit.value for limit in limits if limit.metric in ("ttft", "e2e")), default=0.0)
    token = max((limit.value for limit in limits if limit.metric in ("itl", "tpot")), default=0.0)
    return whole + token * max(request.output_length for request in workload)


class Alone(NamedTuple):
    """Requests on an empty worker."""

    times: "np.ndarray[tuple[int], np.dtype[np.float64]]"
    """Time to the first token of a sample of the requests, spread evenly over their lengths (s)."""
    context: float
    """Mean number of prompt tokens."""


def _alone(workload: Workload, engine: SimulatedEngine) -> Alone:
    hits = reuse_of(workload, engine.config.block_size).endless_hits()
    prompts = sorted(
        (request.input_length, min(int(hit), request.input_length - 1))
        for request, hit in zip(workload, hits, strict=True)
    )
    places = np.unique(np.linspace(0, len(prompts) - 1, SAMPLE).astype(int))
    times = [prefill_s(engine, *prompts[place]) for place in places]
    return Alone(np.array(times), float(np.mean([length for length, _ in prompts])))


def _beyond(limit: Condition, times: "np.ndarray[tuple[int], np.dtype[np.float64]]", step_s: float) -> str | None:
    """Say why no number of workers meets a limit, if none does."""
    if limit.metric in ("itl", "tpot") and step_s > limit.value:
        return f"{limit} is less than the time of a decode step with a single sequence ({step_s * 1000:.3g} ms)"
    if limit.metric not in ("ttft", "e2e"):
        return None
    least = float(times.mean() if limit.statistic == "mean" else np.quantile(times, SHARES[limit.statistic]))
    if SAFETY * least > limit.value:
        return f"{limit} is less than the time of prompts alone on a worker ({least * 1000:,.4g} ms)"
    return None


def _diluting(limit: Condition, workload: Workload, engine: SimulatedEngine, alone: Alone, step_s: float) -> int:
    """Return how many workers make gaps with a prompt in them rare enough, if such gaps exceed a limit.

    On a worker with 1/n of the requests, the share of tokens that wait for a prompt is the number of steps with prompts
    per second times the length of a step.
    """
    if limit.metric != "itl" or limit.statistic in (None, "mean", "max"):
        return 1
    size = min(engine.config.max_num_batched_tokens, max(int(alone.context), 1))
    if engine.timing.mixed(chunk(size), 0, 0) <= limit.value:
        return 1
    steps_per_s = len(workload) / workload.duration_s * alone.context / size
    return int(steps_per_s * step_s / (1 - SHARES[limit.statistic])) + 1


def _work(workload: Workload, prefilling: SimulatedEngine, decoding: SimulatedEngine) -> tuple[float, float]:
    """Return the least time that one worker needs for all prompts, and for all answers (s)."""
    hits = reuse_of(workload, prefilling.config.block_size).endless_hits()
    missing = sum(max(request.input_length - int(hit), 1) for request, hit in zip(workload, hits, strict=True))
    answers = sum(request.output_length - 1 for request in workload)
    context = float(np.mean([request.input_length + request.output_length / 2 for request in workload]))
    own = context - float(np.mean(hits))  # of a sequence; shared blocks are stored once
    most = min(decoding.config.max_num_seqs, max(int(decoding.num_usable_tokens / own), 1))
    sizes = {min(1 << power, most) for power in range(most.bit_length() + 1)}
    step = min(decoding.timing.decode(size, int(size * context)).first / size for size in sizes)
    return missing * token_s(prefilling.timing, prefilling.config.max_num_batched_tokens), answers * step


def _chunk_s(engine: SimulatedEngine) -> float:
    """Return the time of a step with a whole chunk of a prompt (s)."""
    return engine.timing.mixed(chunk(engine.config.max_num_batched_tokens), 0, 0)
