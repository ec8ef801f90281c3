"""What SGLang 0.5.23 sets by default, depending on the memory of the GPU that it finds.

The largest prefill and the batches for which it captures CUDA graphs follow from the memory. What it leaves free follows
from these (MiB; one pipeline stage, no speculation):

    kept free = 512 + 1.5 prefill tokens + 128 GPUs + 2 sequences of the largest graph + graphs of prefills
                + 3 sequences of the largest graph for each rank of attention DP; 4.5 if it has more than 300
    graphs of prefills = 8 for each size, or 1,536 for models with latent attention
    mem_fraction_static = 1 - kept free / memory, where at least 10 GiB are kept free on GPUs with more than 60 GiB

Prefill workers have no graphs of decodes, and decode workers none of prefills; their "prefill tokens" are the requests that may
run, or else those of the largest graph, but at least 2,048 as everywhere.

Source: `srt/arg_groups/memory_hook.py` and `cuda_graph_hook.py` of its wheel. SGLang reads the memory from nvidia-smi, which
is 0.5% more than torch reports, so the share can differ by 0.001.
"""

from dataclasses import replace
from typing import NamedTuple

from mocker.models.shape import ModelShape
from mocker.sglang.config import USUAL_CHUNK, DisaggregationMode, SglangConfig
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.gpu import Gpu
from mocker.timing.memory import GIB

MIB = 2**20


class MemoryClass(NamedTuple):
    """Defaults on GPUs with less than so much memory."""

    below_gib: float
    chunk: int
    largest_graph: int
    """Sequences of the largest decode that runs as a CUDA graph."""
    largest_graph_tp: int
    """The same where at least four GPUs share the model."""


CLASSES = (
    MemoryClass(20, 2048, 8, 8),
    MemoryClass(35, 4096, 48, 160),
    MemoryClass(60, 4096, 32, 160),
    MemoryClass(160, USUAL_CHUNK, 256, 512),
    MemoryClass(float("inf"), 16384, 512, 512),
)
GRAPHS_OF_PREFILLS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (float("inf"), 512))
"""Sizes for which prefills have CUDA graphs: up to the first number, in steps of the second."""


def usual_chunk(gpu: Gpu) -> int:
    """Return the most prompt tokens that SGLang computes in one step on a GPU."""
    return _memory_class(gpu).chunk


def static_share(
    gpu: Gpu,
    shape: ModelShape,
    *,
    num_gpus: int,
    num_tokens: int,
    max_running: int | None,
    mode: DisaggregationMode = "null",
    num_ranks: int = 1,
) -> float:
    """Return the share of the memory that SGLang takes for weights and KV cache.

    Args:
        gpu: each of the GPUs.
        shape: the model.
        num_gpus: GPUs that share each layer.
        num_tokens: most prompt tokens in one step.
        max_running: most requests that may run at once, if that is set.
        num_ranks: ranks of attention DP.
        mode: its part in disaggregation; a step of a decode worker has a token for each request.
    """
    found, memory = _memory_class(gpu), gpu.memory / MIB
    graph = found.largest_graph if num_gpus < 4 else found.largest_graph_tp
    if max_running is not None:
        graph = min(graph, max_running)
    if mode == "decode":
        num_tokens = max_running or graph
    kept = 512 + 1.5 * max(num_tokens, 2048) + 128 * num_gpus
    if mode != "prefill":
        kept += 2 * graph
    if mode != "decode":
        kept += _prefill_graphs(shape, num_tokens)
    if num_ranks > 1:
        kept += graph * num_ranks * (4.5 if graph > 300 else 3)
    if memory > 60 * 1024:
        kept = max(kept, 10 * 1024)
    return round((memory - kept) / memory, 3)


def _memory_class(gpu: Gpu) -> MemoryClass:
    return next(each for each in CLASSES if gpu.memory < each.below_gib * GIB)


def _prefill_graphs(shape: ModelShape, num_tokens: int) -> float:
    """Return what CUDA graphs of prefills of at most so many tokens take (MiB)."""
    if any(mixer.latent_flops for mixer, _ in shape.mixers):
        return 1536
    num_graphs = size = 0
    for most, step in GRAPHS_OF_PREFILLS:
        while size < most and size + step <= num_tokens:
            size += step
            num_graphs += 1
    return 8 * num_graphs


def with_sglang_defaults(engine: SglangConfig, timing: TimingConfig) -> SglangConfig:
    """Set what SGLang would choose for the GPU and the model; what is set stays as it is.

    Raises:
        ValueError: the GPU or the model is unknown.
    """
    if timing.gpu is None or timing.model is None:
        return engine
    gpu = find_gpu(timing.gpu)
    if engine.chunked_prefill_size is None:
        engine = replace(engine, chunked_prefill_size=usual_chunk(gpu))
    if engine.mem_fraction_static is None:
        share = static_share(
            gpu,
            timing.shape,
            num_gpus=timing.tensor_parallel_size,
            num_tokens=engine.chunk_size or engine.max_prefill_tokens,
            max_running=engine.max_running_requests,
            num_ranks=engine.attn_dp_size,
            mode=engine.disaggregation_mode,
        )
        engine = replace(engine, mem_fraction_static=share)
    return engine
