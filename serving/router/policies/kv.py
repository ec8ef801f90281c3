"""`kv` and its variants: NVIDIA Dynamo's routers, which add up prefill work and decode blocks."""

import random
from collections.abc import Sequence
from typing import ClassVar

from mypy_extensions import mypyc_attr

from serving.router.candidates import Candidates
from serving.router.config import RouterConfig
from serving.router.policies.policy import Policy
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
        self._weight = config.kv_overlap_score_weight
        self.needs_overlap = config.kv_overlap_score_weight > 0

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above, in blocks."""
        weight = self._weight / candidates.block_size
        return [
            weight * tokens + blocks
            for tokens, blocks in zip(candidates.prefill_tokens, candidates.decode_blocks, strict=True)
        ]


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
        self._scale = config.prefill_load_scale
        self._credit = config.overlap_score_credit
        self._decay = config.overlap_score_credit_decay

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above, in blocks."""
        size, total = candidates.block_size, candidates.num_prompt_blocks
        queued = [book.prefill_tokens / size for book in candidates.books]
        least = min(queued)
        costs = []
        for queue, on_gpu, overlap, blocks in zip(
            queued, candidates.gpu_blocks, candidates.overlap_blocks, candidates.decode_blocks, strict=True
        ):
            keep = 1 / (1 + self._decay * (queue - least) / total) if self._decay else 1.0
            credit = self._credit * keep * on_gpu + (overlap - on_gpu)
            costs.append(self._scale * max(0.0, queue + total - credit) + blocks)
        return costs


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

    def costs(self, candidates: Candidates) -> Sequence[float]:
        """Score by the formula above."""
        size, total = candidates.block_size, candidates.num_prompt_blocks
        return [
            (book.prefill_tokens / size + total - overlap) * (blocks + 1)
            for book, overlap, blocks in zip(
                candidates.books, candidates.overlap_blocks, candidates.decode_blocks, strict=True
            )
        ]
