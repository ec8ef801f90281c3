"""How many requests a second an engine can serve within limits, computed from the duration of its steps.

The searches are those of NVIDIA Dynamo 1.6's planner, for one rank. They find the batch size with the most requests a
second among those that keep the limits, or among all if none does. More than 128 sizes are thinned out evenly. Every
request has the mean lengths, and a step produces one token for each.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

MAX_CANDIDATES = 128
MAX_HIT_SHARE = 0.95


class StepTimes(Protocol):
    """How long a step takes."""

    def step_s(
        self, prefill_tokens: int, num_decodes: int = 0, num_kv_tokens: int = 0, *, context_tokens: int = 0
    ) -> float:
        """Return the duration of a step (s).

        Args:
            prefill_tokens: prompt tokens that it computes.
            num_decodes: requests for which it produces a token each.
            num_kv_tokens: the total context of those.
            context_tokens: tokens of the same request before the prompt tokens that it computes.
        """
        ...


class RequestShape(NamedTuple):
    """The mean request."""

    isl: float
    """Prompt tokens."""
    osl: float = 1.0
    """Output tokens."""
    hit_share: float = 0.0
    """Share of the prompt tokens that is cached."""

    @property
    def num_computed(self) -> int:
        """Prompt tokens to compute."""
        return max(1, math.ceil(self.isl * (1 - min(max(self.hit_share, 0.0), MAX_HIT_SHARE))))

    @property
    def num_cached(self) -> int:
        """Prompt tokens that need not be computed."""
        return max(0, math.ceil(self.isl) - self.num_computed)

    def is_near(self, other: "RequestShape", share: float) -> bool:
        """Return whether another shape has nearly the same prompt tokens to compute, output tokens and context."""
        pairs = zip(
            (self.num_computed, self.osl, self.context), (other.num_computed, other.osl, other.context), strict=True
        )
        return all(abs(mine - its) <= share * mine for mine, its in pairs)

    @property
    def context(self) -> int:
        """Tokens of a request half-way through its answer."""
        return max(1, int(self.isl) + int(self.osl) // 2)


class Capacity(NamedTuple):
    """What an engine can do at its best batch size."""

    batch: int
    """Requests at once."""
    rps: float
    """Requests a second."""
    ttft_s: float | None
    itl_s: float | None
    is_within: bool
    """Whether the limits are kept."""


def prefill_capacity(
    times: StepTimes, shape: RequestShape, *, max_num_seqs: int, max_num_batched_tokens: int, ttft_s: float
) -> Capacity:
    """Return what an engine that computes prompts can do."""
    most = min(max_num_seqs, max_num_batched_tokens // shape.num_computed)
    found = []
    for batch in _candidates(max(1, most)):
        taken = prefill_s(times, batch * shape.num_computed, max_num_batched_tokens, context_tokens=shape.num_cached)
        found.append(Capacity(batch, batch / taken, taken, None, taken <= ttft_s))
    return _best(found)


def decode_capacity(
    times: StepTimes, shape: RequestShape, *, max_num_seqs: int, max_kv_tokens: int, itl_s: float
) -> Capacity | None:
    """Return what an engine that decodes can do; None if not one request fits."""
    found = []
    for batch in _candidates(min(max_num_seqs, max_kv_tokens // shape.context)):
        itl = times.step_s(0, batch, batch * shape.context)
        found.append(Capacity(batch, batch / (shape.osl * itl), None, itl, itl <= itl_s))
    return _best(found) if found else None


def aggregated_capacity(
    times: StepTimes,
    shape: RequestShape,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_kv_tokens: int,
    ttft_s: float,
    itl_s: float,
) -> Capacity | None:
    """Return what an engine that does both can do; None if no batch leaves enough room for prompts."""
    found = []
    for batch in _candidates(min(max_num_seqs, max_kv_tokens // shape.context, max_num_batched_tokens - 1)):
        tokens = prefill_per_step(shape, batch)
        if tokens > max_num_batched_tokens - batch:
            continue
        kv = batch * shape.context
        itl = times.step_s(tokens, batch, kv)
        ttft = prefill_s(
            times, tokens + shape.num_computed, max_num_batched_tokens, num_decodes=batch, num_kv_tokens=kv
        )
        is_within = ttft <= ttft_s and itl <= itl_s
        found.append(Capacity(batch, batch / (shape.osl * itl), ttft, itl, is_within))
    return _best(found) if found else None


def prefill_per_step(shape: RequestShape, batch: int) -> int:
    """Return the prompt tokens that each step must compute to replace the requests that end with new ones."""
    return math.ceil(batch * shape.num_computed / max(1.0, shape.osl))


def prefill_s(
    times: StepTimes,
    tokens: int,
    max_num_batched_tokens: int,
    *,
    num_decodes: int = 0,
    num_kv_tokens: int = 0,
    context_tokens: int = 0,
) -> float:
    """Return how long prompt tokens of one request, or of several that fit a step, take to compute, chunk by chunk (s)."""
    taken, done = 0.0, 0
    while done < tokens:
        chunk = min(max_num_batched_tokens, tokens - done)
        taken += times.step_s(chunk, num_decodes, num_kv_tokens, context_tokens=context_tokens + done)
        done += chunk
    return taken


def drain_s(
    times: StepTimes, tokens: float, max_num_batched_tokens: int, *, num_decodes: int = 0, num_kv_tokens: int = 0
) -> float:
    """Return how long a queue of prompt tokens of many requests takes to compute, chunk by chunk (s)."""
    full, rest = divmod(math.ceil(tokens), max_num_batched_tokens)
    taken = full * times.step_s(max_num_batched_tokens, num_decodes, num_kv_tokens) if full else 0.0
    return taken + (times.step_s(rest, num_decodes, num_kv_tokens) if rest else 0.0)


def _candidates(most: int) -> Iterator[int]:
    """Yield batch sizes up to the largest."""
    if most <= MAX_CANDIDATES:
        yield from range(1, most + 1)
        return
    for place in range(MAX_CANDIDATES):
        yield 1 + place * (most - 1) // (MAX_CANDIDATES - 1)


def _best(found: list[Capacity]) -> Capacity:
    return max(found, key=lambda each: (each.is_within, each.rps))
