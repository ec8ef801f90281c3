"""What speculation costs the scheduler: places in blocks, tokens of the budget, and the last block of a prefix hit.

places of a decode     | known, computed | its own token | drafts ...  | look-ahead ... |
                                                           verified      the drafter writes there
"""

from mocker.vllm.config import EngineConfig


class Speculation:
    """The rules of a method; an engine without speculation has the same ones, with nothing to add."""

    __slots__ = (
        "_limit",
        "drops_last_hit",
        "num_decode_places",
        "num_drafts",
        "num_lookahead",
        "num_read_ahead",
        "num_slots",
    )

    def __init__(self, config: EngineConfig) -> None:
        method, num_drafts = config.speculative_method, config.num_speculative_tokens
        is_on = num_drafts > 0
        self.num_drafts = num_drafts
        """Most drafts of a sequence in a step."""
        self.num_lookahead = num_drafts if config.has_drafter else 0
        """Places after those of a step's tokens: a drafter that has a KV cache writes there."""
        self.num_slots = int(is_on and method == "draft_model")
        """Tokens of the budget that each sequence in a step costs beside its own, for the drafter."""
        self.num_decode_places = 1 + num_drafts + self.num_lookahead if is_on else 0
        """Places that a sequence needs to decode once its prompt is computed, as far as they are counted in advance."""
        self.drops_last_hit = config.drafts_from_states
        """Whether the last block of a prefix hit is computed again: the drafter needs what the model computes there."""
        self.num_read_ahead = int(self.drops_last_hit)
        """Known tokens after those of a step that the drafter reads."""
        self._limit = config.max_model_len

    def num_places(self, num_tokens: int) -> int:
        """Count the places in blocks that a sequence needs for a step that computes its tokens up to this one."""
        num_places = num_tokens + self.num_lookahead
        return num_places if self._limit is None else min(num_places, self._limit)
