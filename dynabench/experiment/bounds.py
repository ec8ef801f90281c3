"""What no router could beat, from the trace alone: for open-loop workloads."""

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from dynabench.deployment.engines import engines_of
from dynabench.plan import Arm
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import TimingModel, chunk
from workloads import Workload
from workloads.describe import endless_hits


def lower_bound(workload: Workload, arms: Sequence[Arm]) -> float | None:
    """Return a mean TTFT (s) that no arm could beat; None unless all see the same arrivals on the same engines, all alike."""
    engines = engines_of(arms[0].settings.deployment)
    is_same = all(arm.settings.shape == arms[0].settings.shape for arm in arms) and all(
        engines_of(arm.settings.deployment) == engines for arm in arms
    )
    if any(arm.settings.load.is_closed for arm in arms) or not is_same or len(set(engines)) > 1:
        return None
    return max(ttft_bound(workload, engines[0]), pool_bound(workload, engines[0], len(engines)))


def ttft_bound(workload: Workload, engine: SimulatedEngine) -> float:
    """Return a lower bound of the mean TTFT (s): each prompt on an empty machine with the best cache there could be.

    "Best" is the longest prefix that any earlier request had, in one unlimited cache; at least one token is computed.
    """
    return float(np.mean(solo_times(workload, engine)))


def solo_times(workload: Workload, engine: SimulatedEngine) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return each request's time to its first token on an empty machine with an unlimited shared cache (s)."""
    hits = endless_hits(workload)
    return np.array(
        [
            prefill_s(
                engine.timing,
                request.input_length,
                min(int(hit), request.input_length - 1),
                engine.config.max_num_batched_tokens,
            )
            for request, hit in zip(workload, hits, strict=True)
        ]
    )


def pool_bound(workload: Workload, engine: SimulatedEngine, num_workers: int) -> float:
    """Return the mean TTFT (s) of one machine as fast as all workers, shortest remaining work first.

    It does only the work of uncached prompt tokens, which no router can avoid; the larger of this and `ttft_bound` counts.
    """
    timing, budget = engine.timing, engine.config.max_num_batched_tokens
    token = token_s(timing, budget)
    hits = endless_hits(workload)
    work: list[tuple[float, float]] = []  # (remaining, arrival)
    now, total = 0.0, 0.0
    for request, hit in zip(workload, hits, strict=True):
        room = (request.arrival_s - now) * num_workers
        while work and room > 0:
            remaining, arrived = heappop(work)
            if remaining > room:
                heappush(work, (remaining - room, arrived))
                room = 0.0
            else:
                room -= remaining
                total += request.arrival_s - room / num_workers - arrived
        now = request.arrival_s
        heappush(work, ((request.input_length - min(int(hit), request.input_length - 1)) * token, now))
    while work:
        remaining, arrived = heappop(work)
        now += remaining / num_workers
        total += now - arrived
    return total / len(workload)


def token_s(timing: TimingModel, budget: int) -> float:
    """Return the least time (s) that a further prompt token can add to a step.

    Attention makes long chunks dearer a token, weights short ones cheap.
    """
    base = timing.mixed(chunk(1), 0, 0)
    sizes = {min(size, budget) for size in (2, 64, 512, budget) if budget > 1}
    return min(((timing.mixed(chunk(size), 0, 0) - base) / (size - 1) for size in sizes), default=0.0)


def prefill_s(timing: TimingModel, length: int, cached: int, budget: int) -> float:
    """Return the time (s) of a prompt that is alone on a worker, in chunks of at most `budget` tokens."""
    total, done = 0.0, cached
    while done < length:
        size = min(budget, length - done)
        total += timing.mixed(chunk(size, done), 0, 0)
        done += size
    return total
