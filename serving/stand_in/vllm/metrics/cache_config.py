"""The labels of `vllm:cache_config_info`: vLLM's cache settings, as Python writes them."""

from collections.abc import Mapping
from typing import Any

DEFAULTS = {
    "_block_size_resolved": "True",
    "block_size": "16",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "effective_attention_block_size": "16",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_max_concurrency": "None",
    "kv_cache_memory_bytes": "None",
    "kv_cache_size_tokens": "None",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}
"""Each label, with its value before anything is known."""

ARGUMENTS = {"kv_cache_dtype": "cache_dtype"}
"""Arguments of vLLM whose label has another name."""


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
    said = {ARGUMENTS.get(name, name): str(value) for name, value in given.items()}
    num_tokens = num_blocks * block_size
    return (
        DEFAULTS
        | {name: value for name, value in said.items() if name in DEFAULTS}
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
