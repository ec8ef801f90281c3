"""What `vllm serve` 0.32 sets by default, depending on the GPU that it finds."""

from typing import NamedTuple

from mocker.timing.gpu import Gpu

GIB = 2**30

GPU_MEMORY_UTILIZATION = 0.92
MAX_CUDAGRAPH_CAPTURE_SIZE = 512
"""With at least 256 sequences."""


class ServerDefaults(NamedTuple):
    """The defaults that depend on the GPU's memory."""

    max_num_seqs: int
    max_num_batched_tokens: int


def server_defaults(gpu: Gpu) -> ServerDefaults:
    """Return the defaults of vLLM's server on a GPU."""
    if gpu.memory >= 160 * GIB:
        return ServerDefaults(1024, 16_384)
    return USUAL if gpu.memory >= 70 * GIB and gpu.name != "a100" else ServerDefaults(256, 2_048)


USUAL = ServerDefaults(1024, 8_192)
"""Those on a GPU like an H100."""
