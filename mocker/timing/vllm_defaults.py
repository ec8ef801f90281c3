"""What `vllm serve` 0.32 sets by default, depending on the GPU that it finds."""

from typing import NamedTuple

from mocker.timing.gpu import Gpu

GIB = 2**30

GPU_MEMORY_UTILIZATION = 0.92


class ServerDefaults(NamedTuple):
    """The defaults that depend on the GPU's memory."""

    max_num_seqs: int
    max_num_batched_tokens: int


def largest_graph(gpu: Gpu, max_num_seqs: int, num_speculative_tokens: int) -> int:
    """Return the most tokens of a step for which vLLM captures CUDA graphs."""
    return min(2 * max_num_seqs * (1 + num_speculative_tokens), 1024 if gpu.architecture == "blackwell" else 512)


def server_defaults(gpu: Gpu) -> ServerDefaults:
    """Return the defaults of vLLM's server on a GPU."""
    if gpu.memory >= 160 * GIB:
        return ServerDefaults(1024, 16_384)
    return USUAL if gpu.memory >= 70 * GIB and gpu.name != "a100" else ServerDefaults(256, 2_048)


USUAL = ServerDefaults(1024, 8_192)
"""Those on a GPU like an H100."""
