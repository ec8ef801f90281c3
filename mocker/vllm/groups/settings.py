"""What decides how an engine's groups of layers keep KV."""

from dataclasses import dataclass
from typing import NamedTuple

from mocker.models.kv_groups import KvLayout, LayerKv
from mocker.position import NEVER
from mocker.vllm.config import EngineConfig
from mocker.vllm.speculation import Speculation


class GroupKv(NamedTuple):
    """One group."""

    layer: LayerKv
    """What its layers keep."""
    block_size: int
    """Tokens in a block."""
    drops_last: bool
    """Whether the last block of a hit is computed again, because drafts are made from hidden states of its layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Those of all groups."""

    groups: tuple[GroupKv, ...]
    unit: int
    """Tokens in a block of a chain: what has a name."""
    max_model_len: int
    num_in_flight: int
    """Most tokens that the steps in flight at once compute."""
    most_at_once: int
    """Most tokens that a step computes of one sequence."""
    enable_prefix_caching: bool
    retention_interval: int | None
    """Tokens between places at which later hits may end, beside the ends of prompts (0: none; None: everywhere)."""
    num_drafts: int
    """Drafts of an iteration (`num_speculative_tokens`)."""
    num_lookahead: int
    """Slots beyond an iteration's tokens, which the drafter fills."""
    drops_last: bool
    """Whether any group drops the last block of a hit."""
    counts_last_state_again: bool
    """vLLM 0.32: the last state of a prompt cannot be used in the step after the one that computes it, either."""


def group_settings(config: EngineConfig, layout: KvLayout, *, num_batches: int) -> GroupSettings:
    """Return what an engine's settings mean for its groups, if so many batches are in flight at once.

    Raises:
        ValueError: the engine shares KV with others or keeps it in host memory, which is not known for several groups.
    """
    if config.kv_role is not None or config.has_host_memory:
        name = "kv_role" if config.kv_role is not None else "host memory for KV"
        raise ValueError(
            f"{name} is set, and the model's layers keep KV in {len(layout.groups)} groups ({layout.summary}); expected an "
            "engine on its own: transfers of several groups are not simulated"
        )
    speculation = Speculation(config)
    # With the token after a block in its name, no hit is dropped; without prefix caching, there is none.
    drops_last = speculation.drops_last_hit and not config.rules.hashes_look_ahead
    budget, threshold = config.max_num_batched_tokens, config.long_prefill_token_threshold
    return GroupSettings(
        groups=tuple(_groups(layout, config, drops_last=drops_last)),
        unit=config.block_size,
        max_model_len=config.max_model_len or NEVER,
        num_in_flight=budget * num_batches,
        most_at_once=min(budget, threshold) if threshold else budget,
        enable_prefix_caching=config.enable_prefix_caching,
        retention_interval=config.prefix_cache_retention_interval,
        num_drafts=speculation.num_drafts,
        num_lookahead=speculation.num_lookahead if speculation.num_drafts else 0,
        drops_last=drops_last,
        counts_last_state_again=not config.rules.counts_state_once,
    )


def _groups(layout: KvLayout, config: EngineConfig, *, drops_last: bool) -> list[GroupKv]:
    """Return the groups; with MTP only those like the first that keeps all tokens drop a block, which the drafter belongs to."""
    full = next((group.layer for group in layout.groups if group.layer.is_full), None)
    is_one = config.speculative_method == "mtp" and full is not None
    return [
        GroupKv(group.layer, group.block_size, drops_last and (group.layer == full or not is_one))
        for group in layout.groups
    ]
