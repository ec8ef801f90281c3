"""How many KV blocks an engine has: those that are asked for, or those that fit on its GPUs."""

from mocker.contract import EngineSettings
from mocker.sglang.config import SglangConfig
from mocker.timing.catalog import find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.drafter import drafter_shape
from mocker.timing.engine_times import expert_parallel_size, measured_engine
from mocker.timing.groups import layout_of, size_of_states
from mocker.timing.memory import GIB, peak_of_a_step, room_for_kv, size_of_weights
from mocker.timing.stages import layers_of_stages, saved_by_stages
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import EngineConfig

DEFAULT_NUM_BLOCKS = 16384
DEFAULT_NUM_TOKENS = 1 << 20
SGLANG_OUTSIDE = 0.7 * GIB
"""Bytes that are not free on each GPU when SGLang begins to load weights: CUDA's own. An H100 had 78.48 of 79.18 GiB in a
public log (Qwen3-30B-A3B-FP8, 2026-08-27)."""
SGLANG_OUTSIDE_TP = 1.9 * GIB
"""The same with the communication buffers of GPUs that share a model: H200s of an InferenceX run had 137.9 of 139.8 GiB."""


def blocks_for(name: str, num_tokens: int | None, engine: EngineSettings, timing: TimingConfig) -> int | None:
    """Return the blocks for so many tokens, or the default if neither they nor a GPU and a model are given."""
    if num_tokens is None:
        if timing.gpu is not None and timing.model is not None:
            return None
        num_tokens = DEFAULT_NUM_TOKENS
    if num_tokens < engine.block_size:
        raise ValueError(f"{name} is {num_tokens}; expected at least the {engine.block_size} tokens of a block")
    return num_tokens // engine.block_size


def blocks_that_fit(engine: EngineConfig, timing: TimingConfig) -> int:
    """Return the KV blocks that fit.

    Raises:
        ValueError: not even one fits, because the weights fill the memory.
    """
    if timing.timing_file is not None:
        return measured_engine(timing).get("num_gpu_blocks") or DEFAULT_NUM_BLOCKS
    if timing.gpu is None or timing.model is None:
        return DEFAULT_NUM_BLOCKS
    gpu, num_gpus = find_gpu(timing.gpu), timing.tensor_parallel_size
    num_expert_gpus = expert_parallel_size(engine, timing)
    room = room_for_kv(
        timing.shape,
        gpu,
        utilization=timing.gpu_memory_utilization,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
        tensor_parallel_size=num_gpus,
        expert_parallel_size=num_expert_gpus,
    )
    needed = size_of_weights(timing.shape, num_gpus, num_expert_gpus)
    if (drafter := drafter_shape(engine, timing)) is not None:
        extra = size_of_weights(drafter, num_gpus, num_expert_gpus)
        room, needed = room - extra, needed + extra
    if engine.enable_lora:  # vLLM makes the slots before it looks how much room is left
        slots = 2 * engine.max_loras * timing.shape.num_adapter_parameters(engine.max_lora_rank)
        room, needed = room - slots, needed + slots
    block = layout_of(engine, timing).block
    if timing.pipeline_parallel_size > 1:
        layers = layers_of_stages(timing.shape.num_layers, timing.pipeline_parallel_size)
        saved = saved_by_stages(
            timing.shape, layers, size_of_weights(timing.shape, num_gpus, num_expert_gpus), num_gpus
        )
        room, needed, block = room + saved, needed - saved, block * max(layers) / sum(layers)
    blocks = int(room // block)
    if blocks < 2:
        raise ValueError(
            f"the weights need {needed / GIB:.1f} GiB on each GPU and leave no room for KV blocks in "
            f"{timing.gpu_memory_utilization:.0%} of {gpu.name}'s {gpu.memory / GIB:.1f} GiB; raise tensor_parallel_size"
        )
    return blocks


def pages_that_fit(engine: SglangConfig, timing: TimingConfig, num_all_gpus: int) -> int:
    """Return the pages of KV in a share of the memory that is free before the weights are loaded, beside them.

    All GPUs share the experts if any are shared, those of a rank the rest.

    Raises:
        ValueError: the weights leave no room.
    """
    assert timing.gpu is not None
    assert engine.mem_fraction_static is not None
    gpu, num_gpus = find_gpu(timing.gpu), timing.tensor_parallel_size
    num_expert_gpus = num_all_gpus if timing.enable_expert_parallel else 1
    free = gpu.memory - (SGLANG_OUTSIDE_TP if num_all_gpus > 1 else SGLANG_OUTSIDE)
    weights = size_of_weights(timing.shape, num_gpus, num_expert_gpus)
    room = engine.mem_fraction_static * free - weights - size_of_states(timing, engine.num_rows(DEFAULT_NUM_TOKENS))
    page = layout_of(engine, timing).block
    if room < 2 * page:
        raise ValueError(
            f"the weights need {weights / GIB:.1f} GiB on each GPU and leave no room for KV in mem_fraction_static "
            f"({engine.mem_fraction_static:g}) of the {free / GIB:.1f} GiB that are free on {gpu.name} before they are "
            "loaded; raise tensor_parallel_size"
        )
    return int(room // page)


def blocks_of_free_memory(engine: TrtllmConfig, timing: TimingConfig, num_all_gpus: int) -> int:
    """Return the blocks of KV in a share of what the weights and the largest step leave (`configure_kv_cache_capacity`).

    What a step needs is taken as for vLLM, which nobody has compared with TensorRT-LLM's logs.

    Raises:
        ValueError: they leave no room.
    """
    assert timing.gpu is not None
    gpu, num_gpus = find_gpu(timing.gpu), timing.tensor_parallel_size
    num_expert_gpus = num_all_gpus if timing.enable_expert_parallel else 1
    needed = size_of_weights(timing.shape, num_gpus, num_expert_gpus)
    needed += peak_of_a_step(timing.shape, engine.max_num_tokens, engine.max_batch_size, num_gpus)
    free = max(gpu.memory - needed - size_of_states(timing, engine.max_batch_size), 0)
    block = layout_of(engine, timing).block
    room = engine.kv_cache_free_gpu_memory_fraction * free
    if room < 2 * block:
        raise ValueError(
            f"the weights and the largest step need {needed / GIB:.1f} GiB on each GPU and leave {free / GIB:.1f} of "
            f"{gpu.name}'s {gpu.memory / GIB:.1f} GiB free; kv_cache_free_gpu_memory_fraction "
            f"({engine.kv_cache_free_gpu_memory_fraction:g}) of that has no room for KV; raise tensor_parallel_size"
        )
    return int(room // block)
