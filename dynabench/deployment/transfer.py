"""What carries KV from the workers that prefill to those that decode."""

import math
from dataclasses import dataclass
from typing import Literal

from foundation.settings import Count, NotNegative, Positive, check
from mocker.timing.catalog import find_model
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import KvSize, kv_size

LLAMA_8B_BYTES, LLAMA_8B_LAYERS = 131_072.0, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Links between workers; without effect where no pool prefills.

    Workers fill nodes in the order of their numbers, and nodes fill racks. A transfer inside of a node passes through its
    two workers only, one inside of a rack through their nodes, too.
    """

    bandwidth_gb_s: NotNegative = 20.0
    """What each GPU of a worker can send, and receive (GB/s; 0: any amount); a worker has that times its GPUs."""

    latency_ms: NotNegative = 0.4
    """Fixed cost of a transfer, before its first byte (ms)."""

    block_us: NotNegative = 0.0
    """Cost of each block of a transfer (us), as of descriptors that are posted one by one."""

    kv_bytes_per_token: Positive | None = None
    """Bytes of a token's KV, on all GPUs of a worker (default: the model's; where none is named, the 131,072 of Llama-3.1-8B)."""

    gpus_per_node: Count | None = None
    """GPUs that share a node's link (default: each worker has a node of its own)."""

    node_bandwidth_gb_s: Positive | None = None
    """What a node can send to others, and receive (GB/s; default: what its workers can)."""

    nodes_per_rack: Count | None = None
    """Nodes that share a rack's link (default: there is one rack)."""

    rack_bandwidth_gb_s: Positive | None = None
    """What a rack can send to others, and receive (GB/s; default: what its nodes can)."""

    overlap: Literal["none", "chunk", "layer"] = "none"
    """When KV is sent: after the prefill (vLLM with NIXL); each chunk of a prompt when it is computed (SGLang); each layer
    (Splitwise, Mooncake)."""

    def __post_init__(self) -> None:
        """Refuse what no network can be."""
        check(self)
        if self.node_bandwidth_gb_s is not None and self.gpus_per_node is None:
            raise ValueError("node_bandwidth_gb_s needs gpus_per_node, which says who shares it")
        if self.rack_bandwidth_gb_s is not None and self.nodes_per_rack is None:
            raise ValueError("rack_bandwidth_gb_s needs nodes_per_rack, which says who shares it")

    @property
    def gpu_bandwidth(self) -> float:
        """What each GPU can send, and receive (bytes/s)."""
        return self.bandwidth_gb_s * 1e9 or math.inf

    @property
    def latency_s(self) -> float:
        """Fixed cost of a transfer (s)."""
        return self.latency_ms * 1e-3

    @property
    def block_s(self) -> float:
        """Cost of each block of a transfer (s)."""
        return self.block_us * 1e-6


def kv_size_of(transfer: TransferConfig, timing: TimingConfig, *, block_size: int) -> KvSize:
    """Return the size of the KV blocks that an engine reads; its tensor_parallel_size counts, not the sender's.

    Raises:
        ValueError: the model is not known, and kv_bytes_per_token is not given.
    """
    given = transfer.kv_bytes_per_token
    if timing.model is None:
        return KvSize(num_layers=LLAMA_8B_LAYERS, block=(given or LLAMA_8B_BYTES) * block_size)
    try:
        shape = find_model(timing.model)
    except ValueError as error:
        if given is None:
            raise ValueError(f"{error}; or give kv_bytes_per_token, the size of what is transferred") from None
        return KvSize(num_layers=LLAMA_8B_LAYERS, block=given * block_size)
    if given is not None:
        return KvSize(num_layers=shape.num_layers, block=given * block_size)
    return kv_size(
        shape,
        block_size=block_size,
        tensor_parallel_size=timing.tensor_parallel_size,
        kv_dtype=timing.kv_cache_dtype,
    )
