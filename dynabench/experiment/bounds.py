"""What no router could beat, from the trace alone: for open-loop workloads.

A cache that knows the future has the most hits that caches of its size can have (`workloads/reuse.py`). So of all prompt
tokens, those beyond its hits must be computed, and those beyond the hits of GPU memory alone must at least be copied.
"""

import functools
import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from dynabench.deployment.engines import engines_of
from dynabench.deployment.prefill import prefill_s
from dynabench.plan import Arm
from mocker.offload.config import HostMemory
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import TimingModel, chunk
from workloads import Workload
from workloads.pacing import LoadConfig
from workloads.reuse import reuse_of
from workloads.shape import ShapeConfig

PLACES = ("GPU memory", "host memory", "disk", "store")
"""Places where KV may be found, the nearest first."""


class Bounds(NamedTuple):
    """What no router could beat."""

    ttft_s: float | None = None
    """A mean TTFT that no arm could be below; None where it is not known."""
    hit_shares: dict[str, dict[str, float]] = {}  # noqa: RUF012 (a value)
    """By arm: the highest hit share with GPU memory, and with each further tier too; only where it is known."""


class Tier(NamedTuple):
    """Memory in which KV may be found, summed over all workers."""

    name: str
    num_blocks: int
    token_s: float
    """The least time to copy the KV of a token to a GPU (s)."""


class Prompts:
    """The prompts of a workload as caches of one block size see them."""

    def __init__(self, workload: Workload, block_size: int, load: LoadConfig = LoadConfig()) -> None:  # noqa: B008 (frozen)
        """Find their shared prefixes."""
        self.workload = workload
        self.is_counted = np.array([load.is_measured(request.arrival_s) for request in workload], bool)
        self.lengths = np.array([request.input_length for request in workload], np.int64)
        self.reuse = reuse_of(workload, block_size)
        self.hits = self.reuse.endless_hits()
        self.uncached = np.maximum(self.lengths - self.hits, 1)
        """Tokens of each that an unlimited cache leaves to compute."""
        self.num_best_hits = functools.cache(self._num_best_hits)

    def _num_best_hits(self, capacity: int) -> int:
        """Count the tokens that a cache of so many blocks could hold of those that count."""
        return int(self.reuse.best_hits(capacity, self.is_counted)[self.is_counted].sum())


def bounds_of(arms: Sequence[Arm], source: Callable[[ShapeConfig], Workload]) -> Bounds:
    """Return what no router could beat, as far as it follows from the workload alone.

    It does where all arms see the same arrivals, which do not wait for answers.
    """
    prompts_of = functools.cache(lambda shape, load, block_size: Prompts(source(shape), block_size, load))
    shares: dict[str, dict[str, float]] = {}
    times: list[float | None] = []
    for arm in arms:
        shape, load = arm.settings.shape, arm.settings.load
        engines = engines_of(arm.settings.deployment)
        if load.is_closed or source(shape).has_dependencies or any(engine.config.kv_role for engine in engines):
            times.append(None)
            continue
        prompts, tiers = prompts_of(shape, load, engines[0].config.block_size), tiers_of(engines)
        if not prompts.is_counted.any():
            return Bounds()
        if prompts.workload.knows_prefixes:
            shares[arm.name] = hit_shares(prompts, tiers)
        is_same = shape == arms[0].settings.shape and len(set(engines)) == 1
        num_ranks = len(engines) * engines[0].config.dp_size
        times.append(lower_bound(prompts, engines[0], num_ranks) if is_same else None)
    known = [time for time in times if time is not None]
    return Bounds(min(known) if len(known) == len(arms) else None, shares)


def tiers_of(engines: Sequence[SimulatedEngine]) -> list[Tier]:
    """Return where KV may be found, the nearest first."""
    caching = [engine for engine in engines if engine.config.enable_prefix_caching]
    num_blocks = {"GPU memory": sum(engine.num_usable_blocks * engine.config.dp_size for engine in caching)}
    copies = {"GPU memory": 0.0}
    for engine in caching:
        if (host := engine.host) is None:
            continue
        places = {"host memory": host.num_chunks} | {tier.name: tier.num_chunks for tier in host.tiers}
        for name, num_chunks in places.items():
            count = num_chunks * host.blocks_per_chunk
            if name == "store":  # there is one
                num_blocks[name] = count
            else:
                num_blocks[name] = num_blocks.get(name, 0) + count * engine.config.dp_size
            copies[name] = min(copies.get(name, math.inf), _copy_s(engine, host, is_far=name != "host memory"))
    return [Tier(name, num_blocks[name], copies[name]) for name in sorted(num_blocks, key=PLACES.index)]


def _copy_s(engine: SimulatedEngine, host: HostMemory, *, is_far: bool) -> float:
    """Return the least time to copy the KV of a token to a GPU (s), from host memory or through it.

    A prompt may read from all that is behind host memory at once.
    """
    token_bytes = host.chunk_bytes / (host.blocks_per_chunk * engine.config.block_size)
    read_s = token_bytes / sum([tier.bandwidth for tier in host.tiers]) if is_far else 0.0
    return read_s + token_bytes / host.bandwidth


def hit_shares(prompts: Prompts, tiers: Sequence[Tier]) -> dict[str, float]:
    """Return the highest share of the prompt tokens that could be found in the first tier, in the first two, and so on."""
    total = int(prompts.lengths[prompts.is_counted].sum())
    sizes = accumulate(tier.num_blocks for tier in tiers)
    return {tier.name: prompts.num_best_hits(size) / total for tier, size in zip(tiers, sizes, strict=True)}


def lower_bound(prompts: Prompts, engine: SimulatedEngine, num_ranks: int) -> float:
    """Return a mean TTFT (s) that no router over so many equal engines could beat."""
    replicas = num_ranks // engine.config.dp_size
    return max(
        ttft_bound(prompts, engine, tiers_of([engine] * replicas)),
        pool_bound(prompts, engine, num_ranks),
    )


def ttft_bound(prompts: Prompts, engine: SimulatedEngine, tiers: Sequence[Tier] = ()) -> float:
    """Return a lower bound of the mean TTFT (s): each prompt on an empty machine with the best cache there could be.

    "Best" is the longest prefix that any earlier request had, in one unlimited cache; at least one token is computed. With
    tiers, it is also no better than their sizes allow for all prompts together.
    """
    lengths, uncached = prompts.lengths[prompts.is_counted].tolist(), prompts.uncached[prompts.is_counted].tolist()
    times = [prefill_s(engine, length, length - num) for length, num in zip(lengths, uncached, strict=True)]
    return (sum(times) + (_capacity_s(prompts, engine, tiers) if tiers else 0.0)) / len(times)


def _capacity_s(prompts: Prompts, engine: SimulatedEngine, tiers: Sequence[Tier]) -> float:
    """Return how much longer all prompts take together, at least, than with an unlimited cache on the GPU (s).

    Tokens that cannot be in any tier are computed, those that cannot be on a GPU are copied or computed, whichever is less.
    A prompt whose last step is short may compute some for nothing: as many as fill that up to where steps grow.
    """
    counted, budget = prompts.is_counted, engine.config.max_num_batched_tokens
    hits, uncached = prompts.hits[counted], prompts.uncached[counted]
    sizes = accumulate(tier.num_blocks for tier in tiers)
    lacking = np.array([int(hits.sum()) - prompts.num_best_hits(size) for size in sizes], float)
    copies = [min(tier.token_s for tier in tiers[place:]) for place in range(1, len(tiers))]
    longest = 0.0
    for least, token_s in _growth(engine.timing, budget):
        for_nothing = np.maximum(least - 1 - (uncached - 1) % budget, 0) + (hits == prompts.lengths[counted])
        beyond = np.maximum(lacking - np.minimum(for_nothing, hits).sum(), 0.0)
        costs = np.minimum([*copies, token_s], token_s)
        longest = max(longest, float((costs * (beyond - np.append(beyond[1:], 0.0))).sum()))
    return longest


def _growth(timing: TimingModel, budget: int) -> list[tuple[int, float]]:
    """Return what each further prompt token adds to a step of at least so many, at least (s), for some sizes."""
    sizes = sorted({round(size) for size in np.geomspace(1, budget, 48)})
    times = [timing.mixed(chunk(size), 0, 0) for size in sizes]
    slopes = np.diff(times) / np.diff(sizes)
    return [
        (size, min(float(slopes[place:].min()), time / size))  # so that one more step costs no less, either
        for place, (size, time) in enumerate(zip(sizes[:-1], times, strict=False))
    ]


def pool_bound(prompts: Prompts, engine: SimulatedEngine, num_ranks: int) -> float:
    """Return the mean TTFT (s) of one machine as fast as all engines, shortest remaining work first.

    It does only the work of uncached prompt tokens, which no router can avoid; the larger of this and `ttft_bound` counts.
    """
    token = token_s(engine.timing, engine.config.max_num_batched_tokens)
    tokens = np.where(prompts.uncached > 1, prompts.uncached, 0).tolist()  # a single one may go along with the decodes
    prompts_left = zip(prompts.workload, tokens, prompts.is_counted.tolist(), strict=True)
    work: list[tuple[float, float]] = []  # (remaining, arrival)
    now, total = 0.0, 0.0
    for request, count, is_counted in prompts_left:
        if not is_counted:
            continue
        room = (request.arrival_s - now) * num_ranks
        while work and room > 0:
            remaining, arrived = heappop(work)
            if remaining > room:
                heappush(work, (remaining - room, arrived))
                room = 0.0
            else:
                room -= remaining
                total += request.arrival_s - room / num_ranks - arrived
        now = request.arrival_s
        heappush(work, (count * token, now))
    while work:
        remaining, arrived = heappop(work)
        now += remaining / num_ranks
        total += now - arrived
    return total / int(prompts.is_counted.sum())


def token_s(timing: TimingModel, budget: int) -> float:
    """Return the least time (s) that a further prompt token can add to a step.

    Attention makes long chunks dearer a token, weights short ones cheap.
    """
    base = timing.mixed(chunk(1), 0, 0)
    sizes = {min(size, budget) for size in (2, 64, 512, budget) if budget > 1}
    return min(((timing.mixed(chunk(size), 0, 0) - base) / (size - 1) for size in sizes), default=0.0)
