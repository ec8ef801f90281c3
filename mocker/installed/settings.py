"""The settings of an installed scheduler, and what it is not asked to do yet."""

from typing import Any

from mocker.contract import EngineSettings
from mocker.vllm.config import EngineConfig

AS_THEY_ARE = (
    "block_size",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
    "watermark",
    "scheduler_reserve_full_isl",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "prefill_schedule_interval",
    "num_speculative_tokens",
    "speculative_method",
)


def installed_settings(config: EngineConfig, num_blocks: int, *, kv_events: bool) -> dict[str, Any]:
    """Return the settings with which an installed scheduler does what ours does with these."""
    return {name: getattr(config, name) for name in AS_THEY_ARE} | {
        "num_gpu_blocks": num_blocks,
        "max_model_len": config.max_model_len or (num_blocks + 1) * config.block_size,  # beyond what fits
        "async_scheduling": config.is_async,
        "max_loras": config.max_loras if config.enable_lora else 0,
        "kv_events": kv_events and config.enable_prefix_caching,
    }


def why_not_installed(
    config: EngineSettings, *, has_host: bool, has_layout: bool, num_stages: int, num_ranks: int
) -> str | None:
    """Return why no installed scheduler can take the place of ours, None if it can."""
    if not isinstance(config, EngineConfig):
        return "engine_core applies to engine_type vllm; the schedulers of other engines cannot be run yet"
    parts = {
        "KV in host memory": has_host,
        "layers that keep windows or states": has_layout,
        "a pipeline of stages": num_stages > 1,
        "attention data parallelism": num_ranks > 1,
        "images and other media": config.has_encoder,
        "KV from or for other engines (kv_role)": config.kv_role is not None,
    }
    return next(
        (f"{part} cannot be simulated with an installed scheduler yet" for part, is_on in parts.items() if is_on), None
    )
