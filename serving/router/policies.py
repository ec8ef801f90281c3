"""Router modes: each a small class that scores candidates. The lowest cost wins."""

import math
import random
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol


class Candidates(NamedTuple):
    """What a policy sees: parallel lists, one entry a worker, in order of worker id."""

    overlap_blocks: list[int]
    """Leading blocks of the prompt that the worker has cached."""
    prefill_tokens: list[int]
    """Prompt tokens the worker would have to compute: those it was sent already, and this prompt's uncached ones."""
    decode_blocks: list[int]
    """Blocks of requests in flight there, this prompt's included."""
    num_requests: list[int]
    """Requests in flight there, this one not included."""
    block_size: int


class Policy(Protocol):
    """One router mode."""

    description: ClassVar[str]
    """One line for the list of modes (compiled code keeps no docstrings)."""
    needs_load: ClassVar[bool]
    """Whether `costs` reads overlaps and blocks; otherwise the router need not look them up."""

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score each candidate."""
        ...


class Random:
    """See `description`."""

    description: ClassVar[str] = "Any worker, all alike."
    needs_load: ClassVar[bool] = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """All cost the same; the tie is broken at random."""
        return [0.0] * len(candidates.num_requests)


class RoundRobin:
    """See `description`."""

    description: ClassVar[str] = "One worker after the other, in order of worker id."
    needs_load: ClassVar[bool] = False

    def __init__(self) -> None:
        self._turn = 0

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the distance from the worker whose turn it is."""
        count = len(candidates.num_requests)
        turn = self._turn % count
        self._turn += 1
        return [float((place - turn) % count) for place in range(count)]


class LeastLoaded:
    """See `description`."""

    description: ClassVar[str] = "The worker with the fewest requests in flight."
    needs_load: ClassVar[bool] = False

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Cost is the number of requests in flight."""
        return candidates.num_requests


class Kv:
    """Prefill work still to do there plus decode blocks active there, after NVIDIA Dynamo's KV router (August 2025).

    cost = overlap_score_weight x prefill tokens / block size + decode blocks
    """

    description: ClassVar[str] = (
        "Prefill work still to do there plus decode blocks active there; knows who has which prefix cached."
    )
    needs_load: ClassVar[bool] = True

    def __init__(self, overlap_score_weight: float) -> None:
        self._weight = overlap_score_weight

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above, in blocks."""
        weight = self._weight / candidates.block_size
        return [
            weight * tokens + blocks
            for tokens, blocks in zip(candidates.prefill_tokens, candidates.decode_blocks, strict=True)
        ]


ROUTER_MODES: dict[str, type[Random] | type[RoundRobin] | type[LeastLoaded] | type[Kv]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "kv": Kv,
}
"""Every router mode by name; the CLI, the docs and the reports list them from here."""


def choose(costs: Sequence[float], temperature: float, rng: random.Random) -> int:
    """Return the place of the lowest cost, ties broken at random; or draw from a softmax of the range-normalised costs."""
    least = min(costs)
    if temperature > 0 and (span := max(costs) - least) > 0:
        weights = [math.exp(-(cost - least) / span / temperature) for cost in costs]
        return rng.choices(range(len(costs)), weights)[0]
    ties = [place for place, cost in enumerate(costs) if cost == least]
    return ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))]
