"""Which decode rank computes a prompt itself, although there are ranks that only prefill."""

from collections.abc import Sequence

from dynabench.virtual.rank import Rank
from dynabench.virtual.routing import Routing
from serving.life import DisaggregationConfig
from serving.life.bypass import bypasses
from serving.router import Prompt


def bypassing_slot(
    config: DisaggregationConfig,
    prompt: Prompt,
    output_length: int,
    *,
    decode: Routing,
    prefill: Routing,
    ranks: Sequence[Rank],
    block_size: int,
) -> int | None:
    """Return the slot of the decode rank that should compute this prompt itself, or None.

    Raises:
        NoWorkersError: there is no rank that decodes, or none that prefills.
    """
    there, here = decode.peek(prompt, output_length), prefill.peek(prompt, 1)
    engine = ranks[there.slot].engine
    needed = -(-prompt.num_tokens // block_size) - there.gpu_blocks
    is_bypassed = bypasses(
        config,
        num_tokens=prompt.num_tokens,
        num_cached=there.overlap_blocks * block_size,
        prefill_tokens=prefill.router.load(here.slot).prefill_tokens,
        decode_usage=(engine.num_blocks - engine.num_free_blocks + needed) / engine.num_blocks,
    )
    return there.slot if is_bypassed else None
