"""The command lines of SGLang and TensorRT-LLM for a pool with the scheduler, or only the step times, of such an engine.

Flags are SGLang 0.5.23's (`python -m sglang.launch_server`) and those of TensorRT-LLM 1.x (`trtllm-serve`). What a
setting of ours has no flag for is named beside the command.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dynabench.deployment.description import Pool
from foundation.settings import changed
from mocker import SglangConfig, TrtllmConfig
from mocker.timing.choose import with_sglang_defaults


class Launch(NamedTuple):
    """A command, and the settings that it does not express."""

    words: list[str]
    left_out: list[str]


SGLANG_SAID = ("chunked_prefill_size", "max_running_requests", "page_size", "mem_fraction_static")
"""Settings that are printed even at their defaults, because SGLang's depend on the GPU."""
SGLANG_VARIABLES = {
    "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "clip_max_new_tokens_estimation": "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
}
"""Settings that SGLang has as variables of the environment."""
SGLANG_HAS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len", "num_gpu_blocks",
              "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy", "async_scheduling", "kv_role")  # fmt: skip
TRTLLM_HAS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len", "num_gpu_blocks",
              "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling", "kv_role")  # fmt: skip
TRTLLM_OPTIONS = "OPTIONS.yaml"
"""A placeholder for a file of settings that trtllm-serve has no flags for."""
TRTLLM_FILE = {
    "enable_block_reuse": "kv_cache_config",
    "kv_cache_max_tokens": "kv_cache_config",
    "capacity_scheduler_policy": "scheduler_config",
    "context_chunking_policy": "scheduler_config",
    "batch_wait_timeout_iters": "",
    "batch_wait_max_tokens_ratio": "",
    "disable_overlap_scheduler": "",
}
"""Settings of that file, and the section to which they belong."""


def sglang_command(pool: Pool, quantization: str | None) -> Launch:
    """Return SGLang's command line; the quantization is one that it makes on loading."""
    timing = pool.timing
    config = with_sglang_defaults(pool.sglang, timing) if pool.engine_type == "sglang" else _as_sglang(pool)
    settings = {name: getattr(config, name) for name in SGLANG_SAID} | changed(config)
    variables = [f"{SGLANG_VARIABLES[name]}={settings.pop(name)}" for name in SGLANG_VARIABLES if name in settings]
    given: dict[str, Any] = {
        "model_path": timing.model or "MODEL",
        "tp_size": timing.tensor_parallel_size,
        **settings,
        "ep_size": timing.tensor_parallel_size if timing.enable_expert_parallel else None,
        "quantization": quantization,
        "kv_cache_dtype": {"fp8": "fp8_e4m3", "bfloat16": "bfloat16"}.get(timing.kv_cache_dtype),
        "disaggregation_mode": None if pool.role == "aggregated" else pool.role,
        "disaggregation_transfer_backend": None if pool.role == "aggregated" else "nixl",
    }
    command = ["python", "-m", "sglang.launch_server", *_flags(given, "-")]
    return Launch(["env", *variables, *command] if variables else command, _left_out(pool, SGLANG_HAS))


def _as_sglang(pool: Pool) -> SglangConfig:
    """Return settings of vLLM as SGLang's, as far as it has them."""
    engine, is_by_priority = pool.mocker, pool.mocker.scheduling_policy == "priority"
    return SglangConfig(
        page_size=engine.block_size,
        max_running_requests=engine.max_num_seqs,
        context_length=engine.max_model_len,
        chunked_prefill_size=engine.max_num_batched_tokens if engine.enable_chunked_prefill else -1,
        mem_fraction_static=pool.timing.gpu_memory_utilization,
        max_total_tokens=engine.num_gpu_blocks and (engine.num_gpu_blocks - 1) * engine.block_size,
        disable_radix_cache=not engine.enable_prefix_caching,
        disable_overlap_schedule=engine.async_scheduling is False,
        enable_priority_scheduling=is_by_priority,
        schedule_low_priority_values_first=is_by_priority,
    )


def trtllm_command(pool: Pool, quantization: str | None) -> Launch:
    """Return TensorRT-LLM's command line; it makes no quantization on loading."""
    timing = pool.timing
    config = pool.trtllm if pool.engine_type == "trtllm" else _as_trtllm(pool)
    given = {
        "tp_size": timing.tensor_parallel_size,
        "ep_size": timing.tensor_parallel_size if timing.enable_expert_parallel else None,
        "max_num_tokens": config.max_num_tokens,
        "max_batch_size": config.max_batch_size,
        "max_seq_len": config.max_seq_len,
        "enable_chunked_prefill": config.enable_chunked_context,
        "kv_cache_free_gpu_memory_fraction": config.kv_cache_free_gpu_memory_fraction,
        "extra_llm_api_options": TRTLLM_OPTIONS,
    }
    words = ["trtllm-serve", timing.model or "MODEL", *_flags(given, "_")]
    file = json.dumps(_trtllm_options(pool, config))
    weights = [f"use a checkpoint with {quantization} weights"] if quantization else []
    unit = [] if config.chunk_unit_size is None else ["no flag for chunk_unit_size"]
    return Launch(words, [f"{TRTLLM_OPTIONS} has {file}", *weights, *unit, *_left_out(pool, TRTLLM_HAS)])


def _trtllm_options(pool: Pool, config: TrtllmConfig) -> dict[str, Any]:
    """Return what the file of settings has."""
    options: dict[str, Any] = {"kv_cache_config": {"tokens_per_block": config.tokens_per_block}}
    for name, value in changed(config).items():
        if name in TRTLLM_FILE:
            section = options.setdefault(TRTLLM_FILE[name], {}) if TRTLLM_FILE[name] else options
            section[name.removeprefix("kv_cache_")] = value
    if pool.timing.kv_cache_dtype == "fp8":
        options["kv_cache_config"]["dtype"] = "fp8"
    if pool.role != "aggregated":
        options["cache_transceiver_config"] = {"backend": "DEFAULT"}
    return options


def _as_trtllm(pool: Pool) -> TrtllmConfig:
    """Return settings of vLLM as TensorRT-LLM's, as far as it has them."""
    engine = pool.mocker
    return TrtllmConfig(
        tokens_per_block=engine.block_size,
        kv_cache_max_tokens=engine.num_gpu_blocks and (engine.num_gpu_blocks - 1) * engine.block_size,
        kv_cache_free_gpu_memory_fraction=pool.timing.gpu_memory_utilization,
        max_batch_size=engine.max_num_seqs,
        max_num_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_model_len,
        enable_chunked_context=engine.enable_chunked_prefill and engine.block_size <= engine.max_num_batched_tokens,
        enable_block_reuse=engine.enable_prefix_caching,
        disable_overlap_scheduler=engine.async_scheduling is False,
    )


def _flags(given: Mapping[str, Any], joint: str) -> Iterator[str]:
    """Yield settings as flags; those that are off or not given are left to the engine."""
    for name, value in given.items():
        flag = f"--{name.replace('_', joint)}"
        if value is True:
            yield flag
        elif value is not None and value is not False:
            yield from (flag, f"{value:g}" if isinstance(value, float) else str(value))


def _left_out(pool: Pool, has: tuple[str, ...]) -> list[str]:
    """Name the settings that were changed and have no flag."""
    names = [name for name in changed(pool.mocker) if name not in has] if pool.engine_type == "vllm" else []
    return [f"no flag for {', '.join(names)}"] if names else []
