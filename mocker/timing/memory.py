"""How many KV blocks an engine has room for, as vLLM finds it: memory, less weights, less what a step needs."""

from mocker.timing.gpu import Gpu
from mocker.timing.model_shape import BYTES, ModelShape

OVERHEAD = 1.5 * 2**30
"""Bytes that a process holds outside of weights and KV cache: the CUDA context, graphs, workspaces."""
TP_OVERHEAD = 0.8 * 2**30
"""Bytes more where GPUs share a model: communication buffers."""


def num_kv_blocks(
    shape: ModelShape,
    gpu: Gpu,
    *,
    block_size: int,
    utilization: float,
    max_num_batched_tokens: int,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    weights: str = "",
    kv_dtype: str = "bfloat16",
) -> int:
    """Return the KV blocks that fit.

    Raises:
        ValueError: not even one does, as the weights fill the memory.
    """
    n = tensor_parallel_size
    layers, embeddings = shape.num_parameters(n, expert_parallel_size)
    weight_bytes = layers * BYTES[weights or shape.weights] + embeddings * BYTES["bfloat16"]
    widest = max(
        4 * shape.hidden_size + 3 * max(shape.ffn_size, shape.shared_expert_size) / n, shape.vocab_size / n / 16
    )
    activations = max_num_batched_tokens * widest * 2
    room = gpu.memory * utilization - weight_bytes - activations - OVERHEAD - (TP_OVERHEAD if n > 1 else 0)
    token = shape.kv_values(n) * shape.num_full_attention_layers * BYTES[kv_dtype]
    blocks = int(room // (token * block_size))
    if blocks < 2:
        raise ValueError(
            f"the weights need {weight_bytes / 2**30:.1f} GiB on each GPU and leave no room for KV blocks in "
            f"{utilization:.0%} of {gpu.name}'s {gpu.memory / 2**30:.1f} GiB; raise tensor_parallel_size"
        )
    return blocks
