"""What decides how an engine's groups of layers keep KV."""

from dataclasses import dataclass
from typing import NamedTuple

from mocker.models.kv_groups import LayerKv


class GroupKv(NamedTuple):
    """One group."""

    layer: LayerKv
    """What its layers keep."""
    block_size: int
    """Tokens in a block."""
    drops_last: bool = False
    """Whether the last block of a hit is computed again, because drafts are made from hidden states of its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Those of all groups."""

    groups: tuple[GroupKv, ...]
    block_size: int
    """Tokens in a block as the engine was asked for it; states are computed where such blocks end."""
    max_model_len: int
    num_in_flight: int
    """Most tokens that the steps in flight at once compute."""
    enable_prefix_caching: bool = True
    retention_interval: int = 0
    """Tokens between places at which later hits may end, beside the ends of prompts (0: none; -1: everywhere)."""
    num_drafts: int = 0
    """Drafts of an iteration (`num_speculative_tokens`)."""
    num_lookahead: int = 0
    """Slots beyond an iteration's tokens, which the drafter fills."""
    drops_last: bool = False
    """Whether any group drops the last block of a hit."""
    counts_last_state_again: bool = True
    """vLLM 0.32: the last state of a prompt cannot be used in the step after the one that computes it, either."""
