"""How to deploy a plan's answer: command lines of engines, and where its router mode exists."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from dynabench.capacity.launch import Launch, sglang_command, trtllm_command
from dynabench.deployment.description import Deployment, Pool
from foundation.own_code import base_and_additions
from foundation.settings import changed
from mocker import EngineConfig
from mocker.models.catalog import find_model
from mocker.tiers.config import GIB, OffloadConfig, whole_pages
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from serving.engines.vllm.tiers import beside
from serving.router.elsewhere import name_elsewhere

VLLM = {"num_gpu_blocks": "num_gpu_blocks_override", "dp_size": "data_parallel_size"}
"""Engine settings that have another name in vLLM."""
SAID = ("max_num_batched_tokens", "max_num_seqs", "block_size")
"""Settings that are printed even at their defaults, because vLLM's defaults may differ."""
ELSEWHERE_SAID = ("kv_role", "kv_load_failure_policy", *OffloadConfig.__dataclass_fields__)
"""Settings that are entries of `kv_transfer_config`, or have no flag."""
OF_CHUNKS = ("blocks_per_chunk", "eviction_policy", "store_threshold", "offload_prompt_only")
DISK_FOLDER = "KV_FOLDER"
"""A placeholder for a folder on the disk."""


def deploy_commands(deployment: Deployment, file: str) -> list[str]:
    """Return the commands that start a deployment: our own, those of each pool's engine, and the router settings."""
    lines = [f"dynabench serve -f {shlex.quote(file)}  # the same deployment with simulated workers, on this host"]
    for pool in deployment.pools:
        words, left_out = engine_command(pool)
        lines.append(f"{shlex.join(words)}  # {', '.join([_note(pool), *left_out])}")
    for role in dict.fromkeys(pool.role for pool in deployment.pools):
        if sum(pool.replicas * pool.dp_size for pool in deployment.pools if pool.role == role) == 1:
            continue  # nothing to choose from
        mode = deployment.mode_of(role)
        lines.append(
            f"router{'' if role == 'aggregated' else f' for {role} workers'}: {mode} ({_where(deployment, mode)})"
        )
    return lines


def engine_command(pool: Pool) -> Launch:
    """Return the command line of the engine whose scheduler a pool has, or at least its step times; else vLLM's."""
    quantization = "fp8" if _is_quantized_on_loading(pool.timing) else None
    has_its_times = pool.engine_type == "vllm" and pool.timing.timing_name == "roofline"
    match pool.timing.timed_as if has_its_times else pool.engine_type:
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
    return ["vllm", "serve", timing.model or "MODEL", *(word for name, value in named for word in _words(name, value))]


def _of_timing(timing: TimingConfig) -> dict[str, Any]:
    found: dict[str, Any] = {"gpu_memory_utilization": timing.gpu_memory_utilization}
    if timing.enable_expert_parallel:
        found["enable_expert_parallel"] = True
    if _is_quantized_on_loading(timing):
        found["quantization"] = "fp8"
    if timing.kv_cache_dtype != "auto":
        found["kv_cache_dtype"] = timing.kv_cache_dtype
    return found


def _is_quantized_on_loading(timing: TimingConfig) -> bool:
    """Say whether a flag gives the weights their type; vLLM makes only FP8, and only of weights in 16 bits."""
    return timing.quantization == "fp8" and _stored(timing) in ("", "bfloat16")


def _stored(timing: TimingConfig) -> str:
    """Return the type of the published weights."""
    return "" if timing.model is None else find_model(timing.model, timing.read_model_as).weights


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


def _note(pool: Pool) -> str:
    """Say how many engines there are, and what no flag expresses."""
    timing, count = pool.timing, pool.gpus_per_worker
    parts = [f"start {pool.replicas}"] + [pool.role] * (pool.role != "aggregated")
    parts.append(f"{count} {timing.gpu or 'GPU'} each")
    if pool.mocker.kv_disk_size and timing.timed_as == "vllm":
        parts.append(f"{DISK_FOLDER} on a disk with {pool.mocker.kv_disk_size:g} GiB free: vLLM does not limit it")
    if timing.quantization not in (None, _stored(timing)) and not _is_quantized_on_loading(timing):
        parts.append(f"use a checkpoint with {timing.quantization} weights")
    return ", ".join(parts)


def _where(deployment: Deployment, mode: str) -> str:
    """Return a mode's name elsewhere, with the settings that it has there."""
    if found := name_elsewhere(mode, deployment.router):
        return found
    base, additions = base_and_additions(mode)
    found = name_elsewhere(base, deployment.router) if additions else None
    return f"dynabench only; without +{'+'.join(additions)} {found}" if found else "dynabench only"
