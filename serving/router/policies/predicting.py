"""Router modes that predict time from a model of the engines' steps."""

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.candidates import Books, Cached, Candidates, Cost
from serving.router.config import RouterConfig
from serving.router.policies.affinity import rendezvous
from serving.router.policies.policy import Policy, at_least

WINDOW_S = 180.0
"""preble-e2 prices the load of the last three minutes."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Predicting(Policy):
    """A mode that knows the cost of steps, and of fetching KV from beyond the GPU.

    Tp, T0, Td, Tk: seconds a prompt token, a step, a sequence, a context token. F: seconds to fetch KV beyond the GPU.
    """

    usual_interference: ClassVar[float] = 0.1
    usual_osl: ClassVar[int] = 200

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        costs = config.step_costs
        # Numbers; to compiled code, a number times a column would be a number again.
        self._interference: Cost = self.usual_interference if config.interference is None else config.interference
        self._out: Cost = self.usual_osl if config.expected_osl is None else config.expected_osl
        self._base: Cost = costs.base_s
        self._token: Cost = costs.prefill_token_s
        self._sequence: Cost = costs.decode_sequence_s
        self._context: Cost = costs.context_token_s
        self._budget: Cost = costs.budget_tokens
        self._fetch = config.fetch_costs

    def ttft(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Predict the TTFT at a rank (s): F + Tp (Q + miss) + s (T0 + Td d + Tk C), s = ceil((Q + miss) / (budget - d))."""
        size = asked.block_size
        decoding: Cost = books.num_decoding
        tokens: Cost = books.prefill_tokens + asked.prompt.num_tokens - cached.matched * size
        steps = at_least(-(-tokens // at_least(self._budget - decoding, 1)), 1)
        each: Cost = self._base + self._sequence * decoding + self._context * books.context_tokens
        ttft: Cost = self._token * tokens + steps * each
        return ttft if cached.beyond_gpu is None else ttft + size * cached.beyond_gpu.times(self._fetch)


@mypyc_attr(allow_interpreted_subclasses=True)
class Jspt(Predicting):
    """Join the shortest predicted TTFT."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "Shortest predicted TTFT: F + Tp (Q + miss) + s (T0 + Td d + Tk C)."

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above."""
        return self.ttft(asked, books, cached)


@mypyc_attr(allow_interpreted_subclasses=True)
class Marginal(Predicting):
    """The least increase of everyone's latency: our own rule (docs/routing-study.md)."""

    shares_in_flight: ClassVar[bool] = True

    description: ClassVar[str] = (
        "Least added latency for all: predicted TTFT + alpha Tp miss d + E[out] (Tk K + Td n) + e (Tp L + s T0); our own "
        "rule. m counts blocks of requests in flight, never the last token."
    )

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """The request's TTFT, the delay of running decodes by its prefill, and its decode time in that batch.

        An equal prompt in flight costs as much as computing it. So a burst of equal prompts is spread, however much
        of them one rank has cached.
        """
        length, blocks = asked.prompt.num_tokens, asked.prompt.blocks
        miss: Cost = length - cached.matched * asked.block_size
        equal = self._token * length + self._base * -(-length // self._budget)
        cost: Cost = self.ttft(asked, books, cached) + self._interference * self._token * miss * books.num_decoding
        cost += self._out * (self._context * books.prompt_tokens + self._sequence * books.num_requests)
        cost += equal * books.num_equal(blocks, length)
        return cost


@mypyc_attr(allow_interpreted_subclasses=True)
class MarginalAll(Marginal):
    """Marginal, plus the cost of the answer's tokens to the requests there (docs/routing-study.md)."""

    usual_interference: ClassVar[float] = 0.2
    usual_osl: ClassVar[int] = 50

    description: ClassVar[str] = (
        "marginal + half E[out] n (Tk L + Td): also what this request's decoding costs the others; our own rule."
    )

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Requests there have half their answers left on average, and their steps also read this request's context."""
        each = self._out / 2 * (self._context * asked.prompt.num_tokens + self._sequence)
        return super().cost(asked, books, cached) + each * books.num_requests


@mypyc_attr(allow_interpreted_subclasses=True)
class DualMap(Predicting):
    """DualMap (arXiv 2602.06502)."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = (
        "Two workers by hashes of the first blocks; the one with more cached, unless its predicted TTFT > SLO: then the sooner."
    )

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score the two; the others cost infinity."""
        scores = rendezvous(candidates.key(self._config.prefix_key_tokens), candidates.slots)
        first, *others = sorted(range(len(scores)), key=scores.__getitem__)[:2]
        second = others[0] if others else first
        overlaps, ttfts = candidates.overlap_blocks, candidates.each(self.ttft)
        better = first if overlaps[first] >= overlaps[second] else second
        if ttfts[better] > self._config.ttft_slo_s:
            better = first if ttfts[first] <= ttfts[second] else second
        costs = [math.inf] * len(scores)
        costs[first] = costs[second] = 1.0
        costs[better] = 0.0
        return costs


@mypyc_attr(allow_interpreted_subclasses=True)
class PrebleE2(Predicting):
    """Preble's exploitation and exploration (ICLR '25), its load kept per request instead of per tree node."""

    needs_state: ClassVar[bool] = True

    herds: ClassVar[bool] = True

    description: ClassVar[str] = (
        "Preble: if more is cached than not, least loaded of those that have it (not if > 1.5 x the idlest); "
        "else least of load in the last 3 min + eviction cost + miss + F."
    )

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._window: deque[tuple[float, int, float, float, int]] = deque()
        self._work: dict[int, float] = {}
        self._missed = 0.0
        self._asked = 0

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the rule above: load is the prefill time routed there in the window plus decode time in flight."""
        self._forget(candidates.now)
        overlaps, missing = candidates.overlap_blocks, candidates.missing_tokens
        decode_s = self._base + self._sequence
        loads = [
            self._work.get(slot, 0.0) + book.num_requests * self._out * decode_s
            for slot, book in zip(candidates.slots, candidates.books, strict=True)
        ]
        most = max(overlaps)
        is_cached = 2 * most * candidates.block_size > candidates.prompt.num_tokens
        having = [load if overlap == most else math.inf for load, overlap in zip(loads, overlaps, strict=True)]
        if is_cached and min(having) <= 1.5 * max(min(loads), decode_s):
            return having
        # Blocks that a full cache must evict for this prompt are recomputed at the rate at which prompts miss.
        miss_rate = self._missed / self._asked if self._asked else 1.0
        return [
            load + self._token * miss * (1 + (1 - miss_rate) * usage) + fetch
            for load, miss, usage, fetch in zip(
                loads, missing, candidates.kv_usages, candidates.fetch_s(self._fetch), strict=True
            )
        ]

    def routed(self, candidates: Candidates, place: int) -> None:
        """Add it to the window."""
        slot, miss = candidates.slots[place], candidates.missing_tokens[place]
        work, tokens = self._token * miss, candidates.prompt.num_tokens
        self._window.append((candidates.now, slot, work, miss, tokens))
        self._work[slot] = self._work.get(slot, 0.0) + work
        self._missed += miss
        self._asked += tokens

    def _forget(self, now: float) -> None:
        window = self._window
        while window and window[0][0] <= now - WINDOW_S:
            _, slot, work, miss, tokens = window.popleft()
            self._work[slot] -= work
            self._missed -= miss
            self._asked -= tokens
