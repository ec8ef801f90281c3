"""The command lines of SGLang and TensorRT-LLM for a pool's settings, for step times that are those of such an engine.

Flags are SGLang 0.5.23's (`python -m sglang.launch_server`) and those of TensorRT-LLM 1.x (`trtllm-serve`). What a
setting of ours has no flag for is named beside the command.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dynabench.deployment.description import Pool
from foundation.settings import changed


class Launch(NamedTuple):
    """A command, and the settings that it does not express."""

    words: list[str]
    left_out: list[str]


SGLANG_HAS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len", "num_gpu_blocks",
              "enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy", "async_scheduling", "kv_role")  # fmt: skip
TRTLLM_HAS = ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len", "enable_prefix_caching",
              "enable_chunked_prefill", "kv_role")  # fmt: skip
TRTLLM_OPTIONS = "OPTIONS.yaml"
"""A placeholder for a file of settings that trtllm-serve has no flags for."""


def sglang_command(pool: Pool, quantization: str | None) -> Launch:
    """Return SGLang's command line; the quantization is one that it makes on loading."""
    engine, timing = pool.mocker, pool.timing
    given: dict[str, Any] = {
        "model_path": timing.model or "MODEL",
        "tp_size": timing.tensor_parallel_size,
        "chunked_prefill_size": engine.max_num_batched_tokens if engine.enable_chunked_prefill else -1,
        "max_running_requests": engine.max_num_seqs,
        "page_size": engine.block_size,
        "mem_fraction_static": timing.gpu_memory_utilization,
        "context_length": engine.max_model_len,
        "max_total_tokens": engine.num_gpu_blocks and (engine.num_gpu_blocks - 1) * engine.block_size,
        "ep_size": timing.tensor_parallel_size if timing.enable_expert_parallel else None,
        "quantization": quantization,
        "kv_cache_dtype": {"fp8": "fp8_e4m3", "bfloat16": "bfloat16"}.get(timing.kv_cache_dtype),
        "disable_radix_cache": not engine.enable_prefix_caching,
        "disable_overlap_schedule": engine.async_scheduling is False,
        "enable_priority_scheduling": (is_by_priority := engine.scheduling_policy == "priority"),
        "schedule_low_priority_values_first": is_by_priority,
        "disaggregation_mode": None if pool.role == "aggregated" else pool.role,
        "disaggregation_transfer_backend": None if pool.role == "aggregated" else "nixl",
    }
    return Launch(["python", "-m", "sglang.launch_server", *_flags(given, "-")], _left_out(pool, SGLANG_HAS))


def trtllm_command(pool: Pool, quantization: str | None) -> Launch:
    """Return TensorRT-LLM's command line; it makes no quantization on loading."""
    engine, timing = pool.mocker, pool.timing
    cache: dict[str, Any] = {"tokens_per_block": engine.block_size}
    if not engine.enable_prefix_caching:
        cache["enable_block_reuse"] = False
    if timing.kv_cache_dtype == "fp8":
        cache["dtype"] = "fp8"
    options: dict[str, Any] = {"kv_cache_config": cache}
    if pool.role != "aggregated":
        options["cache_transceiver_config"] = {"backend": "DEFAULT"}
    given = {
        "tp_size": timing.tensor_parallel_size,
        "ep_size": timing.tensor_parallel_size if timing.enable_expert_parallel else None,
        "max_num_tokens": engine.max_num_batched_tokens,
        "max_batch_size": engine.max_num_seqs,
        "max_seq_len": engine.max_model_len,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
        "kv_cache_free_gpu_memory_fraction": timing.gpu_memory_utilization,
        "extra_llm_api_options": TRTLLM_OPTIONS,
    }
    words = ["trtllm-serve", timing.model or "MODEL", *_flags(given, "_")]
    weights = [f"use a checkpoint with {quantization} weights"] if quantization else []
    return Launch(words, [f"{TRTLLM_OPTIONS} has {json.dumps(options)}", *weights, *_left_out(pool, TRTLLM_HAS)])


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
    names = [name for name in changed(pool.mocker) if name not in has]
    return [f"no flag for {', '.join(names)}"] if names else []
