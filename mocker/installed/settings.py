"""The settings of an installed scheduler, and what it is not asked to do yet."""

from typing import Any

from mocker.contract import EngineSettings
from mocker.sglang.config import SglangConfig
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


AS_IN_SGLANG = (
    "page_size",
    "context_length",
    "max_prefill_tokens",
    "prefill_max_requests",
    "enable_mixed_chunk",
    "prefill_decode_interval",
    "prefill_decode_interval_min_bs",
    "schedule_policy",
    "schedule_conservativeness",
    "enable_priority_scheduling",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "priority_scheduling_preemption_threshold",
    "retraction_policy",
    "disable_radix_cache",
    "radix_eviction_policy",
    "decode_log_interval",
)


def vllm_settings(config: EngineConfig, num_blocks: int, *, kv_events: bool) -> dict[str, Any]:
    """Return the settings with which vLLM's scheduler does what ours does with these."""
    return {name: getattr(config, name) for name in AS_THEY_ARE} | {
        "num_gpu_blocks": num_blocks,
        "max_model_len": config.max_model_len or (num_blocks + 1) * config.block_size,  # beyond what fits
        "async_scheduling": config.is_async,
        "max_loras": config.max_loras if config.enable_lora else 0,
        "kv_events": kv_events and config.enable_prefix_caching,
    }


def sglang_settings(config: SglangConfig, num_pages: int, *, kv_events: bool) -> dict[str, Any]:
    """Return the same for SGLang's, by its names and those of `dynabench.fidelity.sglang.recordings.OURS`."""
    num_tokens = num_pages * config.page_size
    return {name: getattr(config, name) for name in AS_IN_SGLANG} | {
        "max_total_tokens": num_tokens,
        "context_length": config.context_length or num_tokens,
        "chunked_prefill_size": config.chunk_size or -1,
        "max_running_requests": config.num_rows(num_tokens),
        "overlap": config.is_async,
        "decay_steps": config.new_token_ratio_decay_steps,
        "clip": config.clip_max_new_tokens_estimation,
        "kv_events": kv_events,
    }


def why_not_installed(
    config: EngineSettings, *, has_host: bool, has_layout: bool, num_stages: int, num_ranks: int
) -> str | None:
    """Return why no installed scheduler can take the place of ours, None if it can."""
    parts = {
        "KV in host memory": has_host,
        "layers that keep windows or states": has_layout,
        "a pipeline of stages": num_stages > 1,
        "attention data parallelism": num_ranks > 1,
        "KV from or for other engines": config.kv_role is not None,
    }
    match config:
        case EngineConfig():
            parts["images and other media"] = config.has_encoder
        case SglangConfig():
            parts["scheduler_recv_interval above 1"] = config.scheduler_recv_interval > 1
            parts["max_queued_requests"] = config.max_queued_requests is not None
        case _:
            return (
                "engine_core applies to engine_type vllm and sglang; the schedulers of other engines cannot be run yet"
            )
    return next(
        (f"{part} cannot be simulated with an installed scheduler yet" for part, is_on in parts.items() if is_on), None
    )
