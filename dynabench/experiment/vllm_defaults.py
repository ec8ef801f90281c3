"""Defaults of ours that differ from those of `vllm serve`, as of 0.32."""

from dynabench.deployment.description import Pool
from dynabench.experiment.model_error import kind_of
from mocker import EngineConfig
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.vllm_defaults import GPU_MEMORY_UTILIZATION, server_defaults

BLOCK_SIZE = 16
"""Tokens of a block, unless the backend of a model's attention needs another size."""


def other_defaults(pool: Pool) -> str | None:
    """Name the settings that are at our defaults where vLLM's are others, with both; None if there are none."""
    timing = pool.timing
    if timing.timing_name != "roofline" or timing.gpu is None or timing.host_times != "vllm":
        return None
    engine, ours, gpu = pool.mocker, EngineConfig(), find_gpu(timing.gpu)
    theirs = server_defaults(gpu)
    settings: tuple[tuple[str, float, float, float | None], ...] = (
        ("max_num_seqs", engine.max_num_seqs, ours.max_num_seqs, theirs.max_num_seqs),
        (
            "max_num_batched_tokens",
            engine.max_num_batched_tokens,
            ours.max_num_batched_tokens,
            theirs.max_num_batched_tokens,
        ),
        ("block_size", engine.block_size, ours.block_size, _block_size(timing)),
        (
            "gpu_memory_utilization",
            timing.gpu_memory_utilization,
            TimingConfig().gpu_memory_utilization,
            GPU_MEMORY_UTILIZATION,
        ),
    )
    listed = ", ".join(
        f"{name} {value:,g} (vLLM: {'as its attention backend needs' if its is None else f'{its:,g}'})"
        for name, value, own, its in settings
        if value == own != its
    )
    return f"{listed}; vLLM's are the defaults of vllm serve on {gpu.name} as of 0.32" if listed else None


def _block_size(timing: TimingConfig) -> int | None:
    """Return vLLM's block size; None if the backend of latent or sparse attention, or of states, decides it."""
    is_usual = kind_of(timing.shape).split()[0] in ("dense", "mixture", "windowed")
    return BLOCK_SIZE if is_usual else None
