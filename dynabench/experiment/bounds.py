"""Bounds that no router can beat, from the trace alone, for open-loop workloads.

A cache that knows the future has the most hits of all caches of its size (`workloads/reuse.py`). So all prompt tokens
beyond its hits must be computed, and those beyond the hits of GPU memory alone must at least be copied.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dynabench.arm import Arm
from dynabench.deployment.engines import answered, engines_of, longest_of
from dynabench.deployment.prefill import prefill_s
from mocker.tiers.config import HostMemory
from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import TimingModel, chunk
from workloads import Workload
from workloads.columns import CHUNK
from workloads.pacing import LoadConfig
from workloads.reuse import reuse_of
from workloads.shape import ShapeConfig

PLACES = ("GPU memory", "host memory", "disk", "store")
"""Memory that may contain KV, nearest first."""


class Bounds(NamedTuple):
    """Limits that no router can beat."""

    ttft_s: float | None = None
    """The lowest possible mean TTFT of all arms; None if it is unknown."""
    hit_shares: dict[str, dict[str, float]] = {}  # noqa: RUF012 (a value)
    """By arm: the highest possible hit share with GPU memory, and with each further tier; only where it is known."""


class TierBound(NamedTuple):
    """Memory that may contain KV, summed over all workers."""

    name: str
    num_blocks: int
    token_s: float
    """The least time to copy the KV of a token to a GPU (s)."""


class PromptHits:
    """The prompts of a workload, with their hits in caches of one block size."""

    def __init__(self, workload: Workload, block_size: int, load: LoadConfig = LoadConfig()) -> None:  # noqa: B008 (frozen)
        """Find the shared prefixes of the prompts."""
        self.workload = workload
        self.is_counted = load.are_measured(workload.columns.arrival_s)
        self.lengths = workload.columns.input_length.astype(np.int64)
        self.reuse = reuse_of(workload, block_size)
        self.hits = self.reuse.endless_hits()
        self.uncached = np.maximum(self.lengths - self.hits, 1)
        """Tokens of each prompt that must be computed even with an unlimited cache."""
        self.num_best_hits = functools.cache(self._num_best_hits)

    def _num_best_hits(self, capacity: int) -> int:
        """Count the tokens of measured prompts that the best cache of `capacity` blocks would hit."""
        return int(self.reuse.best_hits(capacity, self.is_counted)[self.is_counted].sum())


def bounds_of(arms: Sequence[Arm], source: Callable[[ShapeConfig], Workload]) -> Bounds:
    """Return the bounds, as far as they follow from the workload alone.

    They do if all arms see the same arrivals, which do not wait for answers.
    """
    prompts_of = functools.cache(
        lambda shape, load, block_size, longest: PromptHits(answered(source(shape), longest), block_size, load)
    )
    shares: dict[str, dict[str, float]] = {}
    times: list[float | None] = []
    for arm in arms:
        shape, load = arm.settings.shape, arm.settings.load
        engines = [engine.at_best for engine in engines_of(arm.settings.deployment)]
        if load.is_closed or source(shape).has_dependencies or any(engine.config.kv_role for engine in engines):
            times.append(None)
            continue
        prompts = prompts_of(shape, load, engines[0].config.block_size, longest_of(engines))
        tiers = tiers_of(engines)
        if not prompts.is_counted.any():
            return Bounds()
        if prompts.workload.knows_prefixes:
            shares[arm.name] = hit_shares(prompts, tiers)
        is_same = shape == arms[0].settings.shape and len(set(engines)) == 1
        num_ranks = len(engines) * engines[0].config.dp_size
        times.append(lower_bound(prompts, engines[0], num_ranks) if is_same else None)
    known = [time for time in times if time is not None]
    return Bounds(min(known) if len(known) == len(arms) else None, shares)


ANY_NUMBER = 1 << 40
"""Of blocks, where no group of layers keeps all tokens."""


def tiers_of(engines: Sequence[SimulatedEngine]) -> list[TierBound]:
    """Return the tiers that may contain KV, nearest first."""
    caching = [engine for engine in engines if engine.config.enable_prefix_caching]
    num_blocks = {"GPU memory": sum(_most_blocks(engine) * engine.config.dp_size for engine in caching)}
    copies = {"GPU memory": 0.0}
    for engine in caching:
        if (host := engine.host) is None:
            continue
        places = {"host memory": host.num_chunks} | {tier.name: tier.num_chunks for tier in host.tiers}
        for name, num_chunks in places.items():
            count = num_chunks * host.blocks_per_chunk
            if name == "store":  # the workers share one store
                num_blocks[name] = count
            else:
                num_blocks[name] = num_blocks.get(name, 0) + count * engine.config.dp_size
            copies[name] = min(copies.get(name, math.inf), _copy_s(engine, host, is_far=name != "host memory"))
    return [TierBound(name, num_blocks[name], copies[name]) for name in sorted(num_blocks, key=PLACES.index)]


def _most_blocks(engine: SimulatedEngine) -> int:
    """Return the most blocks of a prompt that GPU memory can have, of which only groups that keep all tokens need every one."""
    if engine.layout is None:
        return engine.num_usable_blocks
    needed = sum([engine.config.block_size / group.block_size for group in engine.layout.groups if group.layer.is_full])
    return int(engine.num_usable_blocks / needed) if needed else ANY_NUMBER


def _copy_s(engine: SimulatedEngine, host: HostMemory, *, is_far: bool) -> float:
    """Return the least time to copy the KV of a token to a GPU (s), from host memory or through it.

    A prompt may read from all tiers behind host memory at once. Loads that a step waits for layer by layer may take no
    time beside what it computes.
    """
    if host.num_layers:
        return 0.0
    token_bytes = host.chunk_bytes / (host.blocks_per_chunk * engine.config.block_size)
    read_s = token_bytes / sum([tier.bandwidth for tier in host.tiers]) if is_far else 0.0
    return read_s + token_bytes / host.bandwidth


def hit_shares(prompts: PromptHits, tiers: Sequence[TierBound]) -> dict[str, float]:
    """Return the highest share of the prompt tokens that the first tier could hit, the first two, and so on."""
    total = int(prompts.lengths[prompts.is_counted].sum())
    sizes = accumulate(tier.num_blocks for tier in tiers)
    return {tier.name: prompts.num_best_hits(size) / total for tier, size in zip(tiers, sizes, strict=True)}


def lower_bound(prompts: PromptHits, engine: SimulatedEngine, num_ranks: int) -> float:
    """Return a lower bound of the mean TTFT (s) for any router over this many equal engines."""
    replicas = num_ranks // engine.config.dp_size
    return max(
        ttft_bound(prompts, engine, tiers_of([engine] * replicas)),
        pool_bound(prompts, engine, num_ranks),
    )


def ttft_bound(prompts: PromptHits, engine: SimulatedEngine, tiers: Sequence[TierBound] = ()) -> float:
    """Return a lower bound of the mean TTFT (s): each prompt alone on an empty machine with the best possible cache.

    The best hit is the longest prefix that any earlier request had, in one unlimited cache; at least one token is
    computed. With tiers, the bound also accounts for their sizes, for all prompts together.
    """
    lengths, cached = (each[prompts.is_counted] for each in (prompts.lengths, prompts.lengths - prompts.uncached))
    above = int(cached.max()) + 1
    kinds, kind = np.unique(lengths * above + cached, return_inverse=True)  # many prompts are alike
    times = np.array([prefill_s(engine, *divmod(each, above)) for each in kinds.tolist()])[kind]
    return (sum(_each(times)) + (_capacity_s(prompts, engine, tiers) if tiers else 0.0)) / len(times)


def _capacity_s(prompts: PromptHits, engine: SimulatedEngine, tiers: Sequence[TierBound]) -> float:
    """Return the least additional time of all prompts together, compared with an unlimited cache on the GPU (s).

    Tokens that fit in no tier are computed. Tokens that do not fit on a GPU are copied or computed, whichever is
    faster. A prompt whose last step is short may compute some for free, up to the size at which steps take longer.
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
    """Return for some sizes the least time (s) that each additional token adds to a step of that size or more."""
    sizes = sorted({round(size) for size in np.geomspace(1, budget, 48)})
    times = [timing.mixed(chunk(size), 0, 0) for size in sizes]
    slopes = np.diff(times) / np.diff(sizes)
    return [
        (size, min(float(slopes[place:].min()), time / size))  # so that an additional step costs no less
        for place, (size, time) in enumerate(zip(sizes[:-1], times, strict=False))
    ]


def pool_bound(prompts: PromptHits, engine: SimulatedEngine, num_ranks: int) -> float:
    """Return the mean TTFT (s) of one machine as fast as all engines, serving the shortest remaining work first.

    It processes only uncached prompt tokens, which no router can avoid. The larger of this and `ttft_bound` counts.
    """
    token = token_s(engine.timing, engine.config.max_num_batched_tokens)
    tokens = np.where(prompts.uncached > 1, prompts.uncached, 0)  # a single token may join the decodes
    counted, arrivals_s = prompts.is_counted, prompts.workload.columns.arrival_s
    work: list[tuple[float, float]] = []  # (remaining, arrival)
    now, total = 0.0, 0.0
    for arrival_s, count in zip(_each(arrivals_s[counted]), _each(tokens[counted]), strict=True):
        room = (arrival_s - now) * num_ranks
        while work and room > 0:
            remaining, arrived = heappop(work)
            if remaining > room:
                heappush(work, (remaining - room, arrived))
                room = 0.0
            else:
                room -= remaining
                total += arrival_s - room / num_ranks - arrived
        now = arrival_s
        heappush(work, (count * token, now))
    while work:
        remaining, arrived = heappop(work)
        now += remaining / num_ranks
        total += now - arrived
    return total / int(prompts.is_counted.sum())


def _each(values: npt.NDArray[Any]) -> Iterator[float]:
    """Yield numbers as Python's own, of which few are in memory at a time."""
    for start in range(0, len(values), CHUNK):
        yield from values[start : start + CHUNK].tolist()


def token_s(timing: TimingModel, budget: int) -> float:
    """Return the least time (s) that an additional prompt token can add to a step.

    Long chunks cost more per token because of attention, and short chunks cost little because weights dominate.
    """
    base = timing.mixed(chunk(1), 0, 0)
    sizes = {min(size, budget) for size in (2, 64, 512, budget) if budget > 1}
    return min(((timing.mixed(chunk(size), 0, 0) - base) / (size - 1) for size in sizes), default=0.0)
