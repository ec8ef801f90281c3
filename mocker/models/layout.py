"""Whether an engine can divide a model over its GPUs: what vLLM 0.32 refuses before it loads weights.

    attention heads     divided equally
    KV heads            divided equally, or where GPUs are more than heads, each repeated on equally many
    widths, states      divided equally; where blocks of weights share a scale, into whole blocks
    experts             divided like widths, but blocks may be split; with expert parallelism they stay whole
    vocabulary          padded, then divided equally

Pipeline stages are no reason: vLLM deals layers out unevenly if need be.

tests/real_engines/test_vllm_layouts.py compares this with vLLM, model by model.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from mocker.models.layers import FeedForward, Matrix
from mocker.models.shape import ModelShape
from mocker.models.weight_types import NVFP4

VOCABULARY_PADDING = 64
SMALLEST_BLOCK = 32
"""Experts' blocks of FP8 weights are split where a GPU's share is not made of whole ones, down to this side."""
NVFP4_GROUP = 16
NOT_REPEATED = ("gpt_oss",)
"""Architectures whose classes in vLLM do not repeat KV heads."""
NOT_BEYOND_EXPERTS = (
    "minimax_m2",
    "mimo_v2_flash",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_vl_moe",
    "qwen3_next",
    "qwen3_5_moe",
)
"""Architectures whose classes refuse more GPUs than experts."""


class DividedPart(NamedTuple):
    """What each GPU gets an equal share of."""

    size: int
    name: str
    """In the plural."""


def refusal(shape: ModelShape, *, tensor_parallel_size: int = 1, enable_expert_parallel: bool = False) -> str | None:
    """Return why an engine refuses a layout, or None if it starts.

    Args:
        shape: the model that is divided.
        tensor_parallel_size: GPUs that share each layer.
        enable_expert_parallel: whether experts stay whole; else each is divided like a layer.
    """
    return next(_refusals(shape, tensor_parallel_size, enable_expert_parallel), None)


def unmeasured(shape: ModelShape, *, tensor_parallel_size: int = 1, enable_expert_parallel: bool = False) -> str | None:
    """Return why the step times of a layout that starts are not known: vLLM splits the blocks of its experts' scales."""
    if enable_expert_parallel:
        return None
    for network, _ in shape.feed_forwards:
        share = network.expert_size // tensor_parallel_size
        if network.num_experts and _has_blocks(shape, network.expert_matrices[0]) and share % shape.weight_block:
            return (
                f"{_no_expert_blocks(shape, network, tensor_parallel_size)}; vLLM 0.32 splits such blocks, older versions refuse, and the kernels for split blocks were not "
                "measured; enable_expert_parallel leaves experts whole"
            )
    return None


def _refusals(shape: ModelShape, num_gpus: int, enable_expert_parallel: bool) -> Iterator[str]:
    for part in _parts(shape):
        if part.size % num_gpus:
            yield f"{part.size} {part.name} cannot be divided over tensor_parallel_size {num_gpus}"
    for heads in sorted({mixer.num_kv_heads for mixer, _ in shape.mixers if mixer.num_kv_heads}):
        if heads % num_gpus and (num_gpus % heads or shape.architecture in NOT_REPEATED):
            yield f"{heads} KV heads can be neither divided over nor repeated on tensor_parallel_size {num_gpus}"
    if num_gpus > shape.num_experts and shape.architecture in NOT_BEYOND_EXPERTS:
        yield f"{shape.num_experts} experts are fewer than tensor_parallel_size {num_gpus}"
    for name, size, block in _blocked(shape) if num_gpus > 1 else ():
        if size // num_gpus % block:
            yield _no_blocks(f"the {name}", size, num_gpus, block)
    if not enable_expert_parallel:
        yield from _of_experts(shape, num_gpus)
    elif not shape.num_experts:
        yield "enable_expert_parallel needs a model with experts"


def _parts(shape: ModelShape) -> Iterator[DividedPart]:
    """Yield what tensor parallelism divides, KV heads and experts excepted."""
    for mixer, _ in shape.mixers:
        yield DividedPart(mixer.num_heads, "attention heads")
        yield DividedPart(mixer.num_state_heads, f"heads of {mixer.kind}")
        if mixer.num_state_groups > 1:
            yield DividedPart(mixer.num_state_groups, f"groups of {mixer.kind}")
    for network, _ in shape.feed_forwards:
        yield DividedPart(network.size, "feed-forward channels")
    yield DividedPart(
        math.ceil(shape.vocab_size / VOCABULARY_PADDING) * VOCABULARY_PADDING, "rows of the padded vocabulary"
    )


def _of_experts(shape: ModelShape, num_gpus: int) -> Iterator[str]:
    for network, _ in shape.feed_forwards:
        if network.expert_size % num_gpus:
            yield (
                f"{network.expert_size} channels of each expert cannot be divided over tensor_parallel_size {num_gpus}; "
                "enable_expert_parallel leaves experts whole"
            )
        elif network.num_experts and _breaks_blocks(shape, network, network.expert_size // num_gpus):
            yield f"{_no_expert_blocks(shape, network, num_gpus)}; enable_expert_parallel leaves experts whole"


def _breaks_blocks(shape: ModelShape, network: FeedForward, share: int) -> bool:
    """Return whether blocks cannot be split so that a GPU's share of an expert consists of whole ones."""
    into, block = network.expert_matrices[0], shape.weight_block
    if not _has_blocks(shape, into) or share % block == 0:
        return False
    return math.gcd(block, share, into.inputs.size) < SMALLEST_BLOCK


def _blocked(shape: ModelShape) -> Iterator[tuple[str, int, int]]:
    """Yield the widths of layers that must be divided into whole blocks; vLLM exempts matrices that it fuses."""
    matrices = [matrix for mixer, _ in shape.mixers for matrix in mixer.matrices]
    matrices += [matrix for network, _ in shape.feed_forwards for matrix in network.matrices]
    for matrix in matrices:
        is_row, has_blocks = matrix.inputs.num_pieces > 1, _has_blocks(shape, matrix)
        if is_row and (has_blocks or matrix.weight == NVFP4):
            block = shape.weight_block if has_blocks else NVFP4_GROUP
            yield f"inputs of {matrix.modules[0]}", matrix.inputs.size, block
        elif has_blocks and len(matrix.modules) == len(matrix.outputs) == 1 and matrix.outputs[0].num_pieces > 1:
            yield f"outputs of {matrix.modules[0]}", matrix.outputs[0].size, shape.weight_block


def _has_blocks(shape: ModelShape, matrix: Matrix) -> bool:
    return bool(shape.weight_block) and matrix.weight.name == "fp8"


def _no_expert_blocks(shape: ModelShape, network: FeedForward, num_gpus: int) -> str:
    return _no_blocks("channels of each expert", network.expert_size, num_gpus, shape.weight_block)


def _no_blocks(what: str, size: int, num_gpus: int, block: int) -> str:
    return f"{what}, {size}/{num_gpus} = {size // num_gpus} on each GPU, are not a multiple of {block}, the size of a scale block"
