"""Lower bounds of a layout's workers, and limits that no number of workers meets, from the trace and the step times.

Nothing is simulated. Each limit says how many values must be within it; the rest may be as late as they like:

    a prompt alone          takes as long as its chunks without what others may have cached
    a token alone           takes as long as a decode step of one sequence with its context
    all workers together    must compute the prompts that must be in time, and the answers that must have ended, in the
                            time of the trace and what the limit allows after it
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynabench.arm import Settings
from dynabench.capacity.work import LeastWork, prices_of
from dynabench.deployment.engines import answered, check_fits, engines_of, longest_of
from dynabench.deployment.prefill import prefill_s
from dynabench.experiment.refused import missed_by_refusals
from dynabench.experiment.source import Source
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import chunk
from reports.figures.conditions import Condition
from reports.figures.outcomes import SHARES, num_required
from workloads import Workload, WorkloadError
from workloads.pacing import LoadConfig
from workloads.reuse import reuse_of

Tokens = npt.NDArray[np.int64]

SAMPLE = 256
"""The number of values whose mean bounds that of all from below."""
SAFETY = 0.9
"""The share of the least work that counts as certain: steps of some sizes stand for all, and a prompt that overtakes
another may find what that one would have left."""
MANY = 4096
"""More workers than any plan needs."""


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


class Sizes(NamedTuple):
    """The requests that count, in order of arrival."""

    are_all: bool
    """Whether these are all requests."""

    arrivals_s: npt.NDArray[np.float64]
    prompts: Tokens
    answers: Tokens
    new: Tokens
    """Tokens of each prompt that no earlier prompt has."""

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last."""
        return float(np.ptp(self.arrivals_s)) if len(self.arrivals_s) else 0.0


class Due(NamedTuple):
    """What must be computed in time."""

    allowed_s: float
    """How long after the last arrival."""
    num_late: int
    """Requests that may be later."""
    is_answer: bool
    """Whether answers must have ended, and not only begun."""


def floor_of(settings: Settings, source: Source, limits: Sequence[Condition], attainment: float = 1.0) -> Floor:
    """Return the minimum that a layout needs for a workload of its shape."""
    workload, deployment = source(settings.shape), settings.deployment
    try:
        engines = [engine.at_best for engine in engines_of(deployment)]
        for engine in set(engines):
            check_fits(workload, engine, fail_on_too_long=settings.load.fail_on_too_long)
    except (ValueError, WorkloadError) as error:
        return Floor(impossible=str(error))
    longest = longest_of(engines)
    everything, workload = workload, answered(workload, longest)
    if not len(workload):
        return Floor(impossible=f"no request fits {longest}")
    if (reason := missed_by_refusals(everything, settings.load, longest, limits, attainment)) is not None:
        return Floor(impossible=reason)
    prefilling = [engine for engine in engines if engine.config.kv_role != "kv_consumer"]
    decoding = next(engine for engine in engines if engine.config.kv_role != "kv_producer")
    disaggregation = deployment.disaggregation
    is_apart = prefilling[0] is not decoding
    is_bypassed = disaggregation.conditional_disagg != "never" or disaggregation.prefill_fallback
    computing = {*prefilling, decoding} if is_bypassed else set(prefilling)
    sizes = _sizes(workload, settings.load, prefilling[0])
    if not len(sizes.new):  # none is measured
        return Floor()
    for limit in limits:
        if reason := _beyond(limit, sizes, attainment, computing=computing, decoding=decoding):
            return Floor(impossible=reason)
    if settings.load.waits_for_answers(workload):
        return Floor()
    dues = [due for limit in limits for due in _dues(limit, len(sizes.new), attainment)]
    if is_apart and not is_bypassed and (reason := _prefill_beyond(dues, sizes, prefilling)):
        return Floor(impossible=reason)
    needed, expected = _workers(dues, sizes, decoding, is_apart=is_apart)
    if not is_apart:
        expected = max([expected, *(_diluting(limit, sizes, decoding) for limit in limits)])
    steps = [_chunk_s(prefilling[0]) / limit.value for limit in limits if limit.metric in ("itl", "tpot")]
    return Floor(needed, max([*steps, 1]) - 1, expected=max(-(-expected // decoding.config.dp_size), needed))


def _sizes(workload: Workload, load: LoadConfig, engine: SimulatedEngine) -> Sizes:
    columns = workload.columns
    prompts, answers = columns.input_length.astype(np.int64), columns.output_length.astype(np.int64)
    arrivals_s = columns.arrival_s
    config, new = engine.config, prompts
    if config.enable_prefix_caching and workload.knows_prefixes:
        new = np.maximum(prompts - reuse_of(workload, config.block_size).endless_hits(), 1)
    counted = load.may_count(workload)
    return Sizes(bool(counted.all()), arrivals_s[counted], prompts[counted], answers[counted], new[counted])


def _beyond(
    limit: Condition,
    sizes: Sizes,
    attainment: float,
    *,
    computing: Iterable[SimulatedEngine],
    decoding: SimulatedEngine,
) -> str | None:
    """Say why no number of workers meets a limit, if none does."""
    if limit.metric in ("ttft", "e2e"):
        least = _least(limit, sizes.new, np.ones_like(sizes.new), attainment, lambda new: _prompt_s(computing, new))
        if SAFETY * least > limit.value:
            return f"{limit} is less than the time of prompts alone on a worker ({least * 1000:,.4g} ms)"
    # ITL counts every gap after the warm-up, also those of requests that do not count.
    if limit.metric == "tpot" or (limit.metric == "itl" and sizes.are_all):
        gaps = np.maximum(sizes.answers - 1, 0)
        counts = gaps if limit.metric == "itl" else np.minimum(gaps, 1)
        least = _least(limit, sizes.prompts, counts, attainment, lambda context: _token_s(decoding, context))
        if least > limit.value * (1 + 1e-6):
            return f"{limit} is less than the time of a decode step with a single sequence ({least * 1000:.3g} ms)"
    return None


def _least(
    limit: Condition, sizes: Tokens, counts: Tokens, attainment: float, seconds: Callable[[int], float]
) -> float:
    """Return the least that a limited statistic can be, if each size has so many values that grow with it (s)."""
    order = np.argsort(sizes, kind="stable")
    ends, total = np.cumsum(counts[order]), int(counts.sum())
    if not total:
        return 0.0

    def at(place: int) -> float:
        return seconds(int(sizes[order[np.searchsorted(ends, place, side="right")]]))

    if limit.statistic == "mean":
        return float(np.mean([at(part * total // SAMPLE) for part in range(SAMPLE)]))
    without = len(sizes) - total if limit.statistic is None else 0  # a request without a value is within the limit
    place = num_required(limit, total + without, attainment) - without - 1
    return at(place) if place >= 0 else 0.0


def _prompt_s(engines: Iterable[SimulatedEngine], num_tokens: int) -> float:
    """Return the least time of a prompt of which so many tokens are computed (s)."""
    return min(_alone_s(engine, num_tokens) * min(engine.noise, default=1.0) for engine in engines)


def _alone_s(engine: SimulatedEngine, num_tokens: int) -> float:
    """Return the same without noise: the prompt's own chunks, unless larger steps, with other prompts, may take less."""
    budget = engine.config.max_num_batched_tokens
    sizes = [*sorted(round(knot) for knot in engine.timing.knots.tokens if 1 <= knot < budget), budget]
    seconds = [engine.timing.mixed(chunk(size), 0, 0) for size in sizes]
    if seconds != sorted(seconds):
        return prices_of(engine, 1).least_s(LeastWork(num_tokens, 0, 0))
    return prefill_s(engine, num_tokens, 0)


def _token_s(engine: SimulatedEngine, context: int) -> float:
    """Return the least time of a token of a sequence with at least this context (s)."""
    alone = min(engine.timing.decode(1, context).first, engine.timing.mixed(chunk(1), 1, context))
    return alone * min(engine.noise, default=1.0)


def _dues(limit: Condition, count: int, attainment: float) -> Iterator[Due]:
    """Yield what a limit requires to be computed: of a mean, that few requests take many times as long."""
    if limit.metric not in ("ttft", "e2e"):
        return
    is_answer = limit.metric == "e2e"
    if limit.statistic != "mean":
        yield Due(limit.value, count - num_required(limit, count, attainment), is_answer)
        return
    for times in (2, 10, 100):
        yield Due(times * limit.value, count // times, is_answer)


def _prefill_beyond(dues: Iterable[Due], sizes: Sizes, engines: Sequence[SimulatedEngine]) -> str | None:
    """Say that the prefill workers of a layout are too few, if they are."""
    prices, new = prices_of(engines[0], 1), np.sort(sizes.new)
    for due in dues:
        least_s = SAFETY * prices.least_s(LeastWork(int(new[: len(new) - due.num_late].sum()), 0, 0))
        busy = least_s / (sizes.duration_s + due.allowed_s) / engines[0].config.dp_size
        if busy > len(engines):
            return f"its prompts alone keep {busy:.3g} prefill workers busy"
    return None


def _workers(dues: Iterable[Due], sizes: Sizes, engine: SimulatedEngine, *, is_apart: bool) -> tuple[int, int]:
    """Return how many workers all the work needs that must be done in time, and how many ranks if nothing is late.

    In vLLM's order, a request that has begun is running or goes before those that have not. So where first tokens are in
    time, all answers have ended but those of the sequences that run at the end.
    """
    gaps = np.maximum(sizes.answers - 1, 0)
    prompts = np.cumsum(np.sort(np.zeros_like(sizes.new) if is_apart else sizes.new))
    answers, kv = _without_most(gaps), _without_most(gaps * sizes.new + gaps * (gaps - 1) // 2)
    prices = prices_of(engine, int((sizes.new + sizes.answers).max()))
    config, count = engine.config, len(gaps)
    is_in_order = not is_apart and config.scheduling_policy == "fcfs" and engine.host is None

    def least_s(due: Due, workers: int) -> float:
        running = workers * config.dp_size * (config.max_num_active_seqs or config.max_num_seqs)
        left = due.num_late + (0 if due.is_answer else running if is_in_order else count)
        left = min(left, count)
        return SAFETY * prices.least_s(LeastWork(prompts[count - due.num_late - 1], answers[left], kv[left]))

    needed = 1
    for due in dues:
        rank_s = config.dp_size * (sizes.duration_s + due.allowed_s)
        while needed < MANY and least_s(due, needed) > needed * rank_s:
            needed += 1
    whole_s = SAFETY * prices.least_s(LeastWork(prompts[-1], answers[0], kv[0]))
    return needed, math.ceil(whole_s / sizes.duration_s) if sizes.duration_s else 1


def _without_most(values: Tokens) -> Tokens:
    """Return the sum of some values without the largest one, without the two largest, and so on, beginning with all."""
    return np.concatenate([np.cumsum(np.sort(values))[::-1], [0]])


def _diluting(limit: Condition, sizes: Sizes, engine: SimulatedEngine) -> int:
    """Return how many ranks make gaps with a prompt in them rare enough, if such gaps exceed a limit.

    On a rank with 1/n of the requests, the share of tokens that wait for a prompt is the number of steps with prompts
    per second times the length of a step.
    """
    if limit.metric != "itl" or limit.statistic in (None, "mean", "max") or not sizes.duration_s:
        return 1
    mean = float(sizes.prompts.mean())
    size = min(engine.config.max_num_batched_tokens, max(int(mean), 1))
    if engine.timing.mixed(chunk(size), 0, 0) <= limit.value:
        return 1
    steps_per_s = len(sizes.prompts) / sizes.duration_s * mean / size
    return int(steps_per_s * engine.timing.decode(1, int(mean)).first / (1 - SHARES[limit.statistic])) + 1


def _chunk_s(engine: SimulatedEngine) -> float:
    """Return the time of a step with a whole chunk of a prompt (s)."""
    return engine.timing.mixed(chunk(engine.config.max_num_batched_tokens), 0, 0)
