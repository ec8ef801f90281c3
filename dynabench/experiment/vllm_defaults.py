"""Defaults of ours that differ from those of `vllm serve`, as of 0.32."""

from dynabench.deployment.description import Pool
from mocker import EngineConfig
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.vllm_defaults import GPU_MEMORY_UTILIZATION, server_defaults


def other_defaults(pool: Pool) -> str | None:
    """Name the settings that are at our defaults where vLLM's are others, with both; None if there are none."""
    timing = pool.timing
    if timing.timing_name != "roofline" or timing.gpu is None or timing.host_times != "vllm":
        return None
    here = {name: getattr(pool.mocker, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    here["gpu_memory_utilization"] = timing.gpu_memory_utilization
    ours = {name: getattr(EngineConfig(), name, None) for name in here}
    ours["gpu_memory_utilization"] = TimingConfig().gpu_memory_utilization
    gpu = find_gpu(timing.gpu)
    theirs = server_defaults(gpu)._asdict() | {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
    differing = [name for name, value in here.items() if value == ours[name] != theirs[name]]
    listed = ", ".join(f"{name} {here[name]:,g} (vLLM: {theirs[name]:,g})" for name in differing)
    return f"{listed}; vLLM's are the defaults of vllm serve on {gpu.name} as of 0.32" if listed else None
