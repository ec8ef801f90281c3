"""The least time in which an engine computes a workload, however it forms its steps.

Prompt tokens, answer tokens and the KV tokens that decodes read get prices (s) such that no step takes less than what it
computes costs. Then no mix of steps takes less than the whole work costs. This is the dual of the linear program that
looks for the cheapest mix of steps, so the best prices give the best such bound.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mocker.timing.choose import SimulatedEngine
from mocker.timing.model import Prefill
from reports.record.records import Floats

NUM_PRICES = 24
"""The number of prices that are tried of an answer token, and of a KV token."""
RATIO = 1.5
"""How much larger one size of a step is than the one before.

A time that is constant up to a size between two such and proportional beyond is at most 1.11 times below its price there.
"""


class LeastWork(NamedTuple):
    """What is computed."""

    prompt_tokens: float
    answer_tokens: float
    kv_tokens: float
    """Sum over answer tokens of the context that no other sequence in the batch can share."""


class Prices(NamedTuple):
    """Several choices of prices, each of which is a lower bound of any step (s)."""

    prompt: Floats
    answer: Floats
    kv: Floats

    def least_s(self, work: LeastWork) -> float:
        """Return the least time of a rank for some work."""
        return float((self.prompt * work.prompt_tokens + self.answer * work.answer_tokens + self.kv * work.kv_tokens).max())  # fmt: skip


@functools.lru_cache(maxsize=64)
def prices_of(engine: SimulatedEngine, longest: int) -> Prices:
    """Return the prices of an engine whose sequences have at most this many tokens of context of their own."""
    steps = np.array(list(_steps(engine, longest)))
    seconds, prompt, answer, kv = steps.T
    with np.errstate(divide="ignore", invalid="ignore"):
        most_kv = np.min(np.where(kv > 0, seconds / kv, np.inf))
        found = []
        for of_kv in np.linspace(0.0, most_kv if np.isfinite(most_kv) else 0.0, NUM_PRICES):
            left = seconds - of_kv * kv
            most = max(np.min(np.where(answer > 0, left / answer, np.inf)), 0.0)
            for of_answer in np.linspace(0.0, most, NUM_PRICES):
                of_prompt = np.min(np.where(prompt > 0, (left - of_answer * answer) / prompt, np.inf))
                found.append((of_prompt, of_answer, of_kv))
    return Prices(*np.array([each for each in found if each[0] >= 0]).T)


def _steps(engine: SimulatedEngine, longest: int) -> Iterator[tuple[float, int, int, int]]:
    """Yield the time (s) of steps of many sizes, with their prompt tokens, decodes and KV tokens.

    Prompts attend to as little as they could, because a number of tokens does not say how long their prompts are.
    """
    config, timing = engine.config, engine.timing
    most = min(config.max_num_seqs, config.max_num_active_seqs or config.max_num_seqs)
    usable, knots = engine.num_usable_tokens, timing.knots
    # The most KV grows with the number of decodes until the cache is full.
    full = (usable // longest, -(-usable // longest))
    for num_decodes in (0, *_sizes(most, full + knots.decodes)):
        for num_kv in _kv_sizes(min(num_decodes * longest, usable), knots.kv):
            if num_decodes:
                yield timing.decode(num_decodes, num_kv).first, 0, num_decodes, num_kv
            among = (*knots.tokens, *(knot - num_decodes for knot in knots.tokens))
            for num_tokens in _sizes(config.max_num_batched_tokens - num_decodes, among):
                counts = _sizes(min(num_tokens, max(most - num_decodes, 1)), ratio=4.0)
                prefills = [Prefill(num_tokens, 0, num_tokens / 2, count) for count in counts]
                least_s = min(timing.mixed(prefill, num_decodes, num_kv) for prefill in prefills)
                yield least_s, num_tokens, num_decodes, num_kv


def _kv_sizes(most: int, knots: Iterable[float]) -> list[int]:
    """Return numbers of KV tokens up to this, from none."""
    shares = (most * RATIO**-power for power in range(9))
    return sorted({0, *(round(size) for size in (*shares, *knots) if size <= most)})


def _sizes(most: int, knots: Iterable[float] = (), *, ratio: float = RATIO) -> list[int]:
    """Return sizes from 1 up to this, each at most about `ratio` times as large as the one before, with the knots."""
    if most < 1:
        return []
    count = int(np.ceil(np.log(most) / np.log(ratio))) + 1
    between = {round(knot) for knot in knots if 1 <= knot <= most}
    return sorted({round(size) for size in np.geomspace(1, most, count)} | between)
