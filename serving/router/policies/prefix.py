"""Router modes that weigh the prefix against the load, after routers in use and papers, which each mode names."""

import math
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.books import RankBooks
from serving.router.candidates import Books, Cached, Candidates, Cost
from serving.router.order import Standing
from serving.router.policies.policy import Policy
from serving.router.tiers import PerTier


@mypyc_attr(allow_interpreted_subclasses=True)
class Lmetric(Policy):
    """LMetric (arXiv 2603.15202)."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "LMetric: prefill tokens to compute there times requests there: (Q + miss) (n + 1)."

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above."""
        tokens: Cost = books.prefill_tokens + asked.prompt.num_tokens - cached.matched * asked.block_size
        return tokens * (books.num_requests + 1)


@mypyc_attr(allow_interpreted_subclasses=True)
class LmetricNew(Policy):
    """SGLang's port of LMetric, without the queue."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "SGLang's lmetric: this request's uncached tokens times requests there: miss (n + 1)."

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above."""
        return (asked.prompt.num_tokens - cached.matched * asked.block_size) * (books.num_requests + 1)


@mypyc_attr(allow_interpreted_subclasses=True)
class Llumnix(Policy):
    """Llumnix, cache-aware metric (2026)."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "Llumnix: fewest prefill tokens to compute there, then fewest requests: (Q + miss, n)."

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """The second term only breaks ties of the first, which is whole."""
        tokens: Cost = books.prefill_tokens + asked.prompt.num_tokens - cached.matched * asked.block_size
        return tokens + books.num_requests * 1e-6

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """The load is (Q, n)."""
        return books.prefill_tokens + books.num_requests * 1e-6, books.prefill_tokens, books.num_requests


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixLongest(Policy):
    """Overlap alone."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "Longest cached prefix, then fewest requests: the known-bad baseline, (-m, n)."

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above."""
        return books.num_requests * 1e-6 - cached.matched

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """The load is n."""
        return books.num_requests * 1e-6, books.num_requests


@mypyc_attr(allow_interpreted_subclasses=True)
class SglCacheAware(Policy):
    """SGLang's model gateway, cache_aware.rs."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = (
        "SGLang: n if max n - min n > 64 and max n > 1.5 min n; else longest prefix if it covers > 30%; else n."
    )

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the rule above."""
        requests = candidates.num_requests
        most, least = max(requests), min(requests)
        covered = max(candidates.overlap_blocks) * candidates.block_size / candidates.prompt.num_tokens
        if (most - least > 64 and most > 1.5 * least) or covered <= 0.3:
            return requests
        return [-overlap for overlap in candidates.overlap_blocks]


@mypyc_attr(allow_interpreted_subclasses=True)
class AibrixPrefix(Policy):
    """AIBrix, prefix_cache.go: X = 8, f = 1 (the code's values, not the README's)."""

    description: ClassVar[str] = (
        "AIBrix: least-loaded if max n - min n > 8; else best match with n <= mean + sigma; else least requests."
    )

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the rule above."""
        requests, overlaps = candidates.num_requests, candidates.overlap_blocks
        if max(requests) - min(requests) > 8:
            return requests
        mean = sum(requests) / len(requests)
        limit = mean + math.sqrt(sum((n - mean) ** 2 for n in requests) / len(requests))
        matches = [
            n * 1e-6 - overlap if overlap and n <= limit else math.inf
            for overlap, n in zip(overlaps, requests, strict=True)
        ]
        return matches if min(matches) < math.inf else requests


@mypyc_attr(allow_interpreted_subclasses=True)
class ProdstackLoadaware(Policy):
    """vLLM production-stack's loadaware (PR 1035), beta = 1."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = (
        "vLLM production-stack: highest m B / L - (n - mean n) / max(1, mean n); costs are its negation."
    )

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above."""
        requests = candidates.num_requests
        mean = sum(requests) / len(requests)
        share = candidates.block_size / candidates.prompt.num_tokens
        return [
            (n - mean) / max(1.0, mean) - overlap * share
            for overlap, n in zip(candidates.overlap_blocks, requests, strict=True)
        ]


@mypyc_attr(allow_interpreted_subclasses=True)
class LlmdWeighted(Policy):
    """llm-d's scorers with its sample weights: prefix 2, KV usage 1, queue 1."""

    # It knows the GPU and host memory (`cpu`); blocks of other tiers count in full.
    tier_weights = PerTier(0.8, 1.0, 1.0)
    needs_state: ClassVar[bool] = True

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "llm-d: highest 2 m / R + (1 - u) + (max q - q) / (max q - min q); costs its negation."

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above; equal queues all score 1."""
        waiting = candidates.num_waiting
        most, span = max(waiting), max(waiting) - min(waiting)
        return [
            -(2 * share + (1 - usage) + ((most - q) / span if span else 1.0))
            for share, usage, q in zip(candidates.hit_shares, candidates.kv_usages, waiting, strict=True)
        ]


@mypyc_attr(allow_interpreted_subclasses=True)
class Eldr(Policy):
    """ELDR (arXiv 2607.00466), tau = 0.1."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "ELDR: fewest requests among workers with m / R >= max m / R - 0.1."

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the rule above."""
        shares = candidates.hit_shares
        least = max(shares) - 0.1
        return [
            float(book.num_requests) if share >= least else math.inf
            for share, book in zip(shares, candidates.books, strict=True)
        ]
