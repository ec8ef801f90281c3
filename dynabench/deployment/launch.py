"""The command lines that start the engines of a pool: those of the engine whose scheduler, or at least step times, it has.

Flags are vLLM 0.32's and 0.33's, SGLang 0.5.23's (`python -m sglang.launch_server`) and those of TensorRT-LLM 1.x (`trtllm-serve`).
What a setting of ours has no flag for is named beside the command.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dynabench.deployment.description import Pool
from foundation.settings import changed
from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import OF_SPECULATION
from mocker.models.catalog import find_model, hub_id
from mocker.tiers.config import GIB, OffloadConfig, whole_pages
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.sglang_defaults import with_sglang_defaults
from serving.engines.vllm.tiers import beside


class Launch(NamedTuple):
    """A command, and the settings that it does not express."""

    words: list[str]
    left_out: list[str]


VLLM = {"num_gpu_blocks": "num_gpu_blocks_override", "dp_size": "data_parallel_size"}
"""Engine settings that have another name in vLLM."""
SAID = ("max_num_batched_tokens", "max_num_seqs", "block_size")
"""Settings that are printed even at their defaults, because vLLM's defaults may differ."""
ELSEWHERE_SAID = (
    *("engine_version", "kv_role", "kv_load_failure_policy", *OffloadConfig.__dataclass_fields__),
    *("num_speculative_tokens", *OF_SPECULATION),
    *("max_tokens_per_mm_item", "encoding_ms_per_1000_tokens"),
)
"""Settings that are entries of `kv_transfer_config` or `speculative_config`, that have no flag, or that the model implies."""
DRAFTING_HEAD = "DRAFTING_HEAD"
"""A placeholder for the weights of an EAGLE head."""
OF_CHUNKS = ("blocks_per_chunk", "eviction_policy", "store_threshold", "offload_prompt_only", "sync_load_budget_bytes")
DISK_FOLDER = "KV_FOLDER"
"""A placeholder for a folder on the disk."""
SGLANG_SAID = ("chunked_prefill_size", "max_running_requests", "page_size", "mem_fraction_static")
"""Settings that are printed even at their defaults, because SGLang's depend on the GPU."""
SGLANG_VARIABLES = {
    "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "clip_max_new_tokens_estimation": "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
}
"""Settings that SGLang has as variables of the environment."""
SGLANG_LACKS = ("hicache_bandwidth_gb_s", "hicache_latency_us")
"""Settings of the host that it runs on."""
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
    "enable_attention_dp": "",
    "attention_dp_enable_balance": "attention_dp_config",
    "attention_dp_timeout_iters": "attention_dp_config",
    "attention_dp_batching_wait_iters": "attention_dp_config",
}
"""Settings of that file, and the section to which they belong."""


def engine_command(pool: Pool) -> Launch:
    """Return the command line of the engine whose scheduler a pool has, or at least its step times; else vLLM's."""
    quantization = "fp8" if is_quantized_on_loading(pool.timing) else None
    has_its_times = pool.engine_type == "vllm" and pool.timing.timing_name == "roofline"
    match pool.timing.host_times if has_its_times else pool.engine_type:
        case "sglang":
            return sglang_command(pool, quantization)
        case "trtllm":
            return trtllm_command(pool, quantization)
        case _:
            return Launch(vllm_command(pool), [])


def vllm_command(pool: Pool) -> list[str]:
    """Return the vLLM command line for a pool's settings."""
    engine, timing = pool.mocker, pool.timing
    settings: dict[str, Any] = {"tensor_parallel_size": timing.tensor_parallel_size}
    settings |= {name: getattr(engine, name) for name in SAID} | changed(engine)
    if engine.max_model_len is None:
        settings["max_model_len"] = "auto"  # vLLM refuses a model whose context is longer than its KV cache
    settings |= _of_timing(timing)
    named = [(VLLM.get(name, name), value) for name, value in settings.items() if name not in ELSEWHERE_SAID]
    named += _connectors(pool)
    if engine.num_speculative_tokens:
        named.append(("speculative_config", json.dumps(_speculation(engine))))
    return ["vllm", "serve", _model(timing), *(word for name, value in named for word in _words(name, value))]


def _speculation(engine: EngineConfig) -> dict[str, Any]:
    """Return vLLM's settings of speculative decoding."""
    method = engine.speculative_method
    found = {"method": method, "num_speculative_tokens": engine.num_speculative_tokens}
    if method == "draft_model":
        return found | {"model": hub_id(engine.draft_model or "")}
    return found | {"model": DRAFTING_HEAD} if method in ("eagle", "eagle3") else found


def _of_timing(timing: TimingConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"gpu_memory_utilization": timing.gpu_memory_utilization}
    if stages := num_stages(timing):
        found["pipeline_parallel_size"] = stages
    if timing.enable_expert_parallel:
        found["enable_expert_parallel"] = True
    if is_quantized_on_loading(timing):
        found["quantization"] = "fp8"
    if timing.kv_cache_dtype != "auto":
        found["kv_cache_dtype"] = timing.kv_cache_dtype
    if timing.moe_backend != "auto":
        found["moe_backend"] = timing.moe_backend
    if timing.max_cudagraph_capture_size:
        found["max_cudagraph_capture_size"] = timing.max_cudagraph_capture_size
    elif timing.max_cudagraph_capture_size == 0:  # which vLLM refuses
        found["compilation_config"] = json.dumps({"cudagraph_mode": "FULL_DECODE_ONLY"})
    return found


def _connectors(pool: Pool) -> Iterator[tuple[str, Any]]:
    """Yield the flags that make vLLM hand KV over, and keep it beyond the GPU."""
    size, extra = _host_gib(pool), _tiers(pool.mocker)
    if pool.role == "aggregated":
        if size:
            yield "kv_offloading_size", size
        if size and extra:
            yield "kv_transfer_config", json.dumps({"kv_connector_extra_config": extra})
        return
    role = "kv_producer" if pool.role == "prefill" else "kv_consumer"
    policy = pool.mocker.kv_load_failure_policy
    transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": policy}
    # With --kv-offloading-size, vLLM would use the OffloadingConnector instead of NIXL's.
    extra = {"cpu_bytes_to_use": round(size * GIB)} | extra
    tier = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra} if size else None
    yield "kv_transfer_config", json.dumps(beside(transfer, tier))


def _host_gib(pool: Pool) -> float:
    """Return the host memory of each engine in GiB."""
    if not pool.mocker.num_host_blocks:
        return pool.mocker.kv_offloading_size
    host = resolve(pool.engine_config, pool.timing).host
    assert host is not None
    return host.num_chunks * whole_pages(host.chunk_bytes) / GIB


def _tiers(engine: EngineConfig) -> dict[str, Any]:
    """Return vLLM's settings for host memory beyond its size, and for the disk behind it."""
    given = changed(engine)
    found: dict[str, Any] = {name: given[name] for name in OF_CHUNKS if name in given}
    if engine.kv_disk_size:
        found |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs", "root_dir": DISK_FOLDER}]}
    return found


def _model(timing: TimingConfig) -> str:
    return hub_id(timing.model) if timing.model else "MODEL"


def _words(name: str, value: Any) -> Iterator[str]:
    """Yield a setting in the form of vLLM's command line."""
    flag = name.replace("_", "-")
    match value:
        case bool():
            yield f"--{flag}" if value else f"--no-{flag}"
        case float():
            yield from (f"--{flag}", f"{value:g}")
        case _:
            yield from (f"--{flag}", str(value))


def sglang_command(pool: Pool, quantization: str | None) -> Launch:
    """Return SGLang's command line; the quantization is one that it makes on loading."""
    timing = pool.timing
    if pool.engine_type == "vllm":
        config, left_out = _as_sglang(pool)
    else:
        own, left_out = pool.engine_config, list[str]()
        assert isinstance(own, SglangConfig)
        config = with_sglang_defaults(own, timing)
    settings = {name: getattr(config, name) for name in SGLANG_SAID} | changed(config)
    settings = {name: value for name, value in settings.items() if name not in SGLANG_LACKS}
    if config.enable_hierarchical_cache and not config.hicache_size:
        settings["hicache_ratio"] = config.host_ratio  # given, or SGLang would fit it to the memory of the machine
    settings["chunked_prefill_size"] = config.chunk_size or -1
    variables = [f"{SGLANG_VARIABLES[name]}={settings.pop(name)}" for name in SGLANG_VARIABLES if name in settings]
    given: dict[str, Any] = {
        "model_path": _model(timing),
        "tp_size": timing.tensor_parallel_size,
        "pp_size": num_stages(timing),
        **settings,
        "ep_size": timing.tensor_parallel_size if timing.enable_expert_parallel else None,
        "quantization": quantization,
        "kv_cache_dtype": {"fp8": "fp8_e4m3", "bfloat16": "bfloat16"}.get(timing.kv_cache_dtype),
        "disaggregation_mode": None if pool.role == "aggregated" else pool.role,
        "disaggregation_transfer_backend": None if pool.role == "aggregated" else "nixl",
    }
    command = ["python", "-m", "sglang.launch_server", *_flags(given, "-")]
    return Launch(["env", *variables, *command] if variables else command, left_out + _left_out(pool, SGLANG_HAS))


def _as_sglang(pool: Pool) -> tuple[SglangConfig, list[str]]:
    """Return settings of vLLM as SGLang's, and what it does not take of them."""
    engine, is_by_priority = pool.mocker, pool.mocker.scheduling_policy == "priority"
    chunk, share, left_out = engine.max_num_batched_tokens, pool.timing.gpu_memory_utilization, []
    if engine.enable_chunked_prefill and chunk < engine.block_size:
        left_out.append(f"a chunk of {chunk} tokens is less than a page")
    if share >= 1:
        left_out.append("mem_fraction_static must be below 1")
    config = SglangConfig(
        page_size=engine.block_size,
        max_running_requests=engine.max_num_seqs,
        context_length=engine.max_model_len,
        chunked_prefill_size=max(chunk, engine.block_size) if engine.enable_chunked_prefill else -1,
        mem_fraction_static=share if share < 1 else None,
        max_total_tokens=engine.num_gpu_blocks and (engine.num_gpu_blocks - 1) * engine.block_size,
        disable_radix_cache=not engine.enable_prefix_caching,
        disable_overlap_schedule=engine.async_scheduling is False,
        enable_priority_scheduling=is_by_priority,
        schedule_low_priority_values_first=is_by_priority,
    )
    return config, left_out


def trtllm_command(pool: Pool, quantization: str | None) -> Launch:
    """Return TensorRT-LLM's command line; it makes no quantization on loading."""
    timing = pool.timing
    config, left_out = pool.trtllm, list[str]()
    if pool.engine_type == "vllm":
        config, left_out = _as_trtllm(pool)
    given = {
        "tp_size": timing.tensor_parallel_size,
        "pp_size": num_stages(timing),
        "ep_size": timing.tensor_parallel_size if timing.enable_expert_parallel else None,
        "max_num_tokens": config.max_num_tokens,
        "max_batch_size": config.max_batch_size,
        "max_seq_len": config.max_seq_len,
        "enable_chunked_prefill": config.enable_chunked_context,
        "kv_cache_free_gpu_memory_fraction": config.kv_cache_free_gpu_memory_fraction,
        "extra_llm_api_options": TRTLLM_OPTIONS,
    }
    words = ["trtllm-serve", _model(timing), *_flags(given, "_")]
    file = json.dumps(_trtllm_options(pool, config))
    checkpoint = [f"use a checkpoint with {quantization} weights"] * bool(quantization)
    checkpoint += ["use a checkpoint with KV in 16 bits"] * (timing.kv_cache_dtype == "bfloat16" != stored_kv(timing))
    unit = [] if config.chunk_unit_size is None else ["no flag for chunk_unit_size"]
    return Launch(words, [f"{TRTLLM_OPTIONS} has {file}", *checkpoint, *unit, *left_out, *_left_out(pool, TRTLLM_HAS)])


def _trtllm_options(pool: Pool, config: TrtllmConfig) -> dict[str, Any]:
    """Return what the file of settings has."""
    options: dict[str, Any] = {"kv_cache_config": {"tokens_per_block": config.tokens_per_block}}
    for name, value in changed(config).items():
        if name in TRTLLM_FILE:
            section = options.setdefault(TRTLLM_FILE[name], {}) if TRTLLM_FILE[name] else options
            section[name.removeprefix("kv_cache_").removeprefix("attention_dp_")] = value
    if pool.timing.kv_cache_dtype == "fp8":
        options["kv_cache_config"]["dtype"] = "fp8"
    if pool.timing.moe_backend != "auto":
        options["moe_config"] = {"backend": pool.timing.moe_backend.upper()}
    if pool.role != "aggregated":
        options["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if pool.role == "prefill":
        options["disable_overlap_scheduler"] = True
    return options


def _as_trtllm(pool: Pool) -> tuple[TrtllmConfig, list[str]]:
    """Return settings of vLLM as TensorRT-LLM's, and what it does not take of them."""
    engine = pool.mocker
    is_cut = engine.enable_chunked_prefill and engine.block_size <= engine.max_num_batched_tokens
    left_out = (
        [] if is_cut == engine.enable_chunked_prefill else ["its chunks have at least a block: prompts are not cut"]
    )
    config = TrtllmConfig(
        tokens_per_block=engine.block_size,
        kv_cache_max_tokens=engine.num_gpu_blocks and (engine.num_gpu_blocks - 1) * engine.block_size,
        kv_cache_free_gpu_memory_fraction=pool.timing.gpu_memory_utilization,
        max_batch_size=engine.max_num_seqs,
        max_num_tokens=engine.max_num_batched_tokens,
        max_seq_len=engine.max_model_len,
        enable_chunked_context=is_cut,
        enable_block_reuse=engine.enable_prefix_caching,
        disable_overlap_scheduler=engine.async_scheduling is False,
    )
    return config, left_out


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
    names += ["max_cudagraph_capture_size"] * (pool.timing.max_cudagraph_capture_size is not None)
    return [f"no flag for {', '.join(names)}"] if names else []


def num_stages(timing: TimingConfig) -> int | None:
    """Return the stages of the model; None if there is only one, which is every engine's default."""
    return timing.pipeline_parallel_size if timing.pipeline_parallel_size > 1 else None


def is_quantized_on_loading(timing: TimingConfig) -> bool:
    """Say whether a flag gives the weights their type; vLLM makes only FP8, and only of weights in 16 bits."""
    return timing.quantization == "fp8" and stored_weights(timing) in ("", "bfloat16")


def stored_weights(timing: TimingConfig) -> str:
    """Return the type of the published weights."""
    return "" if timing.model is None else find_model(timing.model, timing.read_model_as).weights


def stored_kv(timing: TimingConfig) -> str:
    """Return the type of KV that the checkpoint asks for."""
    return "bfloat16" if timing.model is None else find_model(timing.model, timing.read_model_as).kv_dtype
