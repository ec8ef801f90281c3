"""Defaults of ours that differ from those of `vllm serve` 0.32, whose scheduler is simulated."""

from dynabench.deployment.description import Pool
from mocker import EngineConfig
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.gpu import Gpu

GIB = 2**30


def other_defaults(pool: Pool) -> str | None:
    """Name the settings that are at our defaults where vLLM's are others, with both; None if there are none."""
    timing = pool.timing
    if timing.timing_name != "roofline" or timing.gpu is None or timing.timed_as != "vllm":
        return None
    here = {name: getattr(pool.mocker, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    here["gpu_memory_utilization"] = timing.gpu_memory_utilization
    ours = {name: getattr(EngineConfig(), name, None) for name in here}
    ours["gpu_memory_utilization"] = TimingConfig().gpu_memory_utilization
    gpu = find_gpu(timing.gpu)
    theirs = _of_server(gpu)
    differing = [name for name, value in here.items() if value == ours[name] != theirs[name]]
    listed = ", ".join(f"{name} {here[name]:,g} (vLLM: {theirs[name]:,g})" for name in differing)
    return f"{listed}, if vllm serve 0.32 is started on {gpu.name} without these flags" if listed else None


def _of_server(gpu: Gpu) -> dict[str, float]:
    """Return the defaults of vLLM's server, which depend on the memory of the GPU."""
    is_large = gpu.memory >= 70 * GIB and gpu.name != "a100"
    tokens = 16_384 if gpu.memory >= 160 * GIB else 8_192 if is_large else 2_048
    return {
        "max_num_seqs": 1_024 if is_large else 256,
        "max_num_batched_tokens": tokens,
        "gpu_memory_utilization": 0.92,
    }
