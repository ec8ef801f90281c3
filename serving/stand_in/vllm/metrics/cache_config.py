"""The labels of `vllm:cache_config_info`: vLLM's cache settings, as Python writes them."""

from collections.abc import Mapping
from typing import Any

from serving.engines.mock.rank import MockEngine
from serving.stand_in.vllm.flags.arguments import arguments

OF_ARGUMENTS = (
    "enable_mamba_shared_prefix_checkpoint",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "kv_cache_memory_bytes",
    "kv_offloading_backend",
    "kv_offloading_size",
    "kv_sharing_fast_prefill",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
    "num_gpu_blocks_override",
    "prefix_cache_retention_interval",
    "prefix_caching_hash_algo",
    "prefix_match_unit",
    "replayssm_buffer_len",
    "swa_bounded_replay",
    "use_replayssm",
)
"""Arguments of vLLM that are labels."""

RENAMED = {"kv_cache_dtype": "cache_dtype"}
"""Those whose label has another name."""

OTHERS = {
    "_block_size_resolved": "True",
    "cache_hit_alignment_tokens": "None",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_layout": "None",
    "mamba_page_size_padded": "None",
    "num_cpu_blocks": "None",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "use_kda_recoverssm": "False",
}
"""Labels that no argument sets."""


def num_gpu_blocks(rank: MockEngine) -> int:
    """Return the KV blocks of a rank as vLLM counts them: with the null block, which holds nothing."""
    return rank.num_blocks + 1


def cache_config_labels(
    given: Mapping[str, Any], *, block_size: int, num_blocks: int, max_model_len: int, enable_prefix_caching: bool
) -> dict[str, str]:
    """Return the labels of an engine's cache.

    Args:
        given: the arguments that are not at their defaults, by vLLM's names.
        block_size: tokens in a KV block.
        num_blocks: KV blocks, the null block included.
        max_model_len: the longest sequence.
        enable_prefix_caching: whether prefixes are cached.
    """
    num_tokens = num_blocks * block_size
    values = {name: given.get(name, arguments()[name].default) for name in OF_ARGUMENTS}
    return (
        OTHERS
        | {RENAMED.get(name, name): str(value) for name, value in values.items()}
        | {
            "block_size": str(block_size),
            "effective_attention_block_size": str(block_size),
            "enable_prefix_caching": str(enable_prefix_caching),
            "kv_cache_max_concurrency": str(num_tokens / max_model_len),
            "kv_cache_size_tokens": str(num_tokens),
            "num_gpu_blocks": str(num_blocks),
            "user_specified_block_size": str("block_size" in given),
        }
    )
