"""`kv` and its variants: NVIDIA Dynamo's routers, which add up prefill work and decode blocks."""

import random
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.books import RankBooks
from serving.router.candidates import Books, Cached, Candidates, Cost
from serving.router.config import RouterConfig
from serving.router.order import Standing
from serving.router.policies.policy import Policy, at_least
from serving.router.tiers import PerTier


@mypyc_attr(allow_interpreted_subclasses=True)
class Kv(Policy):
    """NVIDIA Dynamo's KV router of August 2025."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = (
        "Prefill work still to do there plus decode blocks active there: weight (Q + miss) / B + A + R - a."
    )

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self.tier_weights = config.hit_weights
        self._weight: Cost = config.kv_overlap_score_weight
        self.needs_overlap = config.kv_overlap_score_weight > 0

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above, in blocks."""
        size = asked.block_size
        tokens: Cost = books.prefill_tokens + asked.prompt.num_tokens - cached.matched * size
        return self._weight / size * tokens + _decode_blocks(asked, books)

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """The load is weight Q / B + A."""
        load: Cost = self._weight / block_size * books.prefill_tokens + books.decode_blocks
        return load, books.prefill_tokens, books.decode_blocks


@mypyc_attr(allow_interpreted_subclasses=True)
class KvTiered(Kv):
    """The same, with weights derived from times."""

    description: ClassVar[str] = (
        "kv where a block beyond the GPU counts for the share of its computation that is saved: 1 - load time / prefill time."
    )

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        prefill_s = config.step_costs.prefill_token_s
        self.tier_weights = PerTier(
            *[max(1 - load_s / prefill_s, 0.0) if prefill_s else 0.0 for load_s in config.fetch_costs]
        )


@mypyc_attr(allow_interpreted_subclasses=True)
class DynamoKv(Policy):
    """NVIDIA Dynamo's KV router of 2026 (lib/kv-router selector/default.rs)."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = (
        "NVIDIA Dynamo 2026: P max(0, Q / B + R - c k m) + A + R - a, k = 1 / (1 + decay (Q - min Q) / B / R); "
        "c k is for blocks on the GPU."
    )

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self.tier_weights = config.hit_weights
        self._scale: Cost = config.prefill_load_scale
        self._credit: Cost = config.overlap_score_credit
        self._decay: Cost = config.overlap_score_credit_decay
        self._least: Cost = 0.0  # min Q / B

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """The queue of a rank counts as what it has more than the shortest."""
        if self._decay:
            self._least = min(book.prefill_tokens for book in candidates.books) / candidates.block_size
        return candidates.each(self.cost)

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above, in blocks."""
        queue: Cost = books.prefill_tokens / asked.block_size
        total = asked.num_prompt_blocks
        keep: Cost = 1 / (1 + self._decay * (queue - self._least) / total) if self._decay else 1.0
        credit: Cost = self._credit * keep * cached.on_gpu + (cached.matched - cached.on_gpu)
        return self._scale * at_least(queue + total - credit, 0.0) + _decode_blocks(asked, books)

    def standing(self, books: RankBooks, block_size: int) -> Standing | None:
        """The load is P Q / B + A, unless credits depend on the shortest queue."""
        if self._decay:
            return None
        load: Cost = self._scale * (books.prefill_tokens / block_size) + books.decode_blocks
        return load, books.prefill_tokens, books.decode_blocks


@mypyc_attr(allow_interpreted_subclasses=True)
class DynamoKvP8(DynamoKv):
    """The same with P = 8."""

    description: ClassVar[str] = "dynamo-kv with P = 8, which keeps long prompts where their prefix is."

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._scale = 8.0


@mypyc_attr(allow_interpreted_subclasses=True)
class DynamoLmetric(Policy):
    """NVIDIA Dynamo's `router_selection_policy=lmetric`."""

    herds: ClassVar[bool] = True

    description: ClassVar[str] = "NVIDIA Dynamo's lmetric: (Q / B + R - m) (A + R - a + 1)."

    def __init__(self, config: RouterConfig, rng: random.Random) -> None:
        super().__init__(config, rng)
        self.tier_weights = config.hit_weights

    def cost(self, asked: Candidates, books: Books, cached: Cached) -> Cost:
        """Score by the formula above."""
        queue: Cost = books.prefill_tokens / asked.block_size
        return (queue + asked.num_prompt_blocks - cached.matched) * (_decode_blocks(asked, books) + 1)


def _decode_blocks(asked: Candidates, books: Books) -> Cost:
    """A + R - a: blocks of requests in flight, this one's included."""
    return books.decode_blocks + asked.num_held_blocks - books.num_active_blocks(asked.prompt.blocks)
