"""How much room an engine has for KV blocks, as vLLM 0.32 counts: memory, less weights, less the needs of a step.

A trial run over `max_num_batched_tokens` determines those, which then samples for `max_num_seqs` sequences:

    room = utilization * memory - weights - outside - graphs - max(layers, sampling)

    layers   = tokens * (hidden state, residual, both halves of the MLP in 16 bits, their product as the GPU computes;
                         for each routed expert of a mixture the MLP's product and output)
    sampling = sequences * vocabulary * 4 bytes * SAMPLING_COPIES + tokens * hidden * 2 bytes * HIDDEN_COPIES

benchmarks/kv_room.py compares this with vLLM's own logs.
"""

from math import ceil

from mocker.models.layers import Matrix
from mocker.models.shape import ModelShape
from mocker.models.weight_types import MXFP4
from mocker.timing.gpu import Gpu

MXFP4_HIDDEN = {"hopper": 128}
"""What the hidden size of MXFP4 experts is padded to a multiple of, by architecture; elsewhere 256."""
GIB = 2**30
OUTSIDE = 0.13 * GIB
"""Bytes that CUDA uses outside torch's allocator on each GPU."""
OUTSIDE_TP = 0.55 * GIB
"""The same with the communication buffers of GPUs that share a model."""
GRAPHS = 0.3 * GIB
"""Bytes kept for CUDA graphs, which vLLM counts since 0.21; they were 0.1 to 0.6 GiB."""
SAMPLING_COPIES = 3.6
"""Logits in 16 and 32 bits, probabilities and random numbers. Until about 0.16, which also sorted, it was 9.57."""
HIDDEN_COPIES = 1.28
"""All hidden states, and those that samples are drawn from; the same in logs of five models."""


def room_for_kv(
    shape: ModelShape,
    gpu: Gpu,
    *,
    utilization: float,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
) -> float:
    """Return the bytes left for KV blocks on each GPU; below 0, the weights do not fit."""
    n = tensor_parallel_size
    taken = size_of_weights(shape, n, expert_parallel_size) + padding_of_experts(shape, gpu, n, expert_parallel_size)
    taken += peak_of_a_step(shape, max_num_batched_tokens, max_num_seqs, n)
    taken += (OUTSIDE_TP if n > 1 else OUTSIDE) + GRAPHS
    return gpu.memory * utilization - taken


def size_of_weights(shape: ModelShape, num_gpus: int = 1, expert_parallel_size: int = 1) -> float:
    """Return the bytes of the weights on one GPU."""
    size = 2.0 * (shape.embedding_parameters / num_gpus + shape.num_other_parameters)
    for mixer, count in shape.mixers:
        size += count * (_size(mixer.matrices, num_gpus) + 2.0 * mixer.num_other_parameters)
    for network, count in shape.feed_forwards:
        size += count * (_size(network.matrices, num_gpus) + 2.0 * network.num_other_parameters)
        whole = expert_parallel_size > 1
        expert = _size(network.expert_matrices, 1 if whole else num_gpus)
        size += count * network.num_experts * expert / expert_parallel_size
    return size


def padding_of_experts(shape: ModelShape, gpu: Gpu, num_gpus: int, expert_parallel_size: int) -> float:
    """Return the bytes by which vLLM pads MXFP4 experts on one GPU, whose kernels need even sizes."""
    size, slices = 0.0, num_gpus if expert_parallel_size == 1 else 1
    for network, count in shape.feed_forwards:
        if network.num_experts and network.expert_matrices[0].weight == MXFP4:
            hidden, inner = network.expert_matrices[0].inputs.size, network.expert_size / slices
            padded = _whole(hidden, MXFP4_HIDDEN.get(gpu.architecture, 256)) * _whole(inner, 128) / (hidden * inner) - 1
            experts = network.num_experts * _size(network.expert_matrices, slices) / expert_parallel_size
            size += count * experts * padded
    return size


def _whole(size: float, unit: int) -> float:
    return unit * ceil(size / unit)


def _size(matrices: tuple[Matrix, ...], num_gpus: int) -> float:
    size = 0.0
    for matrix in matrices:
        inputs, outputs = matrix.on_gpu(num_gpus)
        size += inputs * outputs * matrix.weight.bytes
    return size


def peak_of_a_step(shape: ModelShape, num_tokens: int, num_sequences: int, num_gpus: int) -> float:
    """Return the bytes that vLLM keeps free for the tensors of a step, on one GPU."""
    product = 1.0 if shape.weights == "fp8" else 2.0
    hidden, per_token = shape.hidden_size, 0.0
    for network, _ in shape.feed_forwards:
        routed = 2 * network.experts_per_token * (hidden + network.expert_size / num_gpus)
        per_token = max(per_token, (2 * 2 + product) * network.size / num_gpus + routed)
    layers = num_tokens * (2 * 2 * hidden + per_token)
    sampling = num_sequences * shape.vocab_size * 4 * SAMPLING_COPIES
    return max(layers, sampling + num_tokens * hidden * 2 * HIDDEN_COPIES)
